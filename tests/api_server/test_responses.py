"""The Responses API: the same answers as chats, as items and as numbered events."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from specfuse_shared import EnsembleConfig, EnsembleEngine, MemberConfig
from specfuse_shared.api_server.replies.answers import ChoicePiece
from specfuse_shared.api_server.replies.responses_api import THOUGHTS, Output
from specfuse_shared.members.local.session import LocalSession
from specfuse_shared.members.stages import Draft, Op
from tests.support.serving import ADD, DIGIT, QUESTION, chat, serving, untimed
from tests.support.tiny import THINKING

ASKED: str = QUESTION[0]["content"]
TOOL = {"type": "function", **ADD["function"]}
FORMAT = {"format": {"type": "json_schema", "name": "digit", "schema": DIGIT, "strict": True}}
ENDLESS = {"kind": "lark", "source": "start: /(ab|cd){2000}/"}


def respond(client: httpx.Client, **body: Any) -> dict[str, Any]:
    response = client.post("/v1/responses", json={"model": "tiny", "input": ASKED, **body})
    assert response.status_code == 200, response.text
    reported: dict[str, Any] = response.json()
    return reported


def events(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream: named as their types, numbered from 0."""
    response = client.post("/v1/responses", json={"model": "tiny", "input": ASKED, "stream": True, **body})
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    pairs = [block.split("\n") for block in response.text.split("\n\n") if block]
    results = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name for name, _ in pairs] == [f"event: {event['type']}" for event in results]
    assert [event["sequence_number"] for event in results] == list(range(len(results)))
    return results


def grown(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items of a stream, joined from its deltas; each event must belong to an open item."""
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["item"]["status"] == "in_progress"
            items.append(event["item"])
        elif kind.endswith("part.added"):
            place = "summary" if "summary" in kind else "content"
            assert len(items[-1][place]) == event[f"{place}_index"]
            items[-1][place].append(event["part"])
        elif kind == "function_call_arguments.delta":
            items[-1]["arguments"] += event["delta"]
        elif kind.endswith(".delta"):
            place = "summary" if "summary" in kind else "content"
            items[-1][place][0]["text"] += event["delta"]
        elif kind == "output_item.done":
            items[-1]["status"] = event["item"]["status"]
            assert event["item"] | {"content": None} == items[-1] | {"content": None}
        if "item_id" in event:
            assert event["item_id"] == items[event["output_index"]]["id"] == items[-1]["id"]
    return items


def bare(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items without ids and other fields that differ between answers."""
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


def places(specfuse: dict[str, Any]) -> list[tuple[str, int, int]]:
    return [(segment["member"], segment["start"], segment["end"]) for segment in specfuse["segments"]]


def test_a_response_equals_the_answer_of_a_chat(client: httpx.Client) -> None:
    reported, same = respond(client, max_output_tokens=12), chat(client, max_tokens=12)
    (item,) = reported["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
    (part,) = item["content"]
    assert part == {
        "type": "output_text",
        "annotations": [],
        "logprobs": [],
        "text": same["choices"][0]["message"]["content"],
    }
    assert (reported["status"], reported["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    usage = same["usage"]
    assert reported["usage"] | {"input_tokens_details": 0, "output_tokens_details": 0} == {
        "input_tokens": usage["prompt_tokens"],
        "output_tokens": usage["completion_tokens"],
        "total_tokens": usage["total_tokens"],
        "input_tokens_details": 0,
        "output_tokens_details": 0,
    }
    assert places(reported["specfuse"]) == places(same["choices"][0]["specfuse"])
    assert (reported["object"], reported["model"], reported["store"], reported["error"]) == (
        "response",
        "tiny",
        False,
        None,
    )


def test_instructions_and_every_way_to_write_turns_are_read_as_a_chat_reads_them(client: httpx.Client) -> None:
    turns = [{"role": "system", "content": "Be brief."}, *QUESTION]
    expected = chat(client, messages=turns)["choices"][0]["message"]["content"]
    ways: list[dict[str, Any]] = [
        {"instructions": "Be brief.", "input": ASKED},
        {"input": turns},
        {"input": [{"type": "message", "role": "developer", "content": "Be brief."}, *QUESTION]},
        {"instructions": "Be brief.", "input": [{"role": "user", "content": [{"type": "input_text", "text": ASKED}]}]},
    ]
    assert {text_of(respond(client, **way)) for way in ways} == {expected}
    assert text_of(respond(client)) != expected


def test_sampling_stops_and_members_work_as_in_a_chat(client: httpx.Client) -> None:
    sampled = {"temperature": 1.0, "seed": 3, "top_p": 0.9}
    assert text_of(respond(client, **sampled)) == chat(client, **sampled)["choices"][0]["message"]["content"]
    assert (respond(client, **sampled)["temperature"], respond(client)["temperature"]) == (1.0, 0.0)
    reported = respond(client, model="tiny/base", ignore_eos=True)
    assert {segment["member"] for segment in reported["specfuse"]["segments"]} == {"base"}
    ended = respond(client, stop=text_of(respond(client))[-2:])
    assert (ended["status"], ended["incomplete_details"]) == ("completed", None)
    assert ended["output"][0]["status"] == "completed"


def test_a_stream_grows_into_the_whole_response(client: httpx.Client) -> None:
    options = {"max_output_tokens": 40, "ignore_eos": True}
    result, whole = events(client, **options), respond(client, **options)
    kinds = [event["type"] for event in result]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert len(kinds[4:-4]) > 1
    last = result[-1]["response"]
    assert bare(grown(result)) == bare(last["output"]) == bare(whole["output"])
    assert last["usage"] == whole["usage"]
    assert result[0]["response"]["status"] == "in_progress"
    assert result[0]["response"]["id"] == last["id"]
    segments = [s for event in result[4:-4] for s in event["specfuse"]["segments"]]
    assert segments == last["specfuse"]["segments"]


def test_log_probabilities_are_sent_if_they_are_included(client: httpx.Client) -> None:
    options = {"include": ["message.output_text.logprobs"]}
    expected = chat(client, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert respond(client, **options)["output"][0]["content"][0]["logprobs"] == untimed(expected)
    tops = chat(client, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    for more in (options, {}):
        assert respond(client, **more, top_logprobs=2)["output"][0]["content"][0]["logprobs"] == untimed(tops)
    result = events(client, **options)
    (done,) = [event for event in result if event["type"] == "response.output_text.done"]
    assert done["logprobs"] == untimed(expected)
    called = respond(client, **options, tools=[TOOL], tool_choice="required", max_output_tokens=80)
    assert [item["type"] for item in called["output"]] == ["function_call"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "add"}])
def test_a_call_is_an_item_with_and_without_a_stream(client: httpx.Client, choice: Any) -> None:
    body = {"tools": [TOOL], "tool_choice": choice, "max_output_tokens": 80}
    (call,) = respond(client, **body)["output"]
    assert (call["type"], call["name"], call["status"]) == ("function_call", "add", "completed")
    assert 0 <= json.loads(call["arguments"])["a"] <= 9
    result = events(client, **body)
    assert bare(grown(result)) == bare(result[-1]["response"]["output"]) == bare([call])
    (done,) = [event for event in result if event["type"] == "response.function_call_arguments.done"]
    assert (done["name"], done["arguments"]) == ("add", call["arguments"])
    assert result[-1]["type"] == "response.completed"
    assert result[-1]["response"]["tools"][0]["name"] == "add"
    assert result[-1]["response"]["tool_choice"] == choice


def test_a_truncated_call_is_incomplete_and_its_arguments_are_never_done() -> None:
    """Clients call a tool with arguments that are done."""
    output = Output(THOUGHTS)
    begun = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a"'}}
    reported = [
        kind for piece in (ChoicePiece(text="I add."), ChoicePiece(calls=[begun])) for kind, _ in output.write(piece)
    ]
    reported += [kind for kind, _ in output.write(ChoicePiece(finish_reason="length"))]
    assert reported[-3:] == ["output_item.added", "function_call_arguments.delta", "output_item.done"]
    assert [item["status"] for item in output.items] == ["completed", "incomplete"]
    assert output.items[1]["arguments"] == '{"a"'
    assert "function_call_arguments.done" not in reported
    assert reported.count("output_item.done") == 2


@pytest.mark.parametrize("summary", [None, "auto"])
def test_reasoning_is_a_separate_item(tiny_members: list[MemberConfig], summary: str | None) -> None:
    chat_member, base = tiny_members
    members = [replace(chat_member, chat_template=THINKING, thinking=True), base]
    with EnsembleEngine(EnsembleConfig(members)) as engine, serving({"tiny": engine}) as client:
        options = {"max_thinking_tokens": 12, "reasoning": {"summary": summary}}
        result, whole = events(client, **options), respond(client, **options)
        same = chat(client, max_thinking_tokens=12)["choices"][0]["message"]
    thoughts, message = whole["output"]
    (part,) = thoughts["summary" if summary else "content"]
    assert part == {"type": "summary_text" if summary else "reasoning_text", "text": same["reasoning_content"]}
    assert message["content"][0]["text"] == same["content"]
    assert bare(grown(result)) == bare(result[-1]["response"]["output"]) == bare(whole["output"])
    kinds = [event["type"].removeprefix("response.") for event in result]
    assert ("reasoning_summary_text.done" if summary else "reasoning_text.done") in kinds
    assert kinds.index("output_item.done") < kinds.index("output_text.delta")


def test_calls_and_their_results_are_one_turn_each(client: httpx.Client, tiny: EnsembleEngine) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}}
    second_call = {"id": "call_2", "type": "function", "function": {"name": "add", "arguments": '{"a": 4}'}}
    turns = [
        *QUESTION,
        {"role": "assistant", "content": "I add.", "tool_calls": [call, second_call]},
        {"role": "tool", "name": "add", "tool_call_id": "call_1", "content": "4"},
        {"role": "tool", "name": "add", "tool_call_id": "call_2", "content": "5"},
    ]
    items: list[Any] = [
        *QUESTION,
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "role": "assistant", "id": "msg_1", "content": [{"type": "output_text", "text": "I add."}]},
        {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a": 3}', "id": "fc_1"},
        {"type": "function_call", "call_id": "call_2", "name": "add", "arguments": '{"a": 4}', "status": "completed"},
        {"type": "function_call_output", "call_id": "call_1", "output": "4"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "5"}]},
    ]
    assert respond(client, input=items)["usage"]["input_tokens"] == tiny.count_tokens(turns)


def test_a_text_format_is_enforced(client: httpx.Client) -> None:
    reported = respond(client, text=FORMAT, max_output_tokens=60)
    assert 0 <= json.loads(text_of(reported))["a"] <= 9
    assert (reported["status"], reported["text"]["format"]["name"]) == ("completed", "digit")
    assert isinstance(
        json.loads(text_of(respond(client, text={"format": {"type": "json_object"}}, max_output_tokens=60))), dict
    )
    plain = respond(client, text={"format": {"type": "text"}, "verbosity": "low"})
    assert text_of(plain) == text_of(respond(client))
    cut = respond(client, grammar=ENDLESS, max_output_tokens=20)
    assert (cut["status"], cut["output"][0]["status"]) == ("incomplete", "incomplete")
    assert cut["usage"]["output_tokens"]


def test_fields_without_effect_are_accepted(client: httpx.Client) -> None:
    extra = {
        "store": False,
        "previous_response_id": None,
        "metadata": {"run": "7"},
        "user": "ann",
        "truncation": "disabled",
        "reasoning": {"effort": "low"},
        "include": ["reasoning.encrypted_content"],
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "parallel_tool_calls": True,
        "stream_options": {"include_obfuscation": False},
        "max_tool_calls": 3,
    }
    reported = respond(client, **extra)
    assert text_of(reported) == text_of(respond(client))
    assert reported["metadata"] == {"run": "7"}


@pytest.mark.parametrize(
    ("change", "param", "word"),
    [
        ({"store": True}, "store", "no response is stored"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "whole conversation as input"),
        ({"conversation": "conv_1"}, "conversation", "whole conversation as input"),
        ({"background": True}, "background", "stream the answer"),
        ({"prompt": {"id": "p"}}, "prompt", "not supported"),
        ({"truncation": "auto"}, "truncation", "shorten"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0", "stored"),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input", "no message"),
        ({"input": [{"type": "hologram", "id": "h_1"}]}, "input.0", "message"),
        ({"input": [{"role": "user"}]}, "input.0.content", "required"),
        ({"input": []}, "input", "no message"),
        ({"input": [5]}, "input.0", "valid"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "no message"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, None, "text only"),
        ({"input": [{"type": "function_call", "call_id": "c", "arguments": "["}]}, "input.0.name", "required"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater"),
        ({"n": 2}, "n", "less"),
        ({"top_logprobs": 21}, "top_logprobs", "less"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "function"),
        ({"tools": [ADD]}, "tools.0.name", "required"),
        ({"tool_choice": "required"}, "tool_choice", '"required"'),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.type", "function"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}},
            "tool_choice",
            "not in tools",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "schema"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type", "json_schema"),
        ({"metadata": {"a": 1}}, "metadata.a", "string"),
        ({"max_output_token": 5}, "max_output_token", "did you mean 'max_output_tokens'"),
        ({"messages": QUESTION}, "messages", "no setting 'messages'"),
        ({"model": "none"}, "model", "no model"),
    ],
)
def test_impossible_fields_are_named(
    client: httpx.Client, change: dict[str, Any], param: str | None, word: str
) -> None:
    for stream in (False, True):
        response = client.post("/v1/responses", json={"model": "tiny", "input": ASKED, "stream": stream, **change})
        assert response.status_code == (404 if "model" in change else 400), response.text
        error = response.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert word in error["message"], error


def test_an_error_during_a_stream_is_a_numbered_event(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    plainly, drafts = LocalSession.stage, list[Op]()

    def failing(self: LocalSession, op: Op) -> Any:
        if isinstance(op, Draft) and len(drafts) > 3:
            raise RuntimeError("cannot read /srv/private/weights")
        drafts.append(op)
        return plainly(self, op)

    monkeypatch.setattr(LocalSession, "stage", failing)
    result = events(client, max_output_tokens=400, ignore_eos=True)
    assert "response.output_text.delta" in {event["type"] for event in result}
    assert result[-1]["type"] == "error"
    assert result[-1]["code"] == result[-1]["error"]["code"] == "generation_failed"
    assert result[-1]["message"]
    assert "/srv/private" not in json.dumps(result)
    drafts.clear()
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as sdk:
        options: Any = {"model": "tiny", "input": ASKED, "max_output_tokens": 400, "extra_body": {"ignore_eos": True}}
        stream = sdk.responses.create(**options, stream=True)
        with pytest.raises(openai.APIError, match="failed"):
            list(stream)


def test_responses_are_not_stored(client: httpx.Client) -> None:
    reported = client.get(f"/v1/responses/{respond(client)['id']}")
    assert (reported.status_code, "no response is stored" in reported.text) == (404, True)


@pytest.mark.parametrize("number", ["1e400", "NaN", "Infinity", "9" * 5000])
def test_echoed_fields_are_json(client: httpx.Client, number: str) -> None:
    tool = {"type": "function", "name": "add", "parameters": {"type": "object", "default": "NUMBER"}}
    options = {"model": "tiny", "input": "Hi", "tool_choice": "none", "tools": [tool]}
    raw = json.dumps(options).replace('"NUMBER"', number)
    headers = {"Content-Type": "application/json"}
    for more in ("", '"stream": true, '):
        response = client.post("/v1/responses", content=raw.replace('"model"', more + '"model"', 1), headers=headers)
        assert response.status_code == 400, response.text
