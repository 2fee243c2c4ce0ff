"""Requests in the shapes in which Pydantic AI, OpenAI's SDK and LiteLLM send them."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from specfuse_shared import EnsembleEngine
from specfuse_shared.api_server.settings import ServerSettings
from tests.support.serving import QUESTION, serving

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("clock", "bell", "lamp")
]
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def flat(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name} for name in names]}


@pytest.mark.parametrize("name", ["clock", "bell", "lamp"])
def test_only_allowed_tools_are_called(client: httpx.Client, name: str) -> None:
    options = {"model": "tiny", "messages": QUESTION, "tools": TOOLS, "max_tokens": 60}
    reply = client.post("/v1/chat/completions", json={**options, "tool_choice": allowed("required", name)})
    [call] = reply.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == name
    options = {"model": "tiny", "input": QUESTION, "tools": FLAT, "max_output_tokens": 60}
    reported = client.post("/v1/responses", json={**options, "tool_choice": flat("required", name)}).json()
    assert [item["name"] for item in reported["output"]] == [name]
    assert reported["tool_choice"] == flat("required", name)


def test_allowed_tools_need_not_be_called_and_must_be_offered(client: httpx.Client) -> None:
    options = {"model": "tiny", "messages": QUESTION, "tools": TOOLS, "max_tokens": 4}
    reply = client.post("/v1/chat/completions", json={**options, "tool_choice": allowed("auto", "clock", "bell")})
    assert reply.status_code == 200, reply.text
    reply = client.post("/v1/chat/completions", json={**options, "tool_choice": allowed("auto", "horn")})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tool_choice")
    assert "'horn'" in reply.json()["error"]["message"]
    reply = client.post("/v1/chat/completions", json={**options, "tool_choice": allowed("sometimes", "clock")})
    assert reply.status_code == 400, reply.text


def test_the_sdk_can_restrict_the_allowed_tools(sdk: openai.OpenAI) -> None:
    choice: Any = allowed("required", "bell", "lamp")
    reply = sdk.chat.completions.create(
        model="tiny",
        messages=QUESTION,
        tools=TOOLS,
        tool_choice=choice,
        max_tokens=60,
    )
    [call] = reply.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name in ("bell", "lamp")


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"instructions": "Be brief."},
        {"tools": FLAT},
        {"tools": FLAT, "tool_choice": "none"},
        {"tools": FLAT, "tool_choice": flat("auto", "bell")},
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object", "properties": {}}}}},
    ],
    ids=str,
)
def test_the_sdk_counts_tokens_before_a_request(sdk: openai.OpenAI, client: httpx.Client, more: dict[str, Any]) -> None:
    """Pydantic AI does this to stay under a limit."""
    reported = sdk.responses.input_tokens.count(model="tiny", input=QUESTION, **more)
    assert reported.object == "response.input_tokens"
    options = {"model": "tiny", "input": QUESTION, "max_output_tokens": 40, **more}
    assert reported.input_tokens == client.post("/v1/responses", json=options).json()["usage"]["input_tokens"]


def test_a_count_of_an_impossible_request_is_refused(client: httpx.Client) -> None:
    for body, status in (({"model": "none", "input": "Hi"}, 404), ({"model": "tiny", "input": "Hi", "wish": 1}, 400)):
        assert client.post("/v1/responses/input_tokens", json=body).status_code == status
    assert client.get("/v1/responses/input_tokens").status_code in (404, 405)


# LiteLLM raises ContextWindowExceededError if the lower-case text of an error contains this
LOOKED_FOR = "this model's maximum context length is"


def test_the_error_of_a_too_long_prompt_has_the_words_that_clients_match(
    client: httpx.Client, tiny: EnsembleEngine
) -> None:
    options = {"model": "tiny", "messages": [{"role": "user", "content": "word " * 9000}], "max_tokens": 4}
    error = client.post("/v1/chat/completions", json=options).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert LOOKED_FOR in error["message"].lower()
    assert "4096 tokens" in error["message"]
    with serving({"tiny": tiny}, ServerSettings(max_prompt_characters=200)) as short:
        error = short.post("/v1/chat/completions", json=options).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
        assert LOOKED_FOR in error["message"].lower()
