"""A member on a server with the token endpoint gives the same answers as a local one, with fewer requests."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specfuse_shared import EnsembleEngine, Grammar, SamplingParams
from specfuse_shared.cli.commands import main
from specfuse_shared.members.server import vllm
from tests.servers.model_server import Ways, model_server
from tests.servers.token_route import PATH
from tests.support.marks import weekly
from tests.support.served import QUESTIONS, TOOL, WIDE, assert_same, served

SCHEMA = {"properties": {"n": {"type": "integer"}, "why": {"type": "string", "maxLength": 20}}}
LARK = 'start: word ("," word)*\nword: /[a-e]{2,5}/'
LONG = SamplingParams(max_tokens=60, ignore_eos=True)
Change = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def chat(tiny_engine: EnsembleEngine, folders: dict[str, Path]) -> Iterator[tuple[EnsembleEngine, Ways]]:
    """The chat model on a server with the endpoint, and a local base model."""
    with (
        model_server(folders["chat"], Ways(tokens=True)) as (url, ways),
        EnsembleEngine(served(tiny_engine, url, "chat")) as engine,
    ):
        yield engine.load(), ways


def drafts_and_verdicts(ways: Ways) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The requests to the endpoint."""
    requests = [body["sampling_params"] for body in ways.bodies(PATH)]
    return [p for p in requests if "prompt_logprobs" not in p], [p for p in requests if "prompt_logprobs" in p]


@pytest.mark.parametrize(
    "params",
    [
        WIDE,
        *weekly(SamplingParams(max_tokens=25, repetition_penalty=1.3)),
        SamplingParams(max_tokens=40, stop=["e"], logprobs=True, top_logprobs=3),
        *weekly(SamplingParams(max_tokens=24, min_tokens=20)),
        SamplingParams(max_tokens=24, ignore_eos=True),
        SamplingParams(max_tokens=20, grammar=Grammar.regex("[a-f]{3,9}")),
        SamplingParams(max_tokens=8, grammar=Grammar.choice(["yes", "yesterday", "no"])),
        *weekly(SamplingParams(max_tokens=30, grammar=Grammar.lark(LARK))),
        SamplingParams(max_tokens=60, grammar=Grammar.json_schema(SCHEMA)),
    ],
    ids=["plain", "penalty", "stop and logprobs", "min_tokens", "ignore_eos", "regex", "choice", "lark", "schema"],
)
def test_a_member_on_the_token_endpoint_answers_as_it_does_locally(
    tiny_engine: EnsembleEngine, chat: tuple[EnsembleEngine, Ways], params: SamplingParams
) -> None:
    engine, ways = chat
    ways.requests.clear()
    for question in QUESTIONS:
        assert_same(engine.generate(question, params), tiny_engine.generate(question, params))
    assert {path for path, body in ways.requests if "top_logprobs" not in body} >= {PATH}
    if not params.top_logprobs:
        assert not ways.bodies(), "nothing is asked by text completions"


def test_tools_are_called_as_they_are_locally(tiny_engine: EnsembleEngine, chat: tuple[EnsembleEngine, Ways]) -> None:
    options: dict[str, Any] = {"tools": [TOOL], "tool_choice": "any"}
    params = SamplingParams(max_tokens=60)
    assert_same(chat[0].generate("Ring!", params, **options), tiny_engine.generate("Ring!", params, **options))


def test_single_and_concurrent_answers_equal_local_ones(
    tiny_engine: EnsembleEngine, chat: tuple[EnsembleEngine, Ways]
) -> None:
    questions = [f"{question} {number}" for number in (1, 2) for question in QUESTIONS]
    expected = [tiny_engine.generate(question, WIDE) for question in questions]
    for result, one in zip(chat[0].generate_batch(questions, WIDE), expected, strict=True):
        assert_same(result, one)
    result = chat[0].generate(QUESTIONS[0], WIDE, members=["chat"])
    assert_same(result, tiny_engine.generate(QUESTIONS[0], WIDE, members=["chat"]))


def test_a_seed_makes_answers_repeatable(chat: tuple[EnsembleEngine, Ways]) -> None:
    grammar = Grammar.json_schema(SCHEMA)
    for params in (
        SamplingParams(max_tokens=30, temperature=1.0, seed=5),
        SamplingParams(max_tokens=40, temperature=1.0, seed=5, grammar=grammar),
    ):
        first, again = (chat[0].generate(QUESTIONS[0], params).text for _ in range(2))
        assert first == again
        assert chat[0].generate(QUESTIONS[0], replace(params, seed=6)).text != first


# ── requests ─────────────────────────────────────────────────────────────────────────────────────


def test_a_round_is_a_draft_and_at_most_a_request_for_each_other_candidate(
    tiny_engine: EnsembleEngine, folders: dict[str, Path]
) -> None:
    with (
        model_server(folders["chat"], Ways(tokens=True, block=256)) as (url, ways),
        EnsembleEngine(replace(served(tiny_engine, url, "chat"), speculation="off", early_margin=0)) as engine,
    ):
        engine.load()
        ways.requests.clear()
        result = engine.generate(QUESTIONS[0], SamplingParams(max_tokens=60))
        drafts, verdicts = drafts_and_verdicts(ways)
        assert len(result.rounds) > 5
        again = 1  # random models produce special tokens, and are requested again without them
        assert sum(draft["max_tokens"] > 1 for draft in drafts) <= len(result.rounds) + again
        candidates = sum(len(record.candidates) for record in result.rounds if record.verified)
        assert len(drafts) + len(verdicts) <= 1 + again + len(result.rounds) + candidates, "one reads the prompt"
        for params in verdicts:
            assert (params["skip_reading_prefix_cache"], params["detokenize"]) == (False, False)


def test_no_position_is_requested_twice(chat: tuple[EnsembleEngine, Ways]) -> None:
    """In an answer no position is scored twice, and no known position is drafted."""
    engine, ways = chat
    ways.requests.clear()
    engine.generate(QUESTIONS[0], SamplingParams(max_tokens=40))
    requests = [json.dumps(body) for body in ways.bodies(PATH)]
    assert len(requests) == len(set(requests))


def test_a_led_draft_is_one_request_that_verifies_the_guess(
    tiny_engine: EnsembleEngine, folders: dict[str, Path]
) -> None:
    """Both members are the same model, so that one draft often settles a round."""
    config = tiny_engine.config
    chat_member = next(m for m in config.member_configs if m.label == "chat")
    with (
        model_server(folders["chat"], Ways(tokens=True, block=64)) as (first, _),
        model_server(folders["chat"], Ways(tokens=True, block=64)) as (second, ways),
    ):
        members = [replace(chat_member, name=n, server=url) for n, url in (("quick", first), ("slow", second))]
        with EnsembleEngine(replace(config, members=members, reference=None)) as engine:
            scheduler = engine.load()._scheduler
            assert scheduler is not None
            scheduler.lane_stats = replace(scheduler.lane_stats, step_seconds=lambda: {"quick": 0.01, "slow": 1.0})
            ways.requests.clear()
            result = engine.generate(QUESTIONS[3], LONG)
        led = [record for record in result.rounds if record.leader == "quick"]
        assert len(led) > len(result.rounds) / 2
        usage = result.usage.members["slow"]
        assert usage.guessed >= usage.accepted > 0
        _, verdicts = drafts_and_verdicts(ways)
        assert len(verdicts) >= len(led)
    here = [replace(member, server=None) for member in members]
    with EnsembleEngine(replace(config, members=here, reference=None)) as engine:
        assert_same(result, engine.generate(QUESTIONS[3], LONG))


def test_a_draft_under_a_grammar_is_few_requests(
    tiny_engine: EnsembleEngine, chat: tuple[EnsembleEngine, Ways]
) -> None:
    engine, ways = chat
    for grammar in (Grammar.choice(["yes", "yesterday", "no"]), Grammar.json_schema(SCHEMA)):
        ways.requests.clear()
        result = engine.generate("Which?", SamplingParams(max_tokens=60, grammar=grammar), members=["chat"])
        drafts, _ = drafts_and_verdicts(ways)
        drawn = [record.candidates[0].tokens for record in result.rounds if record.candidates[0].tokens]
        limit = len(drawn) if grammar.kind == "choice" else len(drawn) + sum(drawn)
        assert len(drafts) - 1 <= limit, "one reads the prompt"
        assert any("structured_outputs" in draft for draft in drafts)


@pytest.mark.parametrize("lack", [{"keeps_grammars": False}, {"fails_under": r"\]> <\[0-.*\*"}], ids=["all", "ranges"])
def test_a_server_without_such_grammars_drafts_one_token_a_request(
    tiny_engine: EnsembleEngine, folders: dict[str, Path], lack: dict[str, Any]
) -> None:
    with (
        model_server(folders["chat"], Ways(tokens=True, **lack)) as (url, ways),
        EnsembleEngine(served(tiny_engine, url, "chat")) as engine,
    ):
        assert "do not keep to ranges of tokens" in engine.describe()[0].advice
        ways.requests.clear()
        params = SamplingParams(max_tokens=20, grammar=Grammar.regex("[a-f]{3,9}"))
        assert_same(engine.generate(QUESTIONS[2], params), tiny_engine.generate(QUESTIONS[2], params))
        drafts, _ = drafts_and_verdicts(ways)
        assert not [draft for draft in drafts if "structured_outputs" in draft]
        assert [draft for draft in drafts if "allowed_token_ids" in draft]


@pytest.mark.slow
def test_a_server_that_fails_under_a_grammar_drafts_single_tokens(
    tiny_engine: EnsembleEngine,
    chat: tuple[EnsembleEngine, Ways],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """vLLM fails like this if its xgrammar does not support a grammar that llguidance supports."""
    engine, ways = chat
    params = SamplingParams(max_tokens=60, grammar=Grammar.json_schema(SCHEMA))
    expected = tiny_engine.generate(QUESTIONS[2], params)
    engine.load()
    for expression in ("", r"\*"):
        ways.requests.clear()
        monkeypatch.setattr(ways, "fails_under", expression)
        result = engine.generate(QUESTIONS[2], params)
        assert_same(result, expected)
        assert result.warnings == ()
        drafts, _ = drafts_and_verdicts(ways)
        bound = [draft["structured_outputs"]["grammar"] for draft in drafts if "structured_outputs" in draft]
        assert any(re.search(expression, grammar) for grammar in bound), "it was asked, and failed"
        assert any("allowed_token_ids" in draft for draft in drafts)
    texts = [record for record in caplog.records if "--structured-outputs-config.backend guidance" in record.message]
    assert len(texts) == 1, "it is reported once"
    assert texts[0].levelname == "WARNING"


# ── rows that are missing, or were never written ─────────────────────────────────────────────────


@pytest.mark.parametrize("all_rows", [True, *weekly(False)])
def test_rows_before_the_cached_part_are_never_read(
    tiny_engine: EnsembleEngine, folders: dict[str, Path], all_rows: bool
) -> None:
    """Blocks end inside candidates, all are cached the second time, and stale rows look like valid ones."""
    ways = Ways(tokens=True, block=4, all_rows=all_rows)
    with model_server(folders["chat"], ways) as (url, _), EnsembleEngine(served(tiny_engine, url, "chat")) as engine:
        for _ in range(2):
            for question in QUESTIONS[:2]:
                assert_same(engine.generate(question, WIDE), tiny_engine.generate(question, WIDE))
        assert not engine.load().generate(QUESTIONS[0], WIDE).warnings


def test_a_candidate_with_failed_rows_is_scored_by_prefixes(
    tiny_engine: EnsembleEngine, chat: tuple[EnsembleEngine, Ways]
) -> None:
    engine, ways = chat
    ways.requests.clear()
    ways.broken_rows = 3
    assert_same(engine.generate(QUESTIONS[0], WIDE), tiny_engine.generate(QUESTIONS[0], WIDE))
    assert ways.broken_rows == 0
    assert [body for body in ways.bodies() if "logprob_token_ids" in body]


@pytest.mark.parametrize("all_rows", [True, False])
def test_responses_stay_short_at_long_contexts(
    tiny_engine: EnsembleEngine, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, all_rows: bool
) -> None:
    """A server that sends a row for every token is queried by prefixes there, whose responses have no rows."""
    monkeypatch.setattr(vllm, "MOST_ROWS", 64)
    with (
        model_server(folders["chat"], Ways(tokens=True, all_rows=all_rows)) as (url, ways),
        EnsembleEngine(served(tiny_engine, url, "chat")) as engine,
    ):
        engine.load()
        ways.requests.clear()
        for question in (QUESTIONS[0], "Say more. " * 30):
            assert_same(engine.generate(question, WIDE), tiny_engine.generate(question, WIDE))
        judged = [body for body in ways.bodies(PATH) if "prompt_logprobs" in body["sampling_params"]]
        longest = max(len(body["token_ids"]) for body in judged)
        assert (longest <= 64) == all_rows
        assert bool([body for body in ways.bodies() if "logprob_token_ids" in body]) == all_rows


# ── what is found at connect ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("ways", "way", "advice"),
    [
        (Ways(tokens=True), "tokens", ""),
        (Ways(), "prefixes", "no token endpoint: start it with --enable-scale-out; then a verification is a request"),
        (Ways(tokens=True, has_metrics=False), "prefixes", "lacks the block size of its cache"),
        (Ways(tokens=True, off_by_tokens=-0.5), "prefixes", "its token endpoint scores otherwise"),
        (Ways(tokens=True, off_by_tokens=50.0), "prefixes", "its token endpoint does not judge (the server gives"),
        (Ways(tokens=True, broken_rows=2), "tokens", ""),
    ],
    ids=["on", "off", "no metrics", "lower", "higher", "rows fail twice"],
)
def test_doctor_names_the_verification_and_the_savings_of_the_flag(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str], ways: Ways, way: str, advice: str
) -> None:
    with model_server(folders["chat"], ways) as (url, _):
        assert main(["doctor", "--member", f"{folders['chat']}@{url}", "--json"]) == 0
        [report] = json.loads(capsys.readouterr().out)["members"]
        assert report["verification"] == way
        assert advice in report["advice"]
        assert bool(report["advice"]) == bool(advice)
        assert main(["doctor", "--member", f"{folders['chat']}@{url}"]) == 0
        assert " ".join(advice.split()[:4]) in " ".join(capsys.readouterr().out.split())


# ── lies ─────────────────────────────────────────────────────────────────────────────────────────


def scores(value: Any) -> Change:
    """Set every log-probability to this value."""

    def change(reported: dict[str, Any]) -> dict[str, Any]:
        entries = [entry for row in reported["prompt_logprobs"] or [] for entry in (row or {}).values()]
        for content in reported["choices"][0]["logprobs"]["content"]:
            entries += [content, *content["top_logprobs"]]
        for entry in entries:
            entry["logprob"] = value
        return reported

    return change


def continuing_with(*ids: Any) -> Change:
    """Replace every continuation by these tokens."""

    def change(reported: dict[str, Any]) -> dict[str, Any]:
        [choice] = reported["choices"]
        entry = choice["logprobs"]["content"][0]
        content = [{**entry, "token_id": token, "rank": 1} for token in ids]
        return {**reported, "choices": [{**choice, "token_ids": list(ids), "logprobs": {"content": content}}]}

    return change


def without(name: str) -> Change:
    return lambda reported: {key: value for key, value in reported.items() if key != name}


def other_tokens_scored(reported: dict[str, Any]) -> dict[str, Any]:
    for content in reported["choices"][0]["logprobs"]["content"]:
        content["token_id"] += 1
    return reported


@pytest.mark.parametrize(
    "change",
    [
        *map(scores, (math.nan, math.inf, 800.0, 5.0, "high", None)),
        *(
            continuing_with(*range(2000)),
            continuing_with(-1),
            continuing_with(10**9),
            continuing_with("a"),
            continuing_with(True),
            continuing_with([1]),
            continuing_with(),
        ),
        *(without("choices"), lambda reported: [], lambda reported: "nonsense", lambda reported: {"choices": [{}]}),
        other_tokens_scored,
    ],
    ids=[
        *("NaN", "infinity", "800", "5", "text", "nothing"),
        *("many", "negative", "unknown", "no number", "a boolean", "a list", "none"),
        *("no choices", "a list instead", "text instead", "empty", "others scored"),
    ],
)
def test_an_invalid_server_response_removes_its_member_from_the_answer(
    chat: tuple[EnsembleEngine, Ways], change: Change
) -> None:
    engine, ways = chat
    ways.replace_tokens = change
    try:
        result = engine.generate(QUESTIONS[0], SamplingParams(max_tokens=12))
    finally:
        ways.replace_tokens = None
    [warning] = result.warnings
    assert (warning.member, warning.kind in ("ServerError", "ServerSettingsError")) == ("chat", True), warning
    assert result.text
    assert not engine.generate(QUESTIONS[0], SamplingParams(max_tokens=12)).warnings, "it is asked again"
    assert engine.describe()[0].verification == "tokens"


def wrong_rows(reported: dict[str, Any]) -> dict[str, Any]:
    rows = [None if row is None else {"3": {"logprob": -0.1, "rank": 1}} for row in reported["prompt_logprobs"] or []]
    return {**reported, "prompt_logprobs": rows or None}


@pytest.mark.parametrize(
    "change",
    [wrong_rows, without("prompt_logprobs"), lambda reported: {**reported, "prompt_logprobs": [None]}],
    ids=range(3),
)
def test_rows_of_other_tokens_are_rejected(
    tiny_engine: EnsembleEngine, chat: tuple[EnsembleEngine, Ways], change: Change
) -> None:
    engine, ways = chat
    ways.replace_tokens = change
    try:
        result = engine.generate(QUESTIONS[0], WIDE)
    finally:
        ways.replace_tokens = None
    assert_same(result, tiny_engine.generate(QUESTIONS[0], WIDE))
