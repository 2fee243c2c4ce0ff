"""SmolLM2 on a real vLLM server and a local Gemma answer like two local members. Skipped without vLLM."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from langchain_tests.integration_tests import ChatModelIntegrationTests

from specfuse_shared import EnsembleConfig, EnsembleEngine, Grammar, MemberConfig, SamplingParams, demo_members
from specfuse_shared.errors import ServerKeyError, ServerModelError
from specfuse_shared.events import FinishEvent, SegmentEvent, WarningEvent
from specfuse_shared.loading.gguf import converted, gguf_file
from tests.langchain.standard import ByTheDemo
from tests.servers import vllm_server
from tests.support.served import TOOL

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not vllm_server.COMMAND, reason="$SPECFUSE_VLLM names no vllm command"),
]
KEY = "of-the-tests"
SHIP = {
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "sails": {"type": "integer"},
        "old": {"type": "boolean"},
    },
    "required": ["name", "sails", "old"],
}
QUESTIONS = [
    "Why is the sky blue?",
    "Name three animals of the sea.",
    "What is 12 times 12?",
    "Write a haiku about rain.",
    "How do the tides follow the moon?",
    "What is a prime number?",
    "Give me a recipe for pancakes.",
    "Who wrote Hamlet?",
    "Explain gravity to a child.",
    "List the colours of the rainbow.",
    "What is the capital of France?",
    "Translate 'good morning' into German.",
    "How does a bicycle stay upright?",
    "What do bees make?",
    "Say something kind.",
    "Why do leaves fall?",
    "What is an atom?",
    "Describe a forest at night.",
    "How many legs has a spider?",
    "北京在哪里? 🎉",
]


class Served:
    """The same two members, one of them behind the server, and both of them here.

    `way`: how the server judges: "tokens" where it has the token endpoint, else "prefixes".
    """

    def __init__(self, way: str) -> None:
        self.way = way
        smol, gemma = (replace(m, adapter=None, dtype="float32", backend="transformers") for m in demo_members())
        file = gguf_file(smol)
        assert file is not None
        self.folder = str(converted(file, None, lambda stage: None))
        self.port = vllm_server.free_port()
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.there = MemberConfig(self.folder, name=smol.label, server=self.url, api_key_env="KEY_OF_TESTS")
        self.local = EnsembleEngine(EnsembleConfig([smol, gemma]))
        self.mixed = EnsembleEngine(EnsembleConfig([self.there, gemma]))
        taught = replace(demo_members()[1], weight=4.0)  # only this member was trained on the results of tools
        self.taught = EnsembleEngine(EnsembleConfig([self.there, taught]))
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        flags = ("--enable-scale-out", *vllm_server.GUIDANCE) if self.way == "tokens" else ()
        return vllm_server.start(self.folder, self.port, "float32", "--api-key", KEY, "--block-size", "32", *flags)


@pytest.fixture(scope="module", params=["tokens", "prefixes"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KEY_OF_TESTS", KEY)
        both = Served(request.param)
        yield both
        both.taught.close()
        both.mixed.close()
        both.local.close()
        vllm_server.stop(both.process)


def drafts(result: Any) -> list[Any]:
    return [(r.winner, r.text, [(c.text, c.drafters, c.ends) for c in r.candidates]) for r in result.rounds]


def test_twenty_answers_equal_those_of_local_members(served: Served) -> None:
    params = SamplingParams(max_tokens=24, logprobs=True, top_logprobs=5)
    before = served.mixed.load().metrics().forwards.get("smollm2-135m", 0)
    assert served.mixed.describe()[0].verification == served.way
    rounds, candidates, worst = 0, 0, 0.0
    for question in QUESTIONS:
        expected, result = served.local.generate(question, params), served.mixed.generate(question, params)
        assert result.warnings == ()
        assert (result.text, drafts(result)) == (expected.text, drafts(expected)), question
        pairs = zip(result.logprobs or (), expected.logprobs or (), strict=True)
        both: list[Any] = [each for a, b in pairs for each in zip((a, *a.top), (b, *b.top), strict=True)]
        worst = max([worst, *(abs(a.logprob - b.logprob) for a, b in both)])
        rounds += len(result.rounds)
        candidates += sum(len(record.candidates) for record in result.rounds if record.verified)
    assert worst <= 1e-3
    scoring = 3 * len(QUESTIONS)  # the prompt, the answer, and the most probable tokens at its positions
    requests = served.mixed.metrics().forwards["smollm2-135m"] - before - len(QUESTIONS) - scoring
    looks = 2 * len(QUESTIONS)  # elections of first segments before their end
    assert requests <= (rounds + candidates if served.way == "tokens" else 2 * (rounds + looks))


def test_tools_structures_stop_strings_and_seeds_work_as_locally(served: Served) -> None:
    cases: list[tuple[str, SamplingParams, dict[str, Any]]] = [
        ("Ring the bell twice.", SamplingParams(max_tokens=40), {"tools": [TOOL], "tool_choice": "any"}),
        ("Yes or no?", SamplingParams(max_tokens=8, grammar=Grammar.choice(["yes", "no"])), {}),
        ("A word?", SamplingParams(max_tokens=12, grammar=Grammar.regex("[a-f]{3,9}")), {}),
        ("A ship, as JSON.", SamplingParams(max_tokens=48, grammar=Grammar.json_schema(SHIP)), {}),
        ("Two letters.", SamplingParams(max_tokens=12, grammar=Grammar.lark('start: X " " X\nX: /[a-z]{1,6}/')), {}),
        ("Count to twenty.", SamplingParams(max_tokens=30, stop=["5", "five", "."]), {}),
        ("Go on.", SamplingParams(max_tokens=20, min_tokens=16), {}),
    ]
    for question, params, options in cases:
        expected = served.local.generate(question, params, **options)
        result = served.mixed.generate(question, params, **options)
        assert (result.text, drafts(result)) == (expected.text, drafts(expected)), question
    sampled = SamplingParams(max_tokens=16, temperature=0.9, seed=3)
    assert served.mixed.generate("A tale?", sampled).text == served.mixed.generate("A tale?", sampled).text


def test_a_draft_under_a_schema_is_few_requests(served: Served) -> None:
    if served.way != "tokens":
        pytest.skip("without the token endpoint it is one a token")
    with EnsembleEngine([served.there]) as engine:
        before = engine.load().metrics().forwards["smollm2-135m"]
        result = engine.generate("A ship, as JSON.", SamplingParams(max_tokens=48, grammar=Grammar.json_schema(SHIP)))
        requests = engine.metrics().forwards["smollm2-135m"] - before - 1
    tokens = [record.candidates[0].tokens for record in result.rounds if record.candidates[0].tokens]
    assert 3 * requests <= 2 * sum(tokens)


def test_concurrent_and_cancelled_answers_leave_no_request_at_the_server(served: Served) -> None:
    params = SamplingParams(max_tokens=16)
    expected = [served.local.generate(question, params).text for question in QUESTIONS[:8]]
    results = served.mixed.generate_batch(QUESTIONS[:8], params)
    assert [result.text for result in results] == expected
    stream = served.mixed.stream("Tell me a long tale.", SamplingParams(max_tokens=400, ignore_eos=True))
    next(event for event in stream if isinstance(event, SegmentEvent))
    stream.close()  # type: ignore[attr-defined]
    _until(lambda: not vllm_server.running(served.url))


class TestLangChainsStandardSuite(ByTheDemo, ChatModelIntegrationTests):
    """With an untrained member on the server, and a local one trained for tools."""

    engine: EnsembleEngine | None = None

    @pytest.fixture(autouse=True)
    def _use_the_taught_engine(self, served: Served) -> None:
        type(self).engine = served.taught

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": self.engine}


def test_wrong_keys_and_models_are_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServerModelError, match="has no model 'another'"):
        EnsembleEngine([replace(served.there, server_model="another")]).load()
    monkeypatch.setenv("KEY_OF_TESTS", "wrong")
    with pytest.raises(ServerKeyError, match="the one in KEY_OF_TESTS is not its own"):
        EnsembleEngine([served.there]).load()


def test_a_slow_server_is_late_a_killed_one_fails_and_a_restarted_one_returns(served: Served) -> None:
    hasty = replace(served.there, server_timeout=5.0)
    with EnsembleEngine(replace(served.mixed.config, members=[hasty, *served.mixed.config.members[1:]])) as engine:
        events = engine.load().stream("Tell me a tale.", SamplingParams(max_tokens=60, ignore_eos=True))
        next(event for event in events if isinstance(event, SegmentEvent))
        served.process.send_signal(signal.SIGSTOP)
        rest = list(events)
        served.process.send_signal(signal.SIGCONT)
        assert "did not answer within 5 s" in next(e.message for e in rest if isinstance(e, WarningEvent))
    events = served.mixed.stream("Tell me a tale.", SamplingParams(max_tokens=60, ignore_eos=True))
    output = next(event for event in events if isinstance(event, SegmentEvent))
    vllm_server.stop(served.process)
    rest = list(events)
    assert [event.member for event in rest if isinstance(event, WarningEvent)] == ["smollm2-135m"]
    last = rest[-1]
    assert isinstance(last, FinishEvent)
    assert last.result.text.startswith(output.text)
    params = SamplingParams(max_tokens=10)
    assert served.mixed.generate("Alone?", params).warnings
    served.process = served.start()
    assert not served.mixed.generate("Together?", params).warnings


def _until(condition: Any, seconds: float = 60.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.05)
