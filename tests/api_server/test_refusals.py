"""Bad requests get a status and a reason, and no log has their content; concurrent good requests are answered."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from specfuse_shared import EnsembleConfig, EnsembleEngine, MemberConfig
from specfuse_shared.api_server.requests.bodies import ChatBody
from specfuse_shared.api_server.settings import ServerSettings
from specfuse_shared.members.local.session import LocalSession
from specfuse_shared.members.stages import Draft, Op
from tests.hostile.strategies import chain, rules
from tests.support.serving import QUESTION, serving, until

SECRET = "correct-horse-battery-staple"
JSON = {"Content-Type": "application/json"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": SECRET}]}
CHAINED = json.loads(chain(4000))
CONTROLS = ["<|end|>", "<|turn|>", "</s>", "<tool_call>", "\x00\x1b[31m", "{{ 7 * 7 }}", "<script>", "％s%n", "\u202e"]


@pytest.fixture(autouse=True)
def _silence(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No log contains the requests."""
    caplog.set_level(logging.DEBUG)
    yield
    ours = [record for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    text = "\n".join(record.getMessage() + str(record.exc_text) for record in ours)
    assert SECRET not in text
    assert "Authorization" not in text


def tool_of(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def schema_format(properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties}
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def refused(client: httpx.Client, status: int, *words: str, path: str = "/v1/chat/completions", **sent: Any) -> Any:
    response = client.post(path, **sent)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    for word in words:
        assert word in error["message"], error
    assert error["type"]
    return error


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "wizard", "content": SECRET}]}, "role"),
        ({"messages": [{"role": "user", "content": 5}]}, "content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "text only"),
        ({"messages": [{"role": "user", "content": SECRET, "colour": "red"}]}, "colour"),
        ({"model": 5}, "model"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "8 answers"),
        ({"top_p": 2}, "top_p"),
        ({"seed": 2**70}, "seed"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"presence_penalty": 1.0}, "repetition_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"max_token": 5}, "did you mean 'max_tokens'"),
        ({"tools": [{"type": "web_search"}]}, "type"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "none such"}}}, "tool_choice"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "wat"}}}}, "grammar"),
        ({"grammar": {"kind": "regex", "source": "("}}, "regex"),
        ({"grammar": {"kind": "choice", "source": "yes"}}, "as JSON"),
        ({"grammar": {"kind": "choice", "source": "[]"}}, "as JSON"),
        ({"timeout": 0}, "timeout"),
        ({"functions": [{"name": "f"}]}, "use tools"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "has no 'text'"),
        *(
            ({"tools": [{"type": "function", "function": {"name": name}}], "tool_choice": "none"}, f"{name!r}")
            for name in ("none", "auto", "any", "required")
        ),
    ],
)
def test_a_wrong_field_is_named(client: httpx.Client, change: dict[str, Any], word: str) -> None:
    error = refused(client, 400, word, json={**CHAT, **change})
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "change", "param", "message"),
    [
        ("/v1/chat/completions", {"max_tokens": 0}, "max_tokens", "max_tokens must be"),
        ("/v1/chat/completions", {"stop": ""}, "stop", "stop[0] must have at least 1 character"),
        ("/v1/chat/completions", {"tool_choice": 5}, "tool_choice", "string"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "string"),
        ("/v1/completions", {"prompt": "Hi", "logprobs": 21}, "logprobs", "less than or equal to 20"),
        (
            "/v1/chat/completions",
            {"max_completion_tokens": 0},
            "max_completion_tokens",
            "max_completion_tokens must be",
        ),
        ("/v1/chat/completions", {"tool_choice": "required"}, "tool_choice", '"required"'),
        ("/v1/chat/completions", {"tool_choice": "required", "tools": []}, "tool_choice", '"required"'),
        ("/v1/chat/completions", {"grammar": {"kind": "regex", "source": "("}}, "grammar", "regular expression"),
        (
            "/v1/chat/completions",
            {"tools": [tool_of("clock", {}), tool_of("letter", {"where": {"$ref": "#/$defs/Gone"}})]},
            "tools.1.function.parameters.properties.where",
            "tool 'letter' cannot be used: at properties.where: ",
        ),
        (
            "/v1/chat/completions",
            {"tools": [tool_of("clock", {}), tool_of("clock", {})]},
            "tools",
            "two tools of one name",
        ),
        (
            "/v1/chat/completions",
            {"response_format": schema_format({"day": {"type": "dat"}})},
            "response_format.json_schema.schema.properties.day",
            "at properties.day: ",
        ),
        ("/v1/responses", {"input": "Hi", "tool_choice": "required"}, "tool_choice", '"required"'),
        (
            "/v1/responses",
            {"input": "Hi", "tools": [{"type": "function", **tool_of("letter", {"to": {"type": "dat"}})["function"]}]},
            "tools.0.parameters.properties.to",
            "tool 'letter' cannot be used: at properties.to: ",
        ),
        (
            "/v1/responses",
            {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "dat"}}}},
            "text.format",
            "dat",
        ),
    ],
)
def test_an_error_has_the_field_and_the_reason(
    client: httpx.Client, path: str, change: dict[str, Any], param: str, message: str
) -> None:
    base = CHAT if path.startswith("/v1/chat") else {"model": "tiny"}
    error = refused(client, 400, message, path=path, json={**base, **change})
    assert error["param"] == param
    assert "SamplingParams" not in error["message"]
    assert "lark" not in error["message"]


@pytest.mark.parametrize(
    "raw",
    [
        *(
            b"",
            b"{",
            b"[]",
            b"null",
            b'{"model": "tiny"',
            b"\xff\xfe",
            b'{"model": NaN}',
            b'{"a": "\\ud800"}',
            b"9" * 5000,
        ),
        *(
            b"[" * 100_000,
            b'{"a":' * 50_000,
            b'{"messages": [{"role": "user", "content": "\\udc00"}], "model": "tiny"}',
        ),
    ],
)
def test_a_body_that_is_no_json_is_refused(client: httpx.Client, raw: bytes) -> None:
    refused(client, 400, "JSON", content=raw, headers=JSON)


def called(arguments: str) -> dict[str, Any]:
    """A conversation with this tool call."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    return {"messages": [*turns, {"role": "tool", "tool_call_id": "c", "content": "y"}]}


@pytest.mark.parametrize(
    "change",
    [
        {"grammar": {"kind": "choice", "source": "[" * 50_000}},
        {"grammar": {"kind": "choice", "source": "[" + "9" * 5000 + "]"}},
        {"grammar": {"kind": "json_schema", "source": '{"items":' * 20_000 + "{}" + "}" * 20_000}},
        {"grammar": {"kind": "json_schema", "source": '{"maximum":' + "9" * 5000 + "}"}},
        {
            "grammar": {
                "kind": "lark",
                "source": '%llguidance {"allow_invalid_utf8": true}\nstart: /(?-u)[\\x80-\\xff]/',
            }
        },
        {"grammar": {"kind": "json_schema", "source": chain(4000)}},
        {"grammar": {"kind": "lark", "source": rules(20_000)}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", **CHAINED}}}]},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": CHAINED}}},
        {"stop": [str(n) for n in range(1000)]},
        {"stop": "~" * 300_000},
        {"messages": [1] * 90_000},
        {"messages": [{}] * 90_000},
        {"messages": [{"role": "user", "content": "a"}] * 60_000},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 40_000}]},
        {"messages": [{"role": "user", **{str(n): 1 for n in range(90_000)}}]},
        {str(n): 1 for n in range(90_000)},
        {"x" * 1_000_000: 1},
    ],
    ids=lambda change: json.dumps(change)[:30],
)
def test_errors_of_expensive_requests_are_short(client: httpx.Client, change: dict[str, Any]) -> None:
    error = refused(client, 400, json={**CHAT, "tool_choice": "required" if "tools" in change else None, **change})
    assert len(error["message"]) < 1000


def test_of_a_million_wrong_items_the_first_is_enough() -> None:
    with pytest.raises(ValidationError) as error:
        ChatBody.model_validate({"model": "m", "messages": [1] * 1000})
    assert error.value.error_count() == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("broken", ["one", "all"])
def test_internal_errors_are_not_sent_to_clients(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, stream: bool, broken: str
) -> None:
    plainly = LocalSession.stage

    def failing(self: LocalSession, op: Op) -> Any:
        if isinstance(op, Draft) and (broken == "all" or self._member.name == "base"):
            raise RuntimeError("cannot read /srv/private/weights at http://10.0.0.7:8000")
        return plainly(self, op)

    monkeypatch.setattr(LocalSession, "stage", failing)
    options = {"events": True, "ledger": "full"}
    response = client.post(
        "/v1/chat/completions", json={**CHAT, "max_tokens": 4, "stream": stream, "specfuse": options}
    )
    assert ("failed in draft (RuntimeError" in response.text) is True
    for secret in ("/srv/private", "10.0.0.7", "Traceback", "local_session.py"):
        assert secret not in response.text


def test_a_body_must_say_that_it_is_json(client: httpx.Client) -> None:
    refused(client, 415, "Content-Type", content=json.dumps(CHAT), headers={"Content-Type": "text/plain"})


def test_a_body_of_ten_megabytes_is_refused(client: httpx.Client) -> None:
    refused(client, 413, "bytes", json={**CHAT, "user": SECRET * 400_000})


def test_a_prompt_beyond_the_limit_or_the_contexts_is_refused(client: httpx.Client, tiny: EnsembleEngine) -> None:
    error = refused(client, 400, "tokens", json={**CHAT, "messages": [{"role": "user", "content": SECRET * 1000}]})
    assert error["code"] == "context_length_exceeded"
    with serving({"tiny": tiny}, ServerSettings(max_prompt_characters=100)) as small:
        refused(small, 400, "characters", json={**CHAT, "messages": [{"role": "user", "content": SECRET * 9}]})
        refused(small, 400, "characters", path="/v1/completions", json={"model": "tiny", "prompt": SECRET * 9})


def test_an_unknown_model_is_not_found(client: httpx.Client) -> None:
    error = refused(client, 404, "'tiny/base'", json={**CHAT, "model": SECRET})
    assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_other_paths_and_methods_are_refused(client: httpx.Client) -> None:
    assert client.get(f"/{SECRET}").status_code == 404
    assert client.get(f"/v1/models?key={SECRET}").status_code == 200
    wrong = client.delete("/v1/models")
    assert (wrong.status_code, "GET" in wrong.headers["allow"]) == (405, True)


@pytest.mark.parametrize("text", CONTROLS)
def test_control_strings_are_text_in_every_field(client: httpx.Client, tiny: EnsembleEngine, text: str) -> None:
    tool = {"type": "function", "function": {"name": text, "description": text, "parameters": {"title": text}}}
    turns = [{"role": "system", "content": text}, {"role": "user", "content": text, "name": text}]
    body = {"model": "tiny", "messages": turns, "tools": [tool], "stop": [text], "user": text, "max_tokens": 4}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200 or (response.status_code == 400 and response.json()["error"]["message"])
    plain = {"model": "tiny", "messages": turns, "max_tokens": 4}
    reported = client.post("/v1/chat/completions", json=plain)
    assert reported.status_code == 200
    assert reported.json()["usage"]["prompt_tokens"] == tiny.count_tokens(turns)
    assert client.post("/v1/chat/completions", json={**plain, "model": text}).status_code == 404


def test_a_full_queue_is_reported_with_the_time_to_wait(tiny_members: list[MemberConfig]) -> None:
    config = EnsembleConfig(tiny_members, max_concurrent=1, max_queue=1, when_busy="raise")
    long = {"model": "tiny", "messages": QUESTION, "max_tokens": 2000, "ignore_eos": True, "stream": True}
    short = {"model": "tiny", "messages": QUESTION, "max_tokens": 2}
    with EnsembleEngine(config) as engine, serving({"tiny": engine}) as client, ThreadPoolExecutor(4) as pool:
        with client.stream("POST", "/v1/chat/completions", json=long) as running:
            assert running.status_code == 200
            futures = [pool.submit(client.post, "/v1/chat/completions", json=short) for _ in range(4)]
            until(lambda: sum(future.done() for future in futures) == 3)
            assert engine.metrics().waiting == 1
        answers = [future.result() for future in futures]
    busy = [answer for answer in answers if answer.status_code == 429]
    assert len(busy) == 3
    assert sorted(a.status_code for a in answers) == [200, 429, 429, 429]
    for answer in busy:
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert answer.json()["error"]["code"] == "engine_busy"


# ── fuzz ─────────────────────────────────────────────────────────────────────────────────────────

leaf = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=12)
)
anything = st.recursive(
    leaf, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=8), x, max_size=3), max_leaves=8
)
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "developer", "function"]) | st.text(max_size=5)
calls = st.fixed_dictionaries(
    {
        "function": st.fixed_dictionaries(
            {"name": st.text(max_size=5), "arguments": st.text(max_size=9) | st.just("{}")}
        )
    },
    optional={"id": st.text(max_size=5), "type": st.just("function") | anything},
)
parts = st.lists(
    st.fixed_dictionaries({"type": st.sampled_from(["text", "refusal", "x"])}, optional={"text": anything}), max_size=2
)
message = st.fixed_dictionaries(
    {"role": ROLES, "content": st.text(max_size=20) | st.sampled_from(CONTROLS) | parts | anything},
    optional={
        "name": st.text(max_size=5),
        "tool_calls": st.lists(calls, max_size=2) | anything,
        "tool_call_id": anything,
    },
)
SCHEMAS: list[dict[str, Any]] = [
    *({}, {"type": "object"}, {"type": "integer"}, {"$ref": "#/x"}, {"type": "string", "pattern": "(a+)+$"}),
    *(
        {"type": "string", "maxLength": 10**9},
        {"enum": []},
        {"anyOf": []},
        {"not": {}},
        {"type": "string", "pattern": "("},
    ),
]
schemas = st.sampled_from(SCHEMAS) | st.dictionaries(
    st.sampled_from(["type", "properties", "items", "enum", "required", "minimum"]), anything, max_size=3
)
tool = st.fixed_dictionaries(
    {
        "type": st.just("function"),
        "function": st.fixed_dictionaries(
            {"name": st.text(min_size=1, max_size=8)},
            optional={"parameters": schemas, "description": st.text(max_size=9), "strict": st.booleans()},
        ),
    }
)
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([0, 1, 0.5])
body = st.fixed_dictionaries(
    {"model": st.sampled_from(["tiny"] * 6 + ["tiny/chat", "none"]), "max_tokens": st.integers(1, 6)},
    optional={
        "messages": st.lists(message, max_size=3) | anything,
        "input": st.text(max_size=9) | st.lists(message, max_size=3) | anything,
        "prompt": st.text(max_size=9) | st.lists(st.text(max_size=9), max_size=3) | anything,
        "temperature": NUMBERS | anything,
        "top_p": NUMBERS,
        "top_k": NUMBERS,
        "min_p": NUMBERS,
        "repetition_penalty": NUMBERS,
        "seed": NUMBERS,
        "n": st.integers(-1, 3) | anything,
        "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3) | anything,
        "stream": st.booleans(),
        "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans()}) | anything,
        "logprobs": st.booleans() | st.integers(-1, 2),
        "tools": st.lists(tool, max_size=2) | anything,
        "tool_choice": st.sampled_from(["auto", "none", "required"]) | anything,
        "parallel_tool_calls": st.booleans(),
        "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}])
        | st.fixed_dictionaries(
            {"type": st.just("json_schema"), "json_schema": st.fixed_dictionaries({"schema": schemas})}
        )
        | anything,
        "grammar": st.fixed_dictionaries(
            {"kind": st.sampled_from(["regex", "choice", "lark", "json_schema"]), "source": st.text(max_size=9)}
        ),
        "min_tokens": NUMBERS,
        "ignore_eos": st.booleans(),
        "specfuse": st.fixed_dictionaries({}, optional={"events": st.booleans(), "report": st.booleans()}) | anything,
        "timeout": st.sampled_from([1e-9, 5, 0, -1]),
        "user": anything,
    },
)
PATHS = st.sampled_from(["/v1/chat/completions"] * 4 + ["/v1/completions"] * 2 + ["/v1/responses"] * 2 + ["/tokenize"])


def _survives(client: httpx.Client, path: str, sent: dict[str, Any]) -> None:
    """Assert a status below 500, or 504 after the request's own timeout, and a reason without a stack trace."""
    try:
        raw = json.dumps(sent).encode()
    except ValueError:
        raw = b"{"
    response = client.post(path, content=raw, headers=JSON)
    assert response.status_code < 500 or (response.status_code == 504 and sent.get("timeout") == 1e-9), response.text
    if response.status_code >= 400:
        assert response.json()["error"]["message"]


FUZZ: Any = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}


@settings(max_examples=100, **FUZZ)
@given(path=PATHS, sent=body)
def test_no_request_breaks_the_server(client: httpx.Client, path: str, sent: dict[str, Any]) -> None:
    _survives(client, path, sent)


@pytest.mark.weekly
@pytest.mark.timeout(1800)
@settings(max_examples=2000, **FUZZ)
@given(path=PATHS, sent=body)
def test_none_of_two_thousand_requests_breaks_the_server(client: httpx.Client, path: str, sent: dict[str, Any]) -> None:
    _survives(client, path, sent)
