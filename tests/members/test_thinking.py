"""Members that reason before they answer: separately, before the shared answer, and within a limit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specfuse_shared import (
    EnsembleConfig,
    EnsembleEngine,
    Grammar,
    MemberConfig,
    Message,
    SamplingParams,
    SegmentEvent,
    ThinkingEvent,
)
from specfuse_shared.errors import ConfigError, MemberLoadError
from specfuse_shared.members.local.member import LocalMember
from specfuse_shared.text.chat_template import find_markers
from tests.support.against_naive import local_members
from tests.support.tiny import CHAT_TEMPLATE, THINKING, save_pair

ALWAYS = CHAT_TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
QUESTION = "How do the tides follow the moon?"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    chat, base = save_pair(tmp_path_factory).values()
    return str(chat), str(base)


@pytest.fixture(scope="module")
def engine(folders: tuple[str, str]) -> Iterator[EnsembleEngine]:
    """An engine with one member that reasons, and one that does not."""
    chat, base = folders
    members = [
        MemberConfig(chat, name="thinks", chat_template=THINKING, thinking=True, dtype="float32"),
        MemberConfig(base, name="answers", dtype="float32"),
    ]
    with EnsembleEngine(EnsembleConfig(members)) as engine:
        yield engine.load()


def greedy(member: LocalMember, ids: list[int], count: int) -> list[int]:
    """Greedy decoding by the model's plain forward passes."""
    ids, start = list(ids), len(ids)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(member.runner.plain(ids)[-1].argmax()))
    return ids[start:]


def test_reasoning_is_before_the_answer_and_no_part_of_it(engine: EnsembleEngine) -> None:
    events = list(engine.stream(QUESTION, SamplingParams(max_tokens=20, max_thinking_tokens=40)))
    result = events[-1].result
    thoughts = [n for n, event in enumerate(events) if isinstance(event, ThinkingEvent)]
    segments = [n for n, event in enumerate(events) if isinstance(event, SegmentEvent)]
    assert len(thoughts) > 1
    assert max(thoughts) < min(segments)
    assert {event.member for event in events if isinstance(event, ThinkingEvent)} == {"thinks"}
    reasoning = "".join(event.text for event in events if isinstance(event, ThinkingEvent))
    assert result.thinking == {"thinks": reasoning}
    assert result.text == "".join(event.text for event in events if isinstance(event, SegmentEvent))
    assert result.usage.members["thinks"].thinking >= 40
    assert result.usage.members["answers"].thinking == 0


@pytest.mark.parametrize("limit", [1, 16, 37])
def test_reasoning_is_decoded_by_the_member_and_stays_in_its_context(folders: tuple[str, str], limit: int) -> None:
    config = EnsembleConfig(
        [MemberConfig(folders[0], name="thinks", chat_template=THINKING, thinking=True, dtype="float32")]
    )
    with EnsembleEngine(config) as engine:
        result = engine.generate(QUESTION, SamplingParams(max_tokens=12, max_thinking_tokens=limit))
        [member] = local_members(engine)
        prompt = member.encode_prompt([Message("user", QUESTION)])
        assert member.prompts.tokenizer.decode(prompt).endswith("assistant\n<think>\n")
        thoughts = greedy(member, prompt, limit)
        assert result.thinking["thinks"] == member.codec.decode(thoughts).rstrip("\ufffd").rstrip()
        closed = [*prompt, *thoughts, *member.prompts.thoughts_closing()]
        answer = greedy(member, closed, result.usage.completion_tokens)
    assert member.codec.decode(answer).startswith(result.text)
    assert result.text


@pytest.mark.parametrize("execution", ["dynamic", "paged"])
def test_reasoning_ends_where_the_member_ends_it(folders: tuple[str, str], execution: str) -> None:
    plain = MemberConfig(folders[0], name="thinks", chat_template=THINKING, thinking=True, dtype="float32")
    with EnsembleEngine(EnsembleConfig([plain])) as engine:
        [member] = local_members(engine)
        prompt = member.encode_prompt([Message("user", QUESTION)])
        text = member.codec.decode(greedy(member, prompt, 40))
    marker = text[20:23]
    thinker = replace(plain, thinking=("<think>", marker))
    with EnsembleEngine(EnsembleConfig([thinker], execution=execution)) as engine:
        result = engine.generate(QUESTION, SamplingParams(max_tokens=12, max_thinking_tokens=200))
        [member] = local_members(engine)
        used = result.usage.members["thinks"].thinking
    assert text.startswith(result.thinking["thinks"])
    assert result.thinking["thinks"] == text[: text.index(marker)].rstrip()
    assert used < 60


def test_reasoning_is_in_no_other_members_context(engine: EnsembleEngine) -> None:
    few, many = (
        engine.generate(QUESTION, SamplingParams(max_tokens=12, max_thinking_tokens=count)) for count in (4, 60)
    )
    assert few.usage.members["answers"].prompt == many.usage.members["answers"].prompt
    assert few.usage.members["thinks"].prompt == many.usage.members["thinks"].prompt
    assert few.usage.members["thinks"].thinking < many.usage.members["thinks"].thinking
    drafts = [next(c.text for c in r.rounds[0].candidates if "answers" in c.drafters) for r in (few, many)]
    assert drafts[0] == drafts[1]


def test_several_members_reason_separately_and_answer_together(folders: tuple[str, str]) -> None:
    members = [
        MemberConfig(folder, name=name, chat_template=THINKING, thinking=True, dtype="float32")
        for name, folder in zip(("one", "two"), folders, strict=True)
    ]
    params = SamplingParams(max_tokens=24, max_thinking_tokens=30)
    with EnsembleEngine(EnsembleConfig(members)) as engine:
        result = engine.generate(QUESTION, params)
        alone = {name: engine.generate(QUESTION, params, members=[name]) for name in ("one", "two")}
        assert result.thinking == {name: alone[name].thinking[name] for name in alone}, "each has a separate one"
        assert result.thinking["one"] != result.thinking["two"]
        first = result.rounds[0]
        for member in local_members(engine):
            prompt = member.encode_prompt([Message("user", QUESTION)])
            after = [*prompt, *greedy(member, prompt, 30), *member.prompts.thoughts_closing()]
            [draft] = [c for c in first.candidates if member.name in c.drafters]
            alone_text = member.codec.decode(greedy(member, after, draft.tokens))
            assert alone_text.startswith(draft.text), "a draft follows its member's own reasoning"
    assert any(record.verified and {*record.candidates[0].scores} == {"one", "two"} for record in result.rounds)
    assert len({result.text, *(each.text for each in alone.values())}) > 1
    assert not any(thought in result.text for thought in result.thinking.values())


def test_a_grammar_begins_after_the_reasoning(engine: EnsembleEngine) -> None:
    params = SamplingParams(max_tokens=40, max_thinking_tokens=20, grammar=Grammar.choice(["yes", "no"]))
    result = engine.generate(QUESTION, params)
    assert result.text in ("yes", "no")
    assert result.thinking["thinks"]


def logprob_after(member: LocalMember, before: list[int], text: str) -> list[float]:
    """Log p of each token of the text, by one plain forward pass."""
    ids = member.codec.encode(text)
    with torch.inference_mode():
        rows = member.runner.plain([*before, *ids])[len(before) - 1 : -1].float().log_softmax(-1)
    return [float(row[i]) for row, i in zip(rows, ids, strict=True)]


def test_log_probabilities_cover_the_answer_and_no_reasoning(engine: EnsembleEngine) -> None:
    member = next(m for m in local_members(engine) if m.name == "thinks")
    prompt = member.encode_prompt([Message("user", QUESTION)])
    output = engine.log_probabilities(QUESTION, ["Yes.", "No, it is not."])
    closed = [*prompt, *member.codec.encode("\n"), *member.prompts.thoughts_closing()]
    plain = [sum(logprob_after(member, closed, text)) for text in ("Yes.", "No, it is not.")]
    assert output["thinks"] == pytest.approx(plain)
    result = engine.generate(QUESTION, SamplingParams(max_tokens=12, max_thinking_tokens=20, logprobs=True))
    thought = member.codec.encode(result.thinking["thinks"] + "\n")
    after = [*prompt, *thought, *member.prompts.thoughts_closing()]
    assert [t.logprob for t in result.logprobs or ()] == pytest.approx(
        logprob_after(member, after, result.text), abs=1e-4
    )


def test_the_same_seed_gives_the_same_reasoning(engine: EnsembleEngine) -> None:
    params = SamplingParams(max_tokens=10, max_thinking_tokens=40, temperature=1.0, seed=3)
    first, second = (engine.generate(QUESTION, params) for _ in range(2))
    assert (first.thinking, first.text) == (second.thinking, second.text)
    assert engine.generate(QUESTION, replace(params, seed=4)).thinking != first.thinking


def test_reasoning_leaves_context_for_the_answer(folders: tuple[str, str]) -> None:
    config = MemberConfig(folders[0], name="thinks", chat_template=THINKING, thinking=True, max_context=200)
    with EnsembleEngine(EnsembleConfig([config, MemberConfig(folders[1])])) as engine:
        result = engine.generate(QUESTION, SamplingParams(max_tokens=10, max_thinking_tokens=1000))
    assert result.text
    assert result.usage.members["thinks"].thinking < 200


def test_reasoning_that_a_template_begins_by_default_is_closed_immediately(folders: tuple[str, str]) -> None:
    with EnsembleEngine(EnsembleConfig([MemberConfig(folders[0], name="mute", chat_template=ALWAYS)])) as engine:
        [member] = local_members(engine)
        text = member.prompts.tokenizer.decode(member.encode_prompt([Message("user", QUESTION)]))
        result = engine.generate(QUESTION, SamplingParams(max_tokens=5))
    assert text.endswith("<think>\n\n</think>\n\n")
    assert result.thinking == {}


def test_a_template_option_that_asks_for_reasoning_is_the_setting() -> None:
    assert MemberConfig("x", template_options={"enable_thinking": True}).thinking is True
    assert MemberConfig("x").thinking is False


def test_invalid_markers_are_refused(folders: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match="two markers"):
        MemberConfig("x", thinking=("<think>",))
    with (
        pytest.raises(MemberLoadError, match="has no reasoning"),
        EnsembleEngine(EnsembleConfig([MemberConfig(folders[0], thinking=True)])) as engine,
    ):
        engine.load()
    assert find_markers("{{ x }}[THINK]", thinking=True) is not None


def test_thinking_is_part_of_a_saved_configuration(tmp_path: Path) -> None:
    config = MemberConfig("x", thinking=("<a>", "</a>"))
    assert MemberConfig.from_dict({"model": "x", "thinking": ["<a>", "</a>"]}) == config


def test_thinking_can_be_disabled() -> None:
    member = MemberConfig("x", thinking=True, template_options={"tone": "dry"})
    assert replace(member, thinking=False).thinking is False
    assert dict(member.template_options) == {"tone": "dry"}
