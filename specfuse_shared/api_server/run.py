"""The server process: it listens, loads its models, answers requests, and stops on a signal."""

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
"""Interval of the checks for a failed engine and for a stop signal."""
LAST_WORDS_SECONDS = 10
"""Time to send the errors of answers that did not finish within `stop_seconds`."""
INTERRUPTED = 130


def serve(config: ServeConfig, on_listening: Callable[[str], None] = lambda address: None) -> None:
    """Serve until SIGINT or SIGTERM; then answers may finish within `stop_seconds`. A second signal does not wait.

    Raises `ConfigError` if the server cannot listen at the address, the errors of loading, and `EngineClosedError`
    after an engine has failed and the answers of other ensembles have finished.
    """
    settings = config.server
    clients = Clients(settings, config.api_key(), config.clients)
    with ExitStack() as stack:
        # a request that waits for a queue slot would block a thread that parses bodies
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
    """The configured uvicorn server. Its access log is off, because the guard logs requests."""
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
    """Listen and load at the same time. An error of loading stops the server and is raised.

    Answers that are unfinished `stop_seconds` after the signal end with an error.
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
        while not models.failed:
            await asyncio.sleep(WATCH_SECONDS)
        logger.critical("the engine of %s failed: the server stops", ", ".join(models.failed))
        server.should_exit = True

    async def stop() -> None:
        while not server.should_exit:
            await asyncio.sleep(WATCH_SECONDS)
        await asyncio.sleep(stop_seconds)
        await asyncio.to_thread(models.close)

    loading = asyncio.create_task(load())
    watching, stopping = asyncio.create_task(watch()), asyncio.create_task(stop())
    for number in stop_signals():  # uvicorn raises the signal that stopped it again at the end
        signal.signal(number, lambda *_: None)
    await server.serve(sockets=[listening])
    if models.status == "loading":
        logger.warning("stopped while the models were being loaded")
        os._exit(INTERRUPTED)  # loading cannot be interrupted, and no client waits for an answer
    watching.cancel()
    stopping.cancel()
    await loading
    for name in models.failed:
        raise EngineClosedError(f"the engine of {name!r} failed, so the server has stopped: start it again")


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
        what = f"the server cannot listen at {settings.host} port {settings.port} ({error.strerror or error})"
        raise ConfigError(f"{what}: choose another --port, or stop the program that listens there") from error
