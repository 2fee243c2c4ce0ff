"""The server process: it listens at once, loads its models, answers, and stops on a signal."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import uvicorn
from starlette.types import ASGIApp

from specfuse_shared.api_server.access.clients import Clients
from specfuse_shared.api_server.access.connections import protocol_of
from specfuse_shared.api_server.app import Service, build_app
from specfuse_shared.api_server.models import Models
from specfuse_shared.api_server.settings import ServeConfig, ServerSettings
from specfuse_shared.errors import ConfigError, EngineClosedError
from specfuse_shared.serving import admission
from specfuse_shared.serving.engine import EnsembleEngine

logger = logging.getLogger(__name__)

BACKLOG = 1024
WATCH_SECONDS = 1.0
"""Between two looks whether an engine broke, or the server shall stop."""
LAST_WORDS_SECONDS = 10
"""For the errors of answers that did not finish within `stop_seconds`."""
INTERRUPTED = 130


def serve(config: ServeConfig, on_listening: Callable[[str], None] = lambda address: None) -> None:
    """Serve until SIGINT or SIGTERM; then answers finish within `stop_seconds`. A second signal does not wait.

    Raises `ConfigError` for an address that cannot be listened at, what loading the members raises, and
    `EngineClosedError` once an engine broke: then answers of other ensembles finish, and a supervisor starts anew.
    """
    settings = config.server
    clients = Clients(settings, config.api_key(), config.clients)
    with ExitStack() as stack:
        # a queue that is waited for would hold the threads that requests are read in
        ensembles = {name: replace(ensemble, when_busy="raise") for name, ensemble in config.ensembles.items()}
        engines = {name: stack.enter_context(EnsembleEngine(each)) for name, each in ensembles.items()}
        listening = stack.enter_context(_listen(settings))
        on_listening(address_of(settings.host, listening.getsockname()[1]))
        models = Models(engines)
        app = build_app(Service(models, settings, config.sampling), clients)
        handlers = {number: signal.getsignal(number) for number in stop_signals()}
        try:
            asyncio.run(_run(http_server(app, settings), listening, models, settings.stop_seconds))
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def http_server(app: ASGIApp, settings: ServerSettings) -> uvicorn.Server:
    """uvicorn as this server runs it: the guard logs requests, so that it must not."""
    config = uvicorn.Config(
        app,
        http=protocol_of(settings),
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=math.ceil(settings.stop_seconds) + LAST_WORDS_SECONDS,
    )
    return uvicorn.Server(config)


async def _run(server: uvicorn.Server, listening: socket.socket, models: Models, stop_seconds: float) -> None:
    """Listen and load at the same time; models that cannot be loaded stop the server, and raise.

    Answers that are unfinished `stop_seconds` after the signal end with an error that says so.
    """

    async def load() -> None:
        try:
            await asyncio.to_thread(models.load)
        except BaseException:
            server.should_exit = True
            raise
        admission.settle()
        logger.info("ready: %s", ", ".join(model.id for model in models.all()))

    async def watch() -> None:
        while not models.broken:
            await asyncio.sleep(WATCH_SECONDS)
        logger.critical("the engine of %s broke: the server stops", ", ".join(models.broken))
        server.should_exit = True

    async def stop() -> None:
        while not server.should_exit:
            await asyncio.sleep(WATCH_SECONDS)
        await asyncio.sleep(stop_seconds)
        await asyncio.to_thread(models.close)

    loading = asyncio.create_task(load())
    watching, stopping = asyncio.create_task(watch()), asyncio.create_task(stop())
    for number in stop_signals():  # uvicorn re-raises the signal that stopped it at the end
        signal.signal(number, lambda *_: None)
    await server.serve(sockets=[listening])
    if models.status == "loading":
        logger.warning("stopped while the models were being loaded")
        os._exit(INTERRUPTED)  # loading cannot be interrupted, and no client waits for an answer
    watching.cancel()
    stopping.cancel()
    await loading
    for name in models.broken:
        raise EngineClosedError(f"the engine of {name!r} broke, so the server has stopped: start it again")


def stop_signals() -> tuple[int, ...]:
    """The signals that stop the server. On Windows supervisors send Ctrl-Break."""
    return tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGBREAK") if hasattr(signal, name))


def address_of(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _listen(settings: ServerSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    except OSError as error:
        what = f"{settings.host} port {settings.port} cannot be listened at ({error.strerror or error})"
        raise ConfigError(f"{what}: choose another --port, or stop what listens there") from error
