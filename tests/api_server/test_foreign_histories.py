"""Conversations written by other software: the content of earlier turns never causes an error.

Each history is in the shape that a client or provider writes. All of them mean the same conversation, so that each has
the prompt of that one.
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from specfuse_shared import EnsembleEngine
from tests.support.serving import QUESTION

CALL = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "12:30"}
PLAIN = [
    {"role": "user", "content": "What time is it?"},
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
    RESULT,
    {"role": "assistant", "content": "Half past twelve."},
    {"role": "user", "content": "Thanks."},
]
USER, ASKING, _, REPLY, LAST = PLAIN


def history(asking: dict[str, Any] | None = None, result: Any = None, reply: Any = None, user: Any = None) -> list[Any]:
    """The conversation with some turns in the form of other software."""
    return [
        {**USER, **(user or {})},
        {**ASKING, **(asking or {})},
        {**RESULT, **(result or {})},
        {**REPLY, **(reply or {})},
        LAST,
    ]


def calling(**more: Any) -> dict[str, Any]:
    return {"tool_calls": [{**CALL, **more}]}


SAME = {
    "openai's sdk, dumped whole": history(
        {"refusal": None, "annotations": [], "audio": None, "function_call": None, "parsed": None},
        reply={"refusal": None, "annotations": None, "audio": None, "function_call": None, "tool_calls": None},
    ),
    "openai's sdk, parsed": history(
        {
            "tool_calls": [{**CALL, "function": {**CALL["function"], "parsed_arguments": {"zone": "UTC"}}}],
            "parsed": None,
        }
    ),
    "openai, text parts": history(
        {"content": [{"type": "text", "text": "I look.", "annotations": []}]},
        {"content": [{"type": "text", "text": "12:30"}]},
    ),
    "openai, functions of old": [
        USER,
        {"role": "assistant", "content": "I look.", "function_call": CALL["function"]},
        {"role": "function", "name": "clock", "content": "12:30"},
        REPLY,
        LAST,
    ],
    "litellm, anthropic's reasoning": history(
        {
            "thinking_blocks": [{"type": "thinking", "thinking": "A clock.", "signature": "c2ln"}],
            "reasoning_content": "A clock.",
            "provider_specific_fields": {"citations": None, "thinking_blocks": []},
        },
        reply={"provider_specific_fields": None, "images": []},
    ),
    "litellm, calls with an index": history(calling(index=0, provider_specific_fields={"thought_signature": "c2ln"})),
    "litellm, a user's cache mark": history(user={"cache_control": {"type": "ephemeral"}, "name": None}),
    "openrouter's reasoning": history(
        {
            "reasoning": "A clock.",
            "reasoning_details": [{"type": "reasoning.text", "text": "A clock.", "format": "x-v1", "index": 0}],
            "native_finish_reason": "tool_calls",
        },
        reply={"reasoning": None, "reasoning_details": [], "images": None},
    ),
    "gemini's signatures": history(
        {
            **calling(extra_content={"google": {"thought_signature": "c2ln"}}),
            "extra_content": {"google": {"thought": True}},
        }
    ),
    "deepseek and vllm's reasoning": history({"reasoning_content": "A clock.", "prefix": False}),
    "mistral's reasoning as blocks": history(
        {
            "content": [
                {"type": "thinking", "thinking": [{"type": "text", "text": "A clock."}]},
                {"type": "text", "text": "I look."},
            ]
        }
    ),
    "anthropic's blocks": history(
        {
            "content": [
                {"type": "thinking", "thinking": "A clock.", "signature": "c2ln"},
                {"type": "redacted_thinking", "data": "c2ln"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "call_1", "name": "clock", "input": {"zone": "UTC"}},
            ]
        },
        {"content": [{"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "12:30"}]}]},
    ),
    "bedrock's reasoning blocks": history({"content": [{"type": "reasoning_content", "text": "A"}, "I look."]}),
    "the ai sdk's nulls and arguments as an object": history(
        {"tool_calls": [{"id": "call_1", "type": None, "function": {"name": "clock", "arguments": {"zone": "UTC"}}}]},
        {"name": "clock"},
    ),
    "the responses api's parts in a chat": history(
        {
            "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
            "status": "completed",
        },
        {"content": [{"type": "input_text", "text": "12:30"}]},
        user={"content": [{"type": "input_text", "text": "What time is it?"}]},
    ),
    "langgraph's ids": history(
        {"id": "run-1", "response_metadata": {}}, {"id": "t", "artifact": None, "status": "success"}
    ),
    "llamaindex's extra fields": history({"additional_kwargs": {}}, {"additional_kwargs": {"is_error": False}}),
    "numbers as ids": [USER, {**ASKING, **calling(id=7)}, {**RESULT, "tool_call_id": 7}, REPLY, LAST],
    "a call that was cut off before its name": history(
        {"tool_calls": [CALL, {"id": "c", "function": {"name": None}}, None]}
    ),
}
"""Histories of one conversation."""


def tokens(client: httpx.Client, messages: list[Any]) -> int:
    reply = client.post("/tokenize", json={"model": "tiny", "messages": messages})
    assert reply.status_code == 200, reply.text
    count: int = reply.json()["count"]
    return count


def test_chat_histories_of_other_software_mean_the_same_conversation(client: httpx.Client) -> None:
    expected = tokens(client, PLAIN)
    broken = {}
    for name, messages in SAME.items():
        reply = client.post("/tokenize", json={"model": "tiny", "messages": messages})
        if reply.status_code != 200 or reply.json()["count"] != expected:
            broken[name] = reply.text
    assert not broken, f"{len(SAME) - len(broken)} of {len(SAME)} hold"


@pytest.mark.parametrize("name", ["litellm, anthropic's reasoning", "gemini's signatures", "anthropic's blocks"])
def test_chat_histories_of_other_software_are_answered(client: httpx.Client, tiny: EnsembleEngine, name: str) -> None:
    options = {"model": "tiny", "max_tokens": 4, "messages": SAME[name]}
    reply = client.post("/v1/chat/completions", json=options)
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["prompt_tokens"] == tiny.count_tokens(PLAIN)


@pytest.mark.parametrize(
    "arguments",
    ['{"a": 1', "null", "{'a': 1}", "", "[1]", '"a"', "NaN", '{"a": 1}{"b": 2}', None, 5, ["a"], '{"a":' * 9000],
)
def test_a_malformed_call_does_not_end_a_conversation(client: httpx.Client, arguments: Any) -> None:
    function = {"name": "clock", "arguments": arguments}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [{**CALL, "function": function}]}, RESULT]
    assert tokens(client, messages) == tokens(
        client,
        [USER, {"role": "assistant", "content": "", "tool_calls": [{**CALL, "function": {"name": "clock"}}]}, RESULT],
    )
    called = {"type": "function_call", "call_id": "call_1", "name": "clock", "arguments": arguments}
    item = {"type": "function_call_output", "call_id": "call_1", "output": "no JSON"}
    reply = client.post("/v1/responses", json={"model": "tiny", "input": [USER, called, item], "max_output_tokens": 4})
    assert reply.status_code == 200, reply.text


FILES = {
    "[file: report.pdf]": {
        "type": "file",
        "file": {"filename": "report.pdf", "file_data": "data:application/pdf;base64,JVBE"},
    },
    "[file: file-1]": {"type": "input_file", "file_id": "file-1"},
    "[file: https://example.org/a.pdf]": {"type": "input_file", "file_url": "https://example.org/a.pdf"},
    "[image]": {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}},
    "[image: https://example.org/a.png]": {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
    "[audio]": {"type": "input_audio", "input_audio": {"data": "UklG", "format": "wav"}},
    "[document: Plan]": {"type": "document", "title": "Plan", "source": {"type": "url", "url": "https://example.org"}},
    "[resource_link: notes.txt]": {"type": "resource_link", "name": "notes.txt", "uri": "file:///notes.txt"},
    "the text of a resource": {"type": "resource", "resource": {"uri": "file:///a", "text": "the text of a resource"}},
    "Found\nit": {
        "type": "search_result",
        "title": "Found",
        "source": "x",
        "content": [{"type": "text", "text": "it"}],
    },
}


@pytest.mark.parametrize("text", FILES)
def test_a_file_in_a_result_is_named(client: httpx.Client, text: str) -> None:
    block = FILES[text]
    output = tokens(client, history(result={"content": [{"type": "text", "text": "Here: "}, block]}))
    assert output == tokens(client, history(result={"content": f"Here: {text}"}))
    reply = client.post(
        "/v1/chat/completions",
        json={"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": [block]}]},
    )
    assert (reply.status_code, "text only" in reply.text) == (400, True), "warnings that a user enables are not skipped"


ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": "What time is it?"},
    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "c2ln", "format": "x-v1"},
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "time"}},
    {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "s", "tools": []},
    {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
        "provider_data": {"model": "m"},
    },
    {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "call_1",
        "name": "clock",
        "arguments": '{"zone": "UTC"}',
        "status": "completed",
        "provider_specific_fields": {"thought_signature": "c2ln"},
    },
    {
        "type": "function_call_output",
        "call_id": "call_1",
        "output": [{"type": "input_text", "text": "12:30"}],
        "x": None,
    },
    {"type": "message", "role": "assistant", "content": "Half past twelve.", "phase": None},
    {"role": "user", "content": "Thanks."},
]


def test_response_items_of_other_software_mean_the_same_conversation(
    client: httpx.Client, tiny: EnsembleEngine
) -> None:
    reply = client.post("/v1/responses", json={"model": "tiny", "input": ITEMS, "max_output_tokens": 4})
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["input_tokens"] == tiny.count_tokens(PLAIN)


def test_the_call_of_a_custom_tool_has_its_input(client: httpx.Client, tiny: EnsembleEngine) -> None:
    custom = {"id": "call_1", "type": "custom", "custom": {"name": "run", "input": "print(1)"}}
    turns = [USER, {"role": "assistant", "content": "", "tool_calls": [custom]}, RESULT]
    named = {**CALL, "function": {"name": "run", "arguments": {"input": "print(1)"}}}
    expected = tiny.count_tokens([USER, {"role": "assistant", "content": "", "tool_calls": [named]}, RESULT])
    assert tokens(client, turns) == expected
    items = [
        USER,
        {"type": "custom_tool_call", "call_id": "call_1", "name": "run", "input": "print(1)"},
        {"type": "custom_tool_call_output", "call_id": "call_1", "output": "12:30"},
    ]
    reply = client.post("/v1/responses", json={"model": "tiny", "input": items, "max_output_tokens": 4})
    assert reply.json()["usage"]["input_tokens"] == expected


@pytest.mark.parametrize(
    ("message", "word"),
    [
        ({"role": "user", "content": "Hi", "colour": "red"}, "colour"),
        ({"role": "system", "contents": "Be brief."}, "contents"),
        ({"role": "user", "content": [{"type": "video"}]}, "video"),
        ({"role": "wizard", "content": "Hi"}, "role"),
    ],
)
def test_the_request_itself_stays_strict(client: httpx.Client, message: dict[str, Any], word: str) -> None:
    reply = client.post("/v1/chat/completions", json={"model": "tiny", "messages": [*QUESTION, message]})
    assert (reply.status_code, word in reply.json()["error"]["message"]) == (400, True), reply.text
