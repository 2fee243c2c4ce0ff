"""Errors have the engine's and LangChain's types, so that retries and fallbacks work."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ModelFallbackMiddleware, ModelRetryMiddleware
from langchain_core import exceptions
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.output_parsers import JsonOutputParser

from langchain_specfuse import ChatSpecFuse
from langchain_specfuse import errors as translated_errors
from langchain_specfuse.chat_models import with_raw
from langchain_specfuse.errors import UnfinishedValueError, as_langchain, translated
from specfuse_shared import EnsembleConfig, EnsembleEngine, Grammar, SamplingParams, errors

LONG = "Write about the sea. " * 400
MADE: list[errors.SpecFuseError] = [
    errors.SpecFuseError("x"),
    errors.ConfigError("x"),
    errors.GrammarError("x"),
    errors.AuthenticationError("x"),
    errors.UnknownModelError("x"),
    errors.MissingExtraError("Tracing", "metrics"),
    errors.MemberLoadError("x"),
    errors.PlacementError("x"),
    errors.UnsupportedModelError("x"),
    errors.ServerError("x"),
    errors.ServerUnreachableError("x"),
    errors.ServerKeyError("x"),
    errors.ServerModelError("x"),
    errors.ServerSettingsError("x"),
    errors.RequestError("x"),
    errors.PromptTooLongError("chat", 512, 600, 5),
    errors.ValueTooLongError("x"),
    errors.EngineBusyError("x"),
    errors.GenerationError("x", member="chat", text="so far"),
    errors.RequestTimeoutError.of("so far"),
    errors.UnfinishedValueError("x", member="", text='{"a'),
    errors.EngineClosedError(text="so far"),
]


class Starts(BaseCallbackHandler):
    """Counts the attempts."""

    def __init__(self) -> None:
        self.count = 0

    def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
        self.count += 1


@pytest.fixture
def hurried(tiny: EnsembleEngine) -> ChatSpecFuse:
    """A model whose timeout always passes."""
    return ChatSpecFuse(engine=tiny, max_tokens=12, timeout=1e-9)


# ── classes ──────────────────────────────────────────────────────────────────────────────────────


def test_every_error_of_the_engine_has_a_class_here() -> None:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.SpecFuseError)]
    assert {type(error) for error in MADE} == set(kinds)


@pytest.mark.parametrize("error", MADE, ids=lambda error: type(error).__name__)
def test_a_translated_error_is_both_and_loses_nothing(error: errors.SpecFuseError) -> None:
    reported = translated(error)
    assert isinstance(reported, type(error))
    assert isinstance(reported, exceptions.ModelError)
    assert (str(reported), vars(reported)) == (str(error), vars(error))
    assert translated(reported) is reported
    again = pickle.loads(pickle.dumps(reported))
    assert (type(again), str(again), vars(again)) == (type(reported), str(reported), vars(reported))


@pytest.mark.parametrize(
    ("name", "theirs", "retryable"),
    [
        ("ConfigError", exceptions.ModelInvalidRequestError, False),
        ("GrammarError", exceptions.ModelInvalidRequestError, False),
        ("RequestError", exceptions.ModelInvalidRequestError, False),
        ("AuthenticationError", exceptions.ModelAuthenticationError, False),
        ("UnknownModelError", exceptions.ModelNotFoundError, False),
        ("PromptTooLongError", exceptions.ContextOverflowError, False),
        ("ValueTooLongError", exceptions.ModelInvalidRequestError, False),
        ("MemberLoadError", exceptions.ModelError, False),
        ("UnfinishedValueError", exceptions.OutputParserException, False),
        ("RequestTimeoutError", exceptions.ModelTimeoutError, True),
        ("EngineBusyError", exceptions.ModelRateLimitError, True),
        ("EngineClosedError", exceptions.ModelConnectionError, True),
        ("GenerationError", exceptions.ModelAPIError, True),
    ],
)
def test_an_error_has_langchains_type(name: str, theirs: type[Exception], retryable: bool) -> None:
    kind = getattr(translated_errors, name)
    assert issubclass(kind, theirs)
    assert kind.is_retryable is retryable


def test_the_traceback_leads_into_the_engine_and_the_error_is_shown_once() -> None:
    with pytest.raises(errors.RequestError) as caught, as_langchain():
        fail()
    assert [entry.name for entry in caught.traceback][-1] == "fail"
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def fail() -> None:
    raise errors.RequestError("no")


# ── raised ───────────────────────────────────────────────────────────────────────────────────────


def test_a_prompt_too_long_overflows_the_context(chat: ChatSpecFuse) -> None:
    with pytest.raises(exceptions.ContextOverflowError) as caught:
        chat.invoke(LONG)
    assert isinstance(caught.value, errors.PromptTooLongError)
    assert caught.value.limit < caught.value.count


@pytest.mark.parametrize("options", [{"max_token": 3}, {"temperature": -1}, {"tool_choice": "add"}])
async def test_a_refused_setting_is_an_invalid_request(chat: ChatSpecFuse, options: dict[str, Any]) -> None:
    for theirs in (exceptions.ModelInvalidRequestError, errors.ConfigError):
        with pytest.raises(theirs):
            chat.invoke("Hi", **options)
        with pytest.raises(theirs):
            [chunk async for chunk in chat.astream("Hi", **options)]


def test_a_timeout_is_an_error_of_both_libraries(hurried: ChatSpecFuse) -> None:
    for theirs in (exceptions.ModelTimeoutError, errors.RequestTimeoutError, TimeoutError):
        with pytest.raises(theirs):
            hurried.invoke("Hi")


def test_a_busy_engine_is_a_rate_limit(tiny: EnsembleEngine) -> None:
    config = EnsembleConfig(tiny.config.members, max_concurrent=1, max_queue=1, when_busy="raise")
    endless = SamplingParams(max_tokens=1500, grammar=Grammar.regex("[a-z]{1500}"))
    with EnsembleEngine(config) as engine:
        running = engine.stream("Hi", endless)
        next(running)
        waiting = engine.stream("Hi", endless)
        with pytest.raises(exceptions.ModelRateLimitError):
            ChatSpecFuse(engine=engine, max_tokens=4).invoke("Hi")
        assert waiting is not running


def test_a_closed_engine_is_a_lost_connection(tiny: EnsembleEngine) -> None:
    with EnsembleEngine(EnsembleConfig(tiny.config.members)) as engine:
        model = ChatSpecFuse(engine=engine)
    with pytest.raises(exceptions.ModelConnectionError):
        model.invoke("Hi")


ENDLESS = Grammar.lark("start: /(ab|cd){2000}/")


def test_an_answer_cut_inside_its_grammar_is_an_error_of_the_parser(chat: ChatSpecFuse) -> None:
    with pytest.raises(exceptions.OutputParserException) as caught:
        chat.invoke("Hi", max_tokens=20, grammar=ENDLESS)
    error = caught.value
    assert isinstance(error, errors.UnfinishedValueError)
    assert error.llm_output == error.text != ""
    assert not error.send_to_llm


def test_a_cut_value_is_a_parsing_error_next_to_its_beginning(chat: ChatSpecFuse) -> None:
    reported = with_raw(chat.bind(max_tokens=20, grammar=ENDLESS), JsonOutputParser()).invoke("Hi")
    assert isinstance(reported["parsing_error"], errors.UnfinishedValueError)
    assert reported["parsed"] is None
    assert reported["raw"].text == reported["parsing_error"].text != ""
    assert reported["raw"].response_metadata["finish_reason"] == "length"
    usage = reported["raw"].usage_metadata
    assert usage["output_tokens"] == 20
    assert usage["total_tokens"] == usage["input_tokens"] + 20


def test_an_error_of_a_truncated_value_can_be_constructed() -> None:
    error = UnfinishedValueError("cut", member=None, text='{"a')
    assert (error.llm_output, error.usage) == ('{"a', None)


# ── what LangChain makes of them ─────────────────────────────────────────────────────────────────


def test_a_timeout_is_retried_and_finally_raised(hurried: ChatSpecFuse) -> None:
    starts = Starts()
    agent = create_agent(hurried, [], middleware=[ModelRetryMiddleware(max_retries=2, initial_delay=0)])
    state = agent.invoke({"messages": [("user", "Hi")]}, {"callbacks": [starts]})
    assert starts.count == 3
    assert "failed after 3 attempts with RequestTimeoutError" in state["messages"][-1].text


@pytest.mark.parametrize(
    ("question", "settings", "theirs"),
    [
        (LONG, {}, exceptions.ContextOverflowError),
        ("Hi", {"max_token": 3}, exceptions.ModelInvalidRequestError),
        ("Hi", {"model": "unknown"}, exceptions.ModelNotFoundError),
    ],
)
def test_permanent_errors_are_not_retried(
    chat: ChatSpecFuse, question: str, settings: dict[str, Any], theirs: type[Exception]
) -> None:
    starts = Starts()
    retry = ModelRetryMiddleware(max_retries=2, initial_delay=0)
    agent = create_agent(chat.bind(**settings), [], middleware=[retry])
    with pytest.raises(theirs):
        agent.invoke({"messages": [("user", question)]}, {"callbacks": [starts]})
    assert starts.count == 1


def test_a_fallback_model_answers_after_a_timeout(hurried: ChatSpecFuse, chat: ChatSpecFuse) -> None:
    agent = create_agent(hurried, [], middleware=[ModelFallbackMiddleware(chat)])
    state = agent.invoke({"messages": [("user", "Hi")]})
    assert state["messages"][-1].text == chat.invoke("Hi").text


def test_runnables_retry_and_fall_back_by_class(hurried: ChatSpecFuse, chat: ChatSpecFuse) -> None:
    starts = Starts()
    patient = hurried.with_retry(
        retry_if_exception_type=(exceptions.ModelTimeoutError,), stop_after_attempt=2, wait_exponential_jitter=False
    )
    with pytest.raises(errors.RequestTimeoutError):
        patient.invoke("Hi", {"callbacks": [starts]})
    assert starts.count == 2
    safe = chat.with_fallbacks([chat.bind(stop=["e"])], exceptions_to_handle=(exceptions.ContextOverflowError,))
    with pytest.raises(exceptions.ContextOverflowError):
        safe.invoke(LONG)
    shorter = hurried.with_fallbacks([chat], exceptions_to_handle=(exceptions.ModelTimeoutError,))
    assert shorter.invoke("Hi").text == chat.invoke("Hi").text
