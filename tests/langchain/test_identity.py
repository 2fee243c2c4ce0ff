"""How a model describes itself: in traces, caches, dumps and profiles; and its errors for unsupported options."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.load import dumpd, dumps, loads
from langchain_core.messages import AIMessageChunk, HumanMessage
from langchain_core.runnables import ConfigurableField
from pydantic import create_model

from langchain_specfuse import ChatSpecFuse, errors
from specfuse_shared import EnsembleConfig, EnsembleEngine, MemberConfig
from tests.support.serving import serving
from tests.support.tiny import CHAT_TEMPLATE

QUESTION = "What does the sea do?"
pytestmark = pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")


class Starts(BaseCallbackHandler):
    """Keeps the arguments that tracers get when a model starts."""

    def __init__(self) -> None:
        self.told: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def on_chat_model_start(self, serialized: dict[str, Any], messages: Any, **kwargs: Any) -> None:
        self.told.append((serialized, kwargs))


# ── traces ───────────────────────────────────────────────────────────────────────────────────────


def test_a_trace_has_the_attributes_that_exporters_read_and_no_local_path(tiny: EnsembleEngine) -> None:
    received = Starts()
    model = ChatSpecFuse(engine=tiny, max_tokens=9, temperature=0.5, seed=1)
    model.invoke(QUESTION, {"callbacks": [received]})
    list(model.stream(QUESTION, {"callbacks": [received]}))
    folders = [str(Path(member.model).parent) for member in tiny.config.member_configs]
    for serialized, kwargs in received.told:
        for place in (serialized["kwargs"], kwargs["invocation_params"]):  # OpenLLMetry, OpenInference
            assert place.get("model") or place.get("model_name") == "chat+base"
            assert (place["max_tokens"], place["temperature"]) == (9, 0.5)
        assert kwargs["invocation_params"]["model"] == "chat+base"
        metadata = kwargs.get("metadata") or {}
        assert metadata.get("ls_model_name", "chat+base") == "chat+base"
        text = json.dumps([serialized, kwargs["invocation_params"]], default=str) + str(metadata)
        assert not any(folder in text for folder in folders)
    assert len(received.told) == 2


def test_a_servers_address_is_not_a_models_name() -> None:
    model = ChatSpecFuse(base_url="http://127.0.0.1:9")
    assert model._get_ls_params()["ls_model_name"] == "specfuse"
    assert (model.profile or {})["name"] == "specfuse"


# ── dumps, and the key of a cache ────────────────────────────────────────────────────────────────


def test_a_model_can_be_loaded_from_its_dump(tiny: EnsembleEngine) -> None:
    model = ChatSpecFuse(
        config=replace(tiny.config, max_concurrent=3),
        max_tokens=9,
        ledger="none",
        ensembles={"pair": list(tiny.config.member_configs), "one": EnsembleConfig(["a/b"])},
        api_key="very-secret",
    )
    text = dumps(model)
    assert "very-secret" not in text
    assert str(Path(tiny.config.member_configs[0].model).parent) not in text
    again = loads(text, allowed_objects=[ChatSpecFuse], valid_namespaces=["langchain_specfuse"])
    assert again._ensemble() == model._ensemble()
    assert again._ensemble("pair") == model._ensemble("pair")
    assert again._ensemble("one").names == ("b",)
    assert (again.max_tokens, again.ledger) == (9, "none")


@pytest.mark.parametrize(
    "settings", [{"members": "demo"}, {"model": "demo"}, {"base_url": "http://x"}, {"members": ["a/b", "c/d"]}]
)
def test_every_kind_of_model_can_be_loaded_from_its_dump(settings: dict[str, Any]) -> None:
    model = ChatSpecFuse(**settings)
    again = loads(dumps(model), allowed_objects=[ChatSpecFuse], valid_namespaces=["langchain_specfuse"])
    assert dumpd(again) == dumpd(model)
    assert again.base_url == model.base_url


def test_loading_a_dump_asks_for_a_local_folder() -> None:
    with pytest.raises(errors.ConfigError, match="another process"):
        ChatSpecFuse(members=[{"model": "local:qwen#123456789abc"}])


@pytest.mark.parametrize(
    "changes",
    [{"output_version": "v1"}, {"ledger": "none"}, {"temperature": 0.5}, {"config": EnsembleConfig(["no/one", "x/y"])}],
)
def test_the_cache_key_contains_all_settings_that_affect_a_message(changes: dict[str, Any]) -> None:
    model = ChatSpecFuse(members=["no/one", "no/two"])
    settings = changes if "config" in changes else {"members": ["no/one", "no/two"], **changes}
    assert ChatSpecFuse(**settings)._get_llm_string() != model._get_llm_string()


def test_folders_of_one_name_have_separate_keys(tmp_path: Path) -> None:
    keys = set()
    for parent in ("a", "b"):
        folder = tmp_path / parent / "model"
        folder.mkdir(parents=True)
        keys.add(ChatSpecFuse(members=[str(folder)])._get_llm_string())
    assert len(keys) == 2


def test_a_cache_answers_and_distinguishes_models(tiny: EnsembleEngine) -> None:
    cache = InMemoryCache()
    model = ChatSpecFuse(engine=tiny, max_tokens=6, cache=cache)
    before = tiny.metrics().forwards
    first = model.invoke(QUESTION)
    between = tiny.metrics().forwards
    assert model.invoke(QUESTION).content == first.content
    assert tiny.metrics().forwards == between != before
    blocks = ChatSpecFuse(engine=tiny, max_tokens=6, cache=cache, output_version="v1").invoke(QUESTION)
    assert isinstance(blocks.content, list)


def test_a_cache_distinguishes_classes_of_one_name(tiny: EnsembleEngine) -> None:
    model = ChatSpecFuse(engine=tiny, max_tokens=60, cache=InMemoryCache())
    first, second = (create_model("Same", **{name: (bool, ...)}) for name in "pq")
    for expected, key in ((first, "p"), (second, "q"), (first, "p")):
        assert list(json.loads(model.invoke("Yes?", response_format=expected).text)) == [key]


# ── copies and sizes ─────────────────────────────────────────────────────────────────────────────


def test_configurable_fields_keep_the_stream_and_the_profile(tiny: EnsembleEngine) -> None:
    model = ChatSpecFuse(engine=tiny, max_tokens=12, segment_events=True)
    field = ConfigurableField(id="longest")
    chosen = model.configurable_fields(max_tokens=field).with_config(configurable={"longest": 20})
    chunks = list(chosen.stream(QUESTION))
    assert len(chunks) > 3
    assert "".join(chunk.text for chunk in chunks).startswith(model.invoke(QUESTION).text)
    configurable: Any = model.configurable_fields(max_tokens=field)
    made, _ = configurable.prepare({"configurable": {"longest": 20}})
    assert isinstance(made, ChatSpecFuse)
    assert (made.profile or {})["max_output_tokens"] == 20


def test_a_copy_with_more_tokens_reports_them(tiny: EnsembleEngine) -> None:
    model = ChatSpecFuse(engine=tiny, max_tokens=12)
    copied = model.model_copy(update={"max_tokens": 20})
    assert [(each.profile or {})["max_output_tokens"] for each in (model, copied)] == [12, 20]
    assert ChatSpecFuse(engine=tiny, profile={}).model_copy(update={"max_tokens": 20}).profile == {}


def test_a_given_profile_stays(tiny: EnsembleEngine) -> None:
    model = ChatSpecFuse(engine=tiny, profile={"max_input_tokens": 7})
    configurable: Any = model.configurable_fields(seed=ConfigurableField(id="seed"))
    made, _ = configurable.prepare({"configurable": {"seed": 1}})
    assert model.load().profile == made.profile == {"max_input_tokens": 7}


def test_load_reads_the_sizes_of_a_servers_model(tiny: EnsembleEngine) -> None:
    with serving({"tiny": tiny}) as client:
        model = ChatSpecFuse(base_url=str(client.base_url))
        assert "max_input_tokens" not in (model.profile or {})
        assert (model.load().profile or {})["max_input_tokens"] == tiny.context_limit
        assert (model.profile or {})["name"] == "tiny"
        fresh = ChatSpecFuse(base_url=str(client.base_url), max_tokens=4)
        assert fresh.invoke("Hi").response_metadata["model_name"] == "tiny"


def test_load_reads_the_sizes_of_members_that_were_not_downloaded(tiny: EnsembleEngine, tmp_path: Path) -> None:
    folder = tmp_path / "later"
    model = ChatSpecFuse(members=[str(folder)])
    assert "max_input_tokens" not in (model.profile or {})
    folder.symlink_to(Path(tiny.config.member_configs[0].model))
    with model:
        assert (model.load().profile or {})["max_input_tokens"] == tiny.context_limit


# ── fields of a record that stay, and counts ─────────────────────────────────────────────────────


def test_ledger_none_removes_the_ledger_and_segment_events_remain(tiny: EnsembleEngine) -> None:
    class StreamItem(BaseCallbackHandler):
        def __init__(self) -> None:
            self.members: set[str | None] = set()

        def on_custom_event(self, name: str, data: Any, **kwargs: Any) -> None:
            self.members.add(data["member"])

    received = StreamItem()
    model = ChatSpecFuse(engine=tiny, max_tokens=12, ledger="none", segment_events=True)
    first, *rest = model.stream(QUESTION, {"callbacks": [received]})
    whole: AIMessageChunk = first + rest
    assert whole.additional_kwargs == model.invoke(QUESTION).additional_kwargs == {}
    assert "specfuse" not in whole.response_metadata
    assert received.members & {"chat", "base"}


def test_thinking_tokens_are_counted_as_reasoning(tiny: EnsembleEngine) -> None:
    chat, base = tiny.config.member_configs
    thinks = replace(chat, chat_template=CHAT_TEMPLATE, thinking=("<think>", "</think>"))
    with EnsembleEngine(EnsembleConfig([thinks, base])) as engine:
        answer = ChatSpecFuse(engine=engine, max_tokens=6, max_thinking_tokens=8, ledger="full").invoke(QUESTION)
    usage = answer.usage_metadata
    assert usage is not None
    thoughts = usage["output_token_details"]["reasoning"]
    assert thoughts == answer.response_metadata["specfuse"]["usage"]["members"]["chat"]["thinking"] > 0
    assert usage["output_tokens"] == answer.response_metadata["specfuse"]["usage"]["completion_tokens"] + thoughts
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_a_custom_token_counter_is_used(tiny: EnsembleEngine) -> None:
    model = ChatSpecFuse(engine=tiny, custom_get_token_ids=lambda text: list(range(len(text.split()))))
    assert model.get_token_ids("one two three") == [0, 1, 2]
    assert model.get_num_tokens("one two") == 2
    assert model.get_num_tokens_from_messages([HumanMessage("one two"), HumanMessage("three")]) == 3


# ── options of other models ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("option", "reported"),
    [
        ({"num_predict": 5}, "max_tokens"),
        ({"max_completion_tokens": 5}, "max_tokens"),
        ({"num_ctx": 2048}, r"MemberConfig\(max_context"),
        ({"format": "json"}, "with_structured_output"),
        ({"keep_alive": "5m"}, r"close\(\)"),
        ({"n": 2}, "several times"),
    ],
)
def test_an_unsupported_option_gets_a_helpful_error(
    tiny: EnsembleEngine, option: dict[str, Any], reported: str
) -> None:
    with pytest.raises(errors.ConfigError, match=reported):
        ChatSpecFuse(engine=tiny, **option)
    with pytest.raises(errors.ConfigError, match=reported):
        ChatSpecFuse(engine=tiny).invoke(QUESTION, **option)


def test_n_can_be_one(tiny: EnsembleEngine) -> None:
    assert ChatSpecFuse(engine=tiny, max_tokens=4, n=1).invoke(QUESTION, n=1).text


def test_errors_of_the_constructor_have_langchains_types() -> None:
    for settings in ({}, {"members": "demo", "max_token": 3}, {"members": ["a/b"], "temperature": -1}):
        with pytest.raises(errors.ConfigError):
            ChatSpecFuse(**settings)
    with pytest.raises(errors.UnknownModelError):
        ChatSpecFuse(model="trio", ensembles={"pair": ["a/b", "c/d"]})
    assert MemberConfig("a/b")


@pytest.mark.parametrize(("model", "names"), [("Qwen/Qwen3-8B", ["Qwen3-8B"]), (["a/b", "c/d"], ["b", "d"])])
def test_the_argument_model_names_a_member(model: Any, names: list[str]) -> None:
    assert ChatSpecFuse(model=model)._ensemble().names == tuple(names)
    assert (
        ChatSpecFuse(model_name=model)._ensemble()
        == ChatSpecFuse(members=model if len(names) > 1 else [model])._ensemble()
    )


@pytest.mark.parametrize(
    ("settings", "reported"),
    [
        (lambda: ChatSpecFuse("demo"), r"by name: write members='demo'"),
        (lambda: ChatSpecFuse("a/b"), r"by name: write members=\['a/b'\]"),
        (lambda: ChatSpecFuse(["a/b"]), r"by name: write members=\['a/b'\]"),
        (lambda: ChatSpecFuse(members="a/b"), r"list of models, \['a/b'\] is an ensemble of one"),
        (lambda: ChatSpecFuse(engine="demo"), r"engine must be an EnsembleEngine, not str"),
    ],
)
def test_a_common_mistake_gets_an_error_with_the_right_call(settings: Any, reported: str) -> None:
    with pytest.raises(errors.ConfigError, match=reported):
        settings()


def test_nothing_private_of_langchain_is_overridden() -> None:
    from langchain_core.language_models import BaseChatModel

    documented = {"_generate", "_agenerate", "_stream", "_astream", "_llm_type", "_identifying_params"}
    documented |= {"_get_ls_params", "_resolve_model_profile"}
    ours = {
        name for kind in ChatSpecFuse.__mro__ if kind.__module__.startswith("langchain_specfuse") for name in vars(kind)
    }
    theirs = {name for name in dir(BaseChatModel) if name.startswith("_") and not name.startswith("__")}
    assert {name for name in ours & theirs if not name.startswith(("_abc", "_serialized"))} <= documented


def test_a_model_always_has_a_name(tiny: EnsembleEngine, tmp_path: Path) -> None:
    """deepagents finds a profile by it, and langchain-classic's evaluators search it for "gpt-4"."""
    for llm, name in (
        (ChatSpecFuse(members="demo"), "demo"),
        (ChatSpecFuse(model="demo"), "demo"),
        (ChatSpecFuse(engine=tiny), "+".join(tiny.config.names)),
        (ChatSpecFuse(members=["no/one", "no/two"]), "one+two"),
        (ChatSpecFuse(members=["no/one"], ensembles={"other": ["no/two"]}, model="other"), "other"),
        (ChatSpecFuse(base_url="http://127.0.0.1:9", model="tiny"), "tiny"),
        (ChatSpecFuse(base_url="http://127.0.0.1:9"), "specfuse"),
    ):
        for each in (llm, llm.model_copy(), pickle.loads(pickle.dumps(llm)), copy.deepcopy(llm)):
            assert (each.model_name, each.model) == (name, name)
            assert "gpt-4" not in str(each.model_name)
    copied = ChatSpecFuse(members=["no/one"]).model_copy(update={"members": ["no/two"]})
    assert copied.model_name == "two", "the copy of an unnamed model has a separate one"
    dumped = ChatSpecFuse(base_url="http://127.0.0.1:9").model_dump(exclude_defaults=True)
    assert "model_name" not in dumped, "no draft was chosen"
    with serving({"tiny": tiny}) as client:
        remote = ChatSpecFuse(base_url=str(client.base_url)).load()
        assert (remote.model_name, remote.model) == ("tiny", "tiny")
