"""When a request to a server is made again: nobody answered, or the server was busy. Never once an answer has begun."""

from __future__ import annotations

import math
import time
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
from tenacity import RetryCallState, stop_after_attempt, stop_before_delay, wait_exponential, wait_random

LONGEST_SECONDS = 60.0
"""A server that asks for more patience is not asked again."""
_LOST = (httpx.ConnectError, httpx.ConnectTimeout, httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)
"""A timeout while it answers is none of them: the answer would take as long again."""
_BUSY = (408, 429)
_backoff = wait_exponential(multiplier=0.5, max=8) + wait_random(0, 0.5)


def again(most: int, seconds: float | None = None) -> dict[str, Any]:
    """How tenacity's `Retrying` and `AsyncRetrying` ask again: at most so often, and no later than after `seconds`.

    What they call gives a response, whose last one they give back, or raises as httpx does.
    """
    stop = stop_after_attempt(most + 1)
    return {
        "stop": stop if seconds is None else stop | stop_before_delay(seconds),
        "wait": _wait,
        "retry": _may_be_asked_again,
        "retry_error_callback": lambda state: state.outcome.result(),
    }


def retry_after(response: httpx.Response) -> float | None:
    """Seconds that the server asks to wait, from a number or a date."""
    given = response.headers.get("retry-after", "").strip()
    try:
        seconds = float(given) if not given.endswith("GMT") else parsedate_to_datetime(given).timestamp() - time.time()
    except ValueError:
        return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _may_be_asked_again(state: RetryCallState) -> bool:
    assert state.outcome is not None
    if (error := state.outcome.exception()) is not None:
        return isinstance(error, _LOST)
    response = state.outcome.result()
    if response.headers.get("x-should-retry", "").lower() == "false":
        return False
    busy = response.status_code in _BUSY or response.status_code >= 500
    return busy and (retry_after(response) or 0) <= LONGEST_SECONDS


def _wait(state: RetryCallState) -> float:
    assert state.outcome is not None
    asked = None if state.outcome.failed else retry_after(state.outcome.result())
    return _backoff(state) if asked is None else asked
