"""No token is computed twice: counts of fed tokens, candidates and re-encodings on the real members."""

from __future__ import annotations

import pytest

from specfuse_shared import EnsembleEngine, Message, SamplingParams, StartEvent
from specfuse_shared.runtime.kv_cache import common_length
from tests.support.against_naive import local_members, open_session, with_settings
from tests.support.marks import weekly


@pytest.mark.parametrize("speculation", ["off", "auto"])
@pytest.mark.parametrize(
    "text",
    [
        "请介绍北京的历史。🎉",
        *weekly("Why is the sky blue?", "Write a nested Python loop over a list of lists."),
    ],
)
def test_a_round_feeds_at_most_its_candidates_its_guesses_and_four_tokens(
    demo_engine: EnsembleEngine, text: str, speculation: str
) -> None:
    members = local_members(demo_engine)
    config = with_settings(demo_engine.config, exit="never", speculation=speculation)
    session = open_session(config, members, [Message("user", text)], SamplingParams(max_tokens=70))
    events = session.events()
    assert isinstance(next(events), StartEvent)
    sides = session.participants
    assert all(side.session.counts.computed == 0 for side in sides.values()), "the prompt is counted apart"
    while not session.finished:
        answer, fed = session.text, {n: s.session.counts.computed for n, s in sides.items()}
        guessed = {n: s.session.counts.guessed for n, s in sides.items()}
        drafted = {n: s.drafted for n, s in sides.items()}
        next(events)
        record = session.rounds[-1]
        for member in members:
            name, codec = member.name, member.codec
            before = codec.encode(answer)
            foreign_tokens = 0
            for candidate in record.candidates:
                if name not in candidate.drafters:
                    ids = codec.encode(answer + candidate.text)
                    foreign_tokens += len(ids) - common_length(tuple(before), tuple(ids))
            spent = sides[name].session.counts.computed - fed[name]
            spent -= sides[name].session.counts.guessed - guessed[name]
            own_tokens = sides[name].drafted - drafted[name]
            assert spent <= own_tokens + foreign_tokens + 4, (
                f"round {record.index}, {name}: {spent} fed for {own_tokens} + {foreign_tokens}"
            )
    assert speculation == "auto" or not any(side.session.counts.guessed for side in sides.values())


def test_the_prompt_is_read_once(demo_engine: EnsembleEngine) -> None:
    member = local_members(demo_engine)[0]
    lengths: list[int] = []

    def count(_: object, __: object, inputs: dict[str, object]) -> None:
        lengths.append(inputs["input_ids"].shape[1])  # type: ignore[attr-defined]

    reused = member.cache_use().reused_tokens
    hook = member.runner.model.register_forward_pre_hook(count, with_kwargs=True)
    result = demo_engine.generate("Tell me a story about the sea and the moon.", SamplingParams(max_tokens=30))
    hook.remove()
    usage = result.usage.members[member.name]
    assert lengths[0] == usage.prompt - (member.cache_use().reused_tokens - reused)
    assert sum(lengths[1:]) == usage.fed
