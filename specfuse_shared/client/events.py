"""What a server tells of an answer, read back as events; needs httpx."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from httpx import Response, TransportError

from specfuse_shared.bounded_http import ResponseRefusedError
from specfuse_shared.client.wire import error_from_json, event_from_json
from specfuse_shared.errors import EngineClosedError, GenerationError, SpecFuseError
from specfuse_shared.events import Event, FinishEvent, SegmentEvent

_DATA, _DONE = "data: ", "[DONE]"
END_SECONDS = 1.0
"""How long the end of a response may take whose answer is there; only one that was read to it leaves its connection."""


class _Lines:
    """Lines of a response. Line feeds alone end one: httpx also splits at U+2028, which texts may hold."""

    def __init__(self) -> None:
        self._begun: list[bytes] = []

    def take(self, part: bytes) -> list[str]:
        """The lines that this part completes."""
        self._begun.append(part)
        if b"\n" not in part:
            return []
        *whole, rest = b"".join(self._begun).split(b"\n")
        self._begun = [rest]
        return [line.decode("utf-8", "replace").rstrip("\r") for line in whole]


def _lines(response: Response) -> Iterator[str]:
    lines = _Lines()
    for part in response.iter_bytes():
        yield from lines.take(part)


async def _alines(response: Response) -> AsyncGenerator[str, None]:
    lines = _Lines()
    async for part in response.aiter_bytes():
        for line in lines.take(part):
            yield line


class RemoteStream(Iterator[Event]):
    """The events of one answer; stops it when it is closed or no longer referenced, even if never iterated.

    `kept`: what would close the response's connection if it were dropped.
    """

    def __init__(self, response: Response, kept: object = None) -> None:
        self._response = response
        self._kept = kept
        self._read = _EventReader()
        self._lines = _lines(response)

    def __next__(self) -> Event:
        try:
            for line in self._lines:
                if (event := self._read.event(line)) is not None:
                    if isinstance(event, FinishEvent):
                        self.close()
                    return event
        except ResponseRefusedError as error:
            self.close()
            raise self._read.refused(error) from error
        except TransportError as error:
            raise self._read.lost() from error
        except SpecFuseError:
            self.close()
            raise
        if not self._read.over:
            raise self._read.lost()
        raise StopIteration

    def close(self) -> None:
        """Stop the answer."""
        self._read.over, self._lines = True, iter(())
        self._response.close()

    def __del__(self) -> None:
        self.close()


async def events_of(response: Response) -> AsyncGenerator[Event, None]:
    """The same on an event loop."""
    read, lines = _EventReader(), _alines(response)
    try:
        async for line in lines:
            if (event := read.event(line)) is not None:
                yield event
            if read.over:
                with suppress(TimeoutError, TransportError):
                    async with asyncio.timeout(END_SECONDS):
                        async for _ in lines:
                            pass
                return
    except ResponseRefusedError as error:
        raise read.refused(error) from error
    except TransportError as error:
        raise read.lost() from error
    raise read.lost()


@contextmanager
def understood(server: str) -> Iterator[None]:
    """Raises `SpecFuseError` where what a server sends has another form than SpecFuse's."""
    try:
        yield
    except SpecFuseError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:  # pydantic's are ValueErrors
        raise SpecFuseError(
            f"{server} does not answer as a server of SpecFuse does ({type(error).__name__})"
        ) from error


class _EventReader:
    """Reads lines of server-sent events, and knows the text so far."""

    def __init__(self) -> None:
        self.text = ""
        self.over = False

    def event(self, line: str) -> Event | None:
        """The event of a line; None for lines that tell of none. Raises the error that a line holds."""
        if not line.startswith(_DATA) or line == _DATA + _DONE:
            return None
        with understood("the server"):
            return self._event(json.loads(line.removeprefix(_DATA)))

    def _event(self, data: Mapping[str, Any]) -> Event | None:
        if (error := data.get("error")) is not None:
            raise error_from_json(error.get("specfuse") or error)
        told: Mapping[str, Any] = data["choices"][0].get("specfuse", {}) if data["choices"] else {}
        for found in told.get("events", ()):
            event = event_from_json(found)
            self.text += event.text if isinstance(event, SegmentEvent) else ""
            self.over = isinstance(event, FinishEvent)
            return event
        if (error := told.get("error")) is not None:
            raise error_from_json(error)
        return None

    def refused(self, error: Exception) -> GenerationError:
        return GenerationError(f"the server is not believed: {error}", member=None, text=self.text)

    def lost(self) -> EngineClosedError:
        return EngineClosedError("the server went away while it answered: try again", text=self.text)
