"""Errors can be pickled: process pools wait without end for a result that they cannot read."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Iterator

import pytest

from specfuse_shared import ConfigError, SamplingParams, errors
from specfuse_shared.errors import SpecFuseError

MADE = [
    errors.MissingExtraError("Grammars", "grammar"),
    errors.PromptTooLongError("gemma", 100, 120, 5),
    errors.GenerationError("it failed", member="gemma", text="so far"),
    errors.UnfinishedValueError("no memory", member=None, text='{"a'),
    errors.RequestTimeoutError.of("so far"),
    errors.EngineClosedError(text="so far"),
]


def tree(kind: type[SpecFuseError] = SpecFuseError) -> Iterator[type[SpecFuseError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from tree(below)


def every_error() -> list[SpecFuseError]:
    ours = [kind for kind in tree() if kind.__module__ == errors.__name__]
    made = {type(error) for error in MADE}
    return [*MADE, *(kind("what was wrong") for kind in ours if kind not in made)]


@pytest.mark.parametrize("error", every_error(), ids=lambda error: type(error).__name__)
def test_every_error_can_be_pickled(error: SpecFuseError) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert (str(back), back.args, vars(back)) == (str(error), error.args, vars(error))


def refuse(number: int) -> int:
    raise errors.PromptTooLongError("gemma", 100, 100 + number, 5)


def test_a_pool_of_processes_raises_its_workers_error() -> None:
    with (
        multiprocessing.get_context("spawn").Pool(1) as pool,
        pytest.raises(errors.PromptTooLongError, match="107") as caught,
    ):
        pool.map(refuse, [7])
    assert (caught.value.member, caught.value.limit, caught.value.count) == ("gemma", 100, 107)


@pytest.mark.parametrize("name", ["max_tokens", "min_tokens", "top_k", "max_thinking_tokens", "top_logprobs"])
@pytest.mark.parametrize("value", [8.0, 2.5, True])
def test_a_count_is_an_integer(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"SamplingParams.{name} must be a whole number, not {value!r}"):
        SamplingParams(**{name: value})
