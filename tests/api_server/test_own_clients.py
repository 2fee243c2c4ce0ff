"""Our own clients: with a server they give the same results and errors as in this process."""

from __future__ import annotations

import asyncio
import copy
import pickle
import socket
from typing import Any

import httpx
import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage
from langchain_core.messages.base import BaseMessageChunk
from llama_index.core import PromptTemplate
from pydantic import BaseModel, Field

from langchain_specfuse import ChatSpecFuse
from langchain_specfuse import errors as of_langchain
from llamaindex_specfuse import SpecFuseLLM
from specfuse_shared import (
    ConfigError,
    EngineClosedError,
    EnsembleEngine,
    Grammar,
    Message,
    PromptTooLongError,
    RequestError,
    RequestTimeoutError,
    SamplingParams,
    SpecFuseError,
    UnfinishedValueError,
    UnknownModelError,
    ValueTooLongError,
)
from specfuse_shared.api_server import run
from specfuse_shared.api_server.settings import ServerSettings
from specfuse_shared.client.engine import RemoteEngine
from specfuse_shared.errors import AuthenticationError
from specfuse_shared.events import Event, FinishEvent, SegmentEvent
from tests.support.serving import QUESTION, serving, until, untimed

TURNS = [Message("system", "Be brief. <|end|>"), Message("user", "Why is the sea salty?")]


class Digit(BaseModel):
    """A digit."""

    a: int = Field(ge=0, le=9)


@pytest.fixture(scope="module")
def remote(client: httpx.Client) -> RemoteEngine:
    return RemoteEngine(str(client.base_url))


def comparable(events: list[Event]) -> Any:
    from dataclasses import asdict

    return [(type(event).__name__, untimed(asdict(event))) for event in events]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_tokens": 20},
        {"max_tokens": 20, "temperature": 1.0, "seed": 3, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1},
        {"max_tokens": 20, "logprobs": True, "top_logprobs": 2, "stop": ("et",)},
        {"max_tokens": 8, "ignore_eos": True, "min_tokens": 3},
        {"grammar": Grammar.choice(["yes", "no"])},
    ],
)
def test_a_remote_model_streams_the_engines_events(
    remote: RemoteEngine, tiny: EnsembleEngine, settings: dict[str, Any]
) -> None:
    params = SamplingParams(**settings)
    here, there = list(tiny.stream(TURNS, params)), list(remote.stream(TURNS, params))
    assert comparable(here) == comparable(there)
    assert isinstance(there[-1], FinishEvent)
    assert there[-1].result.to_html()

    async def all_of_them() -> list[Event]:
        return [event async for event in remote.astream(TURNS, params)]

    assert comparable(asyncio.run(all_of_them())) == comparable(here)
    assert remote.generate(TURNS, params).text == tiny.generate(TURNS, params).text


def test_a_remote_model_has_the_engines_tokens_and_limits(remote: RemoteEngine, tiny: EnsembleEngine) -> None:
    assert remote.tokenize("The sea") == tiny.tokenize("The sea")
    assert remote.count_tokens(TURNS) == tiny.count_tokens(TURNS)
    assert remote.load().context_limit == tiny.context_limit
    assert remote.model == "tiny"


@pytest.mark.parametrize(
    ("messages", "settings", "options", "kind"),
    [
        ("sea " * 5000, {}, {}, PromptTooLongError),
        ("Hi", {}, {"tool_choice": "any"}, ConfigError),
        ("Hi", {"max_tokens": 2000, "ignore_eos": True}, {"timeout": 0.05}, RequestTimeoutError),
        ("Hi", {"max_tokens": 3, "grammar": Grammar.regex("[a-c]{40}")}, {}, ValueTooLongError),
    ],
)
def test_a_remote_model_raises_the_engines_errors(
    remote: RemoteEngine, tiny: EnsembleEngine, messages: str, settings: Any, options: Any, kind: type[SpecFuseError]
) -> None:
    raised = []
    for engine in (tiny, remote):
        with pytest.raises(kind) as error:
            list(engine.stream(messages, SamplingParams(**settings), **options))
        raised.append(error.value)
    here, there = raised
    assert type(here) is type(there)
    if kind is not RequestTimeoutError:
        assert str(here) == str(there)
        assert vars(here) == vars(there)


def test_a_truncated_value_raises_the_same_error_with_its_beginning(remote: RemoteEngine, tiny: EnsembleEngine) -> None:
    grammar = Grammar.lark("start: /(ab|cd){2000}/")
    params = SamplingParams(max_tokens=20, grammar=grammar)
    raised = []
    for engine in (tiny, remote):
        with pytest.raises(UnfinishedValueError) as error:
            engine.generate("Hi", params)
        raised.append((str(error.value), error.value.text, error.value.member))
    assert raised[0] == raised[1]


def test_closing_or_dropping_a_stream_stops_the_compute(remote: RemoteEngine, tiny: EnsembleEngine) -> None:
    params = SamplingParams(max_tokens=3000, ignore_eos=True)
    stream = remote.stream(TURNS, params)
    next(stream)
    assert tiny.metrics().running == 1
    stream.close()  # type: ignore[attr-defined]
    until(lambda: tiny.metrics().running == 0, 5)
    del stream
    dropped = remote.stream(TURNS, params)
    until(lambda: tiny.metrics().running == 1)
    del dropped
    until(lambda: tiny.metrics().running == 0, 5)

    async def cancelled() -> None:
        async def read() -> None:
            async for _ in remote.astream(TURNS, params):
                pass

        task = asyncio.create_task(read())
        while not tiny.metrics().running:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    until(lambda: tiny.metrics().running == 0, 5)


def test_a_missing_server_a_wrong_key_and_an_unknown_model_are_named(tiny: EnsembleEngine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(EngineClosedError, match=r"no server answers at .* correct base_url"):
        RemoteEngine(f"http://127.0.0.1:{port}").generate("Hi")
    with pytest.raises(ConfigError, match="give the address of a server"):
        RemoteEngine("127.0.0.1:8000")
    with pytest.raises(ConfigError, match="give the address of a server"):
        RemoteEngine("http://127.0.0.1:port")
    with serving({"tiny": tiny}, key="right") as client:
        with pytest.raises(ConfigError, match="api_key"):
            RemoteEngine(str(client.base_url), "tiny", "wrong").generate("Hi")
        assert RemoteEngine(f"{client.base_url}/v1/", "tiny/base", "right").generate("Hi").members == ("base",)
        with pytest.raises(UnknownModelError, match="'tiny/base'"):
            RemoteEngine(str(client.base_url), "none", "right").generate("Hi")


def test_options_that_no_request_can_carry_are_refused_as_by_the_engine(tiny: EnsembleEngine, monkeypatch: Any) -> None:
    schema = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"const": float("nan")}}}}
    with serving({"tiny": tiny}, key="right") as client:
        with pytest.raises(AuthenticationError):
            RemoteEngine(str(client.base_url), api_key="schlüssel").generate("Hi")
        monkeypatch.setenv("SPECFUSE_API_KEY", "right\n")
        there = RemoteEngine(str(client.base_url))
        for engine in (there, tiny):
            with pytest.raises(ConfigError, match="params must be SamplingParams, not dict"):
                engine.generate("Hi", {"max_tokens": 4})
            with pytest.raises((RequestError, ConfigError)):
                engine.generate("Hi", tools=[schema])
        short = SamplingParams(max_tokens=4)
        assert there.generate("Hi", short, timeout=float("inf")).text == tiny.generate("Hi", short).text
    with pytest.raises(ConfigError, match="on one line"):
        RemoteEngine("http://127.0.0.1:8000", api_key="a\nb")


def test_a_server_that_stops_during_an_answer_raises_an_error_with_the_text_so_far(
    tiny: EnsembleEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "LAST_WORDS_SECONDS", 0)
    with serving({"tiny": tiny}, ServerSettings(stop_seconds=1)) as client:
        events = RemoteEngine(str(client.base_url)).stream(TURNS, SamplingParams(max_tokens=3500, ignore_eos=True))
        first = next(event for event in events if isinstance(event, SegmentEvent))
    with pytest.raises(EngineClosedError, match="connection to the server was lost") as raised:
        list(events)
    assert raised.value.text.startswith(first.text)
    assert len(raised.value.text) > len(first.text)


# ── LangChain ────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def chats(client: httpx.Client, tiny: EnsembleEngine) -> list[ChatSpecFuse]:
    """A local chat model, and one that uses the server."""
    return [
        ChatSpecFuse(engine=tiny, max_tokens=20, model="tiny", ensembles={"tiny": tiny.config}, ledger="full"),
        ChatSpecFuse(base_url=str(client.base_url), model="tiny", max_tokens=20, ledger="full"),
    ]


def test_langchain_streams_the_same_chunks_with_the_same_provenance(chats: list[ChatSpecFuse]) -> None:
    here, there = ([untimed(c.model_dump()) for c in chat.stream("Why is the sea salty?")] for chat in chats)
    assert here == there
    assert any(chunk["additional_kwargs"].get("specfuse_segments") for chunk in there)
    assert there[-1]["response_metadata"]["specfuse"]["rounds"]

    async def all_of_them(chat: BaseChatModel) -> list[BaseMessageChunk]:
        return [chunk async for chunk in chat.astream("Why is the sea salty?")]

    assert [untimed(c.model_dump()) for c in asyncio.run(all_of_them(chats[1]))] == there


def test_langchain_calls_tools_and_writes_values_on_a_server(chats: list[ChatSpecFuse]) -> None:
    for chat in chats:
        assert 0 <= chat.with_structured_output(Digit).invoke("A digit", max_tokens=60).a <= 9
        (call,) = chat.bind_tools([Digit], tool_choice="any").invoke("A digit", max_tokens=80).tool_calls
        assert call["name"] == "Digit"
    assert chats[0].get_num_tokens_from_messages([HumanMessage("Hi")]) == chats[1].get_num_tokens_from_messages(
        [HumanMessage("Hi")]
    )
    assert [m.text for m in chats[1].batch(["a", "b", "c"])] == [m.text for m in chats[0].batch(["a", "b", "c"])]


def test_errors_from_a_server_are_langchains_own(chats: list[ChatSpecFuse], client: httpx.Client) -> None:
    with pytest.raises(of_langchain.PromptTooLongError):
        chats[1].invoke("sea " * 5000)
    with pytest.raises(of_langchain.UnknownModelError):
        chats[1].invoke("Hi", model="none")
    with pytest.raises(of_langchain.EngineClosedError):
        ChatSpecFuse(base_url="http://127.0.0.1:9").invoke("Hi")
    assert chats[1].invoke("Hi", model="tiny/base").response_metadata["specfuse"]["members"] == ["base"]


def test_a_call_to_a_subset_of_members_is_refused_before_it_is_sent(remote: RemoteEngine) -> None:
    with pytest.raises(ConfigError, match="name one of its models"):
        remote.generate("Hi", members=["base"])


def test_a_clients_key_is_in_no_repr_or_dump(client: httpx.Client) -> None:
    for kind in (ChatSpecFuse, SpecFuseLLM):
        model = kind(base_url=str(client.base_url), api_key="very-secret", max_tokens=4)
        assert "very-secret" not in repr(model) + str(model) + str(model.model_dump()) + repr(model._resolve_engine())
        assert b"very-secret" not in pickle.dumps(model)
        assert pickle.loads(pickle.dumps(model)).base_url == model.base_url
        assert copy.deepcopy(model).api_key.get_secret_value() == "very-secret"
    assert ChatSpecFuse(base_url="https://x", api_key="k")._remote()._api_key == "k"


def test_a_model_is_local_or_remote(tiny: EnsembleEngine) -> None:
    with pytest.raises(ConfigError, match="give one of"):
        ChatSpecFuse(members=["no/one"], base_url="http://x")
    with pytest.raises(ConfigError, match="base_url"):
        ChatSpecFuse()
    with pytest.raises(ConfigError, match="with base_url"):
        SpecFuseLLM(engine=tiny, model="tiny")


# ── LlamaIndex ───────────────────────────────────────────────────────────────────────────────────


def test_llamaindex_gives_the_same_responses_with_the_same_provenance(
    client: httpx.Client, tiny: EnsembleEngine
) -> None:
    llms = [SpecFuseLLM(engine=tiny, max_tokens=20), SpecFuseLLM(base_url=str(client.base_url), max_tokens=20)]
    here, there = ([(r.delta, untimed(r.raw)) for r in llm.stream_complete("Why is the sea salty?")] for llm in llms)
    assert (here[-1][1].pop("model"), there[-1][1].pop("model")) == ("chat+base", "tiny")
    assert here == there
    assert there[0][1]["specfuse"]["candidates"]
    assert llms[1].complete("Hi").text == llms[0].complete("Hi").text
    assert asyncio.run(llms[1].acomplete("Hi")).text == llms[0].complete("Hi").text
    value = llms[1].structured_predict(Digit, PromptTemplate("A digit"), llm_kwargs={"max_tokens": 60})
    assert 0 <= value.a <= 9
    assert llms[1].tokenizer("The sea") == llms[0].tokenizer("The sea")
    assert llms[1].metadata.model_name == llms[1].model == "tiny"
    assert llms[1].metadata.context_window == tiny.context_limit
    one = SpecFuseLLM(base_url=str(client.base_url), model="tiny/base", max_tokens=8)
    assert one.complete("Hi").raw["specfuse"]["members"] == ["base"]
    assert QUESTION


def test_an_unknown_option_is_refused_locally_and_remotely(remote: RemoteEngine, tiny_engine: EnsembleEngine) -> None:
    for engine in (remote, tiny_engine):
        with pytest.raises(ConfigError, match="no setting 'timout': did you mean 'timeout'"):
            engine.generate("Hi.", timout=5)  # type: ignore[call-arg]


def test_openais_tool_turns_give_the_same_prompt_locally_and_remotely(
    remote: RemoteEngine, tiny_engine: EnsembleEngine
) -> None:
    """OpenAI's tool turns have no name, but templates without tools need one."""
    function = {"name": "get_weather", "arguments": "{}"}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "How warm is it?"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": "5"},
    ]
    named = [*turns[:2], {**turns[2], "name": "get_weather"}]
    counts = {engine.count_tokens(request) for engine in (remote, tiny_engine) for request in (turns, named)}
    assert len(counts) == 1


def test_a_required_call_uses_openais_keyword(tiny_engine: EnsembleEngine) -> None:
    now = {"type": "function", "function": {"name": "now", "parameters": {"properties": {}}}}
    result = tiny_engine.generate("Hi.", SamplingParams(max_tokens=60), tools=[now], tool_choice="required")
    assert result.text.startswith("<tool_call>")
