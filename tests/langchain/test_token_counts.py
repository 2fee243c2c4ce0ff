"""Token counts are exact for a whole prompt, and additive enough for `trim_messages`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage, trim_messages
from langchain_core.messages.tool import tool_call

from langchain_specfuse import ChatSpecFuse
from llamaindex_specfuse import SpecFuseLLM
from specfuse_shared import EnsembleConfig, EnsembleEngine, MemberConfig
from specfuse_shared.members import assembly
from tests.support.tiny import CHAT_TEMPLATE, byte_level_tokenizer, save_model

DEFAULT = (
    "{% if messages[0].role != 'system' %}<|turn|>system\nYou are a helpful assistant of the house.<|end|>\n{% endif %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if m.role == 'system' or (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)
TEMPLATES = {
    "own": CHAT_TEMPLATE,
    "default system": DEFAULT + CHAT_TEMPLATE,
    "alternating": ALTERNATING + CHAT_TEMPLATE,
}
CALL = AIMessage("", tool_calls=[tool_call(name="clock", args={"zone": "UTC"}, id="c1")])
CONVERSATIONS: dict[str, list[BaseMessage]] = {
    "plain": [HumanMessage("one two three"), AIMessage("four five"), HumanMessage("six")],
    "long": [m for n in range(4) for m in (HumanMessage(f"question {n}"), AIMessage(f"answer {n}"))]
    + [HumanMessage("?")],
    "tools": [
        HumanMessage("Time?"),
        CALL,
        ToolMessage("12:30", tool_call_id="c1"),
        AIMessage("Half."),
        HumanMessage("Ta"),
    ],
    "a result last": [HumanMessage("Time?"), CALL, ToolMessage("12:30", tool_call_id="c1")],
}
SYSTEMS: dict[str, list[BaseMessage]] = {
    "none": [],
    "short": [SystemMessage("s")],
    "long": [SystemMessage("You keep the keys of the house, and never say where they are, even if a guest asks.")],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape: dict[str, Any] = {"max_position_embeddings": 2048}
    return save_model("qwen3", byte_level_tokenizer(), tmp_path_factory.mktemp("counted"), **shape)


def model(folder: Path, template: str) -> ChatSpecFuse:
    return ChatSpecFuse(members=[MemberConfig(str(folder), chat_template=TEMPLATES[template])], max_tokens=2)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_count_equals_the_prompts_tokens(folder: Path, template: str) -> None:
    with model(folder, template) as llm:
        for system in SYSTEMS.values():
            for turns in CONVERSATIONS.values():
                usage = llm.invoke([*system, *turns]).usage_metadata
                assert usage is not None
                assert usage["input_tokens"] == llm.get_num_tokens_from_messages([*system, *turns])


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("include_system", [True, False])
def test_trimming_keeps_what_fits(folder: Path, template: str, include_system: bool) -> None:
    """`trim_messages` counts the system message by itself and the turns from the last to the first."""
    with model(folder, template) as llm:
        for system in SYSTEMS.values():
            for name, turns in CONVERSATIONS.items():
                reported = [*system, *turns]
                whole = llm.get_num_tokens_from_messages(reported)
                for room in (whole, whole + 8, whole + 20, whole + 200):
                    retained = trim_messages(
                        reported, max_tokens=room, strategy="last", token_counter=llm, include_system=include_system
                    )
                    assert retained == reported, (name, room - whole)


@pytest.mark.parametrize("template", ["own", "default system"])
def test_kept_messages_fit(folder: Path, template: str) -> None:
    with model(folder, template) as llm:
        for system in SYSTEMS.values():
            for name, turns in CONVERSATIONS.items():
                reported, whole = [*system, *turns], llm.get_num_tokens_from_messages([*system, *turns])
                for room in range(10, whole, 7):
                    retained = trim_messages(
                        reported, max_tokens=room, token_counter=llm, include_system=True, start_on="human"
                    )
                    count = llm.get_num_tokens_from_messages(retained)
                    if any(not isinstance(message, SystemMessage) for message in retained):
                        assert count <= room, (name, room, retained)


def test_system_messages_alone_count_as_their_additional_tokens(folder: Path) -> None:
    with model(folder, "default system") as llm:
        turns = CONVERSATIONS["plain"]
        for system in (SYSTEMS["short"], SYSTEMS["long"]):
            alone = llm.get_num_tokens_from_messages(system)
            both = llm.get_num_tokens_from_messages([*system, *turns])
            assert alone == both - llm.get_num_tokens_from_messages(turns)


def test_counting_reads_no_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "load_in_process", lambda *args, **options: pytest.fail("weights were read"))
    members = [MemberConfig(str(folder)), MemberConfig("no/such-model")]
    for llm in (ChatSpecFuse(members=members), ChatSpecFuse(config=EnsembleConfig(members))):
        assert llm.get_num_tokens("some words") == len(llm.get_token_ids("some words")) > 1
        assert llm.get_num_tokens_from_messages([HumanMessage("Hi")]) > 3
    assert SpecFuseLLM(members=members).tokenizer("some words")
    engine = EnsembleEngine(EnsembleConfig(members))
    assert engine.count_tokens("Hi", members=[members[0].label]) == engine.count_tokens("Hi")
    assert "not loaded" in repr(engine)


def test_counts_are_the_same_before_and_after_loading(folder: Path) -> None:
    with EnsembleEngine(EnsembleConfig([MemberConfig(str(folder))])) as engine:
        before = (engine.count_tokens("How are you?"), engine.tokenize("How are you?"))
        engine.load()
        assert (engine.count_tokens("How are you?"), engine.tokenize("How are you?")) == before
