"""The server gives the engine's answers in OpenAI's format."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from specfuse_shared import EnsembleEngine, SamplingParams
from tests.support.serving import ADD, DIGIT, QUESTION, chat

NOTE = {"type": "function", "function": {"name": "note", "parameters": {"type": "object", "properties": {}}}}


def chunks(client: httpx.Client, path: str = "/v1/chat/completions", **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end as OpenAI's streams do."""
    options = {"model": "tiny", "stream": True, **({"messages": QUESTION} if "chat" in path else {}), **body}
    response = client.post(path, json=options)
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    *lines, last = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert last == "[DONE]"
    return [json.loads(line) for line in lines]


def deltas(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [choice["delta"] for chunk in chunks for choice in chunk["choices"]]


def test_a_chat_is_the_engines_answer(client: httpx.Client, tiny: EnsembleEngine) -> None:
    reported, result = chat(client, max_tokens=20), tiny.generate(QUESTION, SamplingParams(max_tokens=20))
    (choice,) = reported["choices"]
    assert choice["message"] == {"role": "assistant", "content": result.text, "refusal": None, "annotations": []}
    assert choice["finish_reason"] == "length"
    usage = result.usage
    assert reported["usage"] == {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }
    assert (reported["object"], reported["model"]) == ("chat.completion", "tiny")


def test_a_stream_joined_is_the_whole_answer_with_the_author_of_each_segment(client: httpx.Client) -> None:
    whole, result = chat(client, max_tokens=20), chunks(client, max_tokens=20, stream_options={"include_usage": True})
    text = "".join(delta.get("content", "") for delta in deltas(result))
    assert text == whole["choices"][0]["message"]["content"]
    assert deltas(result)[0] == {"role": "assistant", "content": ""}
    assert [chunk.get("usage") for chunk in result[:-1]] == [None] * (len(result) - 1)
    assert result[-1]["choices"] == []
    assert result[-1]["usage"] == whole["usage"]
    assert [c["choices"][0]["finish_reason"] for c in result[:-1]] == [None] * (len(result) - 2) + ["length"]
    segments = [s for c in result[:-1] for s in c["choices"][0].get("specfuse", {}).get("segments", [])]
    assert "".join(text[s["start"] : s["end"]] for s in segments) == text
    assert {s["member"] for s in segments} <= {"chat", "base"}
    assert segments == whole["choices"][0]["specfuse"]["segments"] or len(segments) > 1
    assert len({chunk["id"] for chunk in result}) == 1


def test_a_stream_without_include_usage_has_no_usage(client: httpx.Client) -> None:
    assert all("usage" not in chunk for chunk in chunks(client))


@pytest.mark.parametrize("member", ["chat", "base"])
def test_a_member_as_a_model_gives_its_own_answers(client: httpx.Client, tiny: EnsembleEngine, member: str) -> None:
    alone = tiny.generate(QUESTION, SamplingParams(max_tokens=12), members=[member])
    assert alone.members == (member,)
    reported = chat(client, model=f"tiny/{member}", max_tokens=12)
    assert reported["choices"][0]["message"]["content"] == alone.text
    assert {s["member"] for s in reported["choices"][0]["specfuse"]["segments"]} == {member}


def test_choices_are_the_answers_with_consecutive_seeds(client: httpx.Client) -> None:
    several = chat(client, n=3, temperature=1.0, seed=7, max_tokens=10)
    one_by_one = [chat(client, temperature=1.0, seed=7 + i, max_tokens=10) for i in range(3)]
    texts = [choice["message"]["content"] for choice in several["choices"]]
    assert texts == [reported["choices"][0]["message"]["content"] for reported in one_by_one]
    assert len(set(texts)) == 3
    assert several["usage"]["total_tokens"] == sum(reported["usage"]["total_tokens"] for reported in one_by_one)
    streamed = chunks(client, n=3, temperature=1.0, seed=7, max_tokens=10)
    for i in range(3):
        pieces = [c["choices"][0]["delta"].get("content", "") for c in streamed if c["choices"][0]["index"] == i]
        assert "".join(pieces) == texts[i]


def test_a_tiny_temperature_is_greedy(client: httpx.Client) -> None:
    """Logits divided by such a temperature would be infinite."""
    assert chat(client, temperature=1e-200)["choices"][0]["message"] == chat(client)["choices"][0]["message"]


def test_a_stop_string_ends_the_answer_and_is_removed(client: httpx.Client) -> None:
    text = chat(client, max_tokens=20)["choices"][0]["message"]["content"]
    stopped = chat(client, max_tokens=20, stop=[text[-3:]])["choices"][0]
    assert stopped["message"]["content"] == text[: text.index(text[-3:])]
    assert stopped["finish_reason"] == "stop"


def test_logprobs_belong_to_the_answers_tokens(client: httpx.Client) -> None:
    reported = chat(client, max_tokens=8, logprobs=True)["choices"][0]
    entries = reported["logprobs"]["content"]
    assert b"".join(bytes(e["bytes"]) for e in entries).decode() == reported["message"]["content"]
    assert all(e["logprob"] < 0 for e in entries)


def streamed(pieces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The log-probabilities of a stream; each chunk must have the tokens that end in its text."""
    text, results = "", list[dict[str, Any]]()
    for piece in pieces:
        choice = piece["choices"][0]
        new = choice["delta"].get("content") or ""
        reported = (choice["logprobs"] or {"content": []})["content"]
        assert bool(reported) <= bool(new)
        text, results = text + new, results + reported
        assert text.encode().startswith(b"".join(bytes(e["bytes"]) for e in results))
    assert b"".join(bytes(e["bytes"]) for e in results).decode() == text
    return results


@pytest.mark.parametrize("model", ["tiny", "tiny/chat", "tiny/base"])
@pytest.mark.parametrize("more", [{}, {"stop": ["e "]}, {"temperature": 1.2, "seed": 3}, {"top_logprobs": 2}], ids=str)
def test_each_chunk_has_the_logprobs_of_its_tokens(client: httpx.Client, model: str, more: dict[str, Any]) -> None:
    options = {"model": model, "max_tokens": 60, "logprobs": True, **more}
    pieces, whole = chunks(client, **options), chat(client, **options)["choices"][0]["logprobs"]["content"]
    result = streamed(pieces)
    early = sum(bool(piece["choices"][0]["logprobs"]) for piece in pieces[:-2])
    assert early > (len(pieces) / 2 if model == "tiny" else 2), "single members write many partial characters"
    if model == "tiny":  # a single random member writes tokens that differ from the encoding of its text
        assert [e["bytes"] for e in result] == [e["bytes"] for e in whole]
        assert [e["logprob"] for e in result] == pytest.approx([e["logprob"] for e in whole], abs=1e-3)
    assert [len(e["top_logprobs"]) for e in result] == [more.get("top_logprobs", 0)] * len(result)


def test_the_most_probable_tokens_at_each_position_are_reported(client: httpx.Client, tiny: EnsembleEngine) -> None:
    result = tiny.generate(QUESTION, SamplingParams(max_tokens=8, logprobs=True, top_logprobs=3))
    assert result.logprobs is not None
    expected = [[each.token for each in token.top] for token in result.logprobs]
    options = {"max_tokens": 8, "logprobs": True, "top_logprobs": 3}
    entries = chat(client, **options)["choices"][0]["logprobs"]["content"]
    assert [[each["token"] for each in entry["top_logprobs"]] for entry in entries] == expected
    for entry in entries:
        assert entry["top_logprobs"] == sorted(entry["top_logprobs"], key=lambda each: -each["logprob"])
        assert all(bytes(each["bytes"]).decode("utf-8", "replace") == each["token"] for each in entry["top_logprobs"])
    again = streamed(chunks(client, **options))
    assert [[each["token"] for each in entry["top_logprobs"]] for entry in again] == expected
    plain = chat(client, max_tokens=8, logprobs=True, top_logprobs=0)["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in plain)


def test_completions_report_logprobs_by_text_with_the_answers_own(client: httpx.Client) -> None:
    body = {"model": "tiny", "prompt": "Why is the sea salty?", "max_tokens": 8}

    def asked(**more: Any) -> Any:
        return client.post("/v1/completions", json={**body, **more}).json()["choices"][0]["logprobs"]

    reported = asked(logprobs=3)
    assert len(reported["top_logprobs"]) == len(reported["tokens"])
    for token, logprob, top in zip(
        reported["tokens"], reported["token_logprobs"], reported["top_logprobs"], strict=True
    ):
        assert 1 <= len(top) <= 4
        assert top[token] >= logprob
    assert asked(logprobs=0)["top_logprobs"] is None
    assert asked(logprobs=True)["top_logprobs"] is None
    assert asked() is None


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_forced_call_fits_its_schema_with_and_without_a_stream(client: httpx.Client, choice: Any) -> None:
    tools = [ADD, NOTE] if isinstance(choice, dict) else [ADD]
    reported = chat(client, tools=tools, tool_choice=choice, max_tokens=80)["choices"][0]
    (call,) = reported["message"]["tool_calls"]
    assert reported["finish_reason"] == "tool_calls"
    assert reported["message"]["content"] is None
    assert (call["type"], call["function"]["name"]) == ("function", "add")
    assert 0 <= json.loads(call["function"]["arguments"])["a"] <= 9
    pieces = [
        c
        for d in deltas(chunks(client, tools=tools, tool_choice=choice, max_tokens=80))
        for c in d.get("tool_calls", [])
    ]
    assert "id" in pieces[0]
    assert pieces[0]["function"]["name"] == "add"
    assert all("id" not in p and "name" not in p["function"] for p in pieces[1:])
    assert "".join(p["function"]["arguments"] for p in pieces) == call["function"]["arguments"]


def test_tool_choice_none_allows_no_call(client: httpx.Client) -> None:
    none = chat(client, tools=[ADD], tool_choice="none")["choices"][0]
    assert none["message"]["content"] == chat(client)["choices"][0]["message"]["content"]
    assert "tool_calls" not in none["message"]
    assert chat(client, tools=[ADD], tool_choice="auto")["choices"][0]["finish_reason"] in (
        "length",
        "stop",
        "tool_calls",
    )


def test_parallel_calls_are_sent_in_sequence(client: httpx.Client) -> None:
    body = {
        "tools": [NOTE],
        "tool_choice": "required",
        "parallel_tool_calls": True,
        "max_tokens": 200,
        "temperature": 1.0,
    }
    reported = [chat(client, seed=seed, **body)["choices"][0] for seed in range(3)]
    assert all(call["function"]["name"] == "note" for t in reported for call in t["message"]["tool_calls"])


def test_a_call_and_its_result_are_read_as_turns(client: httpx.Client, tiny: EnsembleEngine) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}}
    turns = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]
    turns.append({"role": "tool", "tool_call_id": "call_1", "content": "4"})
    named = [*turns[:-1], {**turns[-1], "name": "add"}]
    assert chat(client, messages=turns)["usage"]["prompt_tokens"] == tiny.count_tokens(named)


def test_a_response_format_is_enforced(client: httpx.Client) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "digit", "schema": DIGIT, "strict": True}}
    reported = chat(client, response_format=schema, max_tokens=60)["choices"][0]
    assert 0 <= json.loads(reported["message"]["content"])["a"] <= 9
    assert reported["finish_reason"] == "stop"
    assert isinstance(
        json.loads(
            chat(client, response_format={"type": "json_object"}, max_tokens=60)["choices"][0]["message"]["content"]
        ),
        dict,
    )
    plain = chat(client, response_format={"type": "text"})
    assert plain["choices"][0]["message"] == chat(client)["choices"][0]["message"]


def test_a_grammar_of_the_engine_is_enforced(client: httpx.Client) -> None:
    grammar = {"kind": "choice", "source": '["yes", "no"]'}
    assert chat(client, grammar=grammar)["choices"][0]["message"]["content"] in ("yes", "no")


def test_a_truncated_value_has_the_finish_reason_length(client: httpx.Client) -> None:
    body = {"grammar": {"kind": "lark", "source": "start: /(ab|cd){2000}/"}, "max_tokens": 20}
    reported = chat(client, **body)
    assert reported["choices"][0]["finish_reason"] == "length"
    text = reported["choices"][0]["message"]["content"]
    assert text[0] in "ac"
    count = client.post("/tokenize", json={"model": "tiny", "prompt": text}).json()["count"]
    assert reported["usage"]["completion_tokens"] == count
    result = chunks(client, **body, stream_options={"include_usage": True})
    assert "".join(d.get("content", "") for d in deltas(result)) == text
    assert result[-2]["choices"][0]["finish_reason"] == "length"
    assert result[-1]["usage"] == reported["usage"]


LETTER = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}


def test_a_value_and_a_call_closed_at_the_limit_have_the_finish_reason_length(client: httpx.Client) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "note", "schema": LETTER}}
    value = chat(client, response_format=schema, max_tokens=20)["choices"][0]
    assert value["finish_reason"] == "length"
    body = {"tools": [{"type": "function", "function": {"name": "note", "parameters": LETTER}}], "max_tokens": 80}
    reported = chat(client, **body, tool_choice="required")["choices"][0]
    result = chunks(client, **body, tool_choice="required")
    assert reported["finish_reason"] == result[-1]["choices"][0]["finish_reason"] == "length"
    [call] = reported["message"]["tool_calls"]
    with pytest.raises(json.JSONDecodeError):
        json.loads(call["function"]["arguments"])
    turns = [*QUESTION, reported["message"], {"role": "tool", "tool_call_id": call["id"], "content": "truncated"}]
    assert chat(client, messages=turns)["choices"][0]["finish_reason"]


def test_reasoning_is_separate_from_the_answer(client: httpx.Client) -> None:
    assert "reasoning_content" not in chat(client)["choices"][0]["message"]


def test_fields_of_a_response_are_accepted_in_a_history(client: httpx.Client) -> None:
    def reported(call: dict[str, Any], message: dict[str, Any]) -> Any:
        function = {"name": "add", "arguments": "{}", **call}
        turn = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}], **message}
        result = {"role": "tool", "tool_call_id": "1", "content": "7"}
        return chat(client, messages=[*QUESTION, turn, result])["choices"][0]["message"]

    read = reported({"parsed_arguments": {}}, {"parsed": {"a": 1}, "reasoning": "hm"})
    assert read == reported({}, {})


def test_fields_without_effect_are_accepted(client: httpx.Client) -> None:
    fields = {
        "user": "ada",
        "store": False,
        "presence_penalty": 0,
        "logit_bias": {},
        "reasoning_effort": "low",
        "tools": None,
    }
    fields |= {"max_completion_tokens": 8, "top_p": 0, "modalities": ["text"], "temperature": None}
    assert chat(client, **fields)["choices"][0]["message"] == chat(client)["choices"][0]["message"]


def test_completions_answer_each_prompt(client: httpx.Client, tiny: EnsembleEngine) -> None:
    prompts = ["Why is the sea salty?", "The tides follow"]
    response = client.post("/v1/completions", json={"model": "tiny", "prompt": prompts, "max_tokens": 8, "logprobs": 0})
    reported = response.json()
    results = tiny.generate_batch(prompts, SamplingParams(max_tokens=8))
    assert [choice["text"] for choice in reported["choices"]] == [result.text for result in results]
    for choice in reported["choices"]:
        assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["token_logprobs"]) > 0
    output = chunks(client, "/v1/completions", prompt=prompts, max_tokens=8)
    for i, result in enumerate(results):
        assert "".join(c["choices"][0]["text"] for c in output if c["choices"][0]["index"] == i) == result.text


def test_usage_counts_tokens_of_the_reference_member(client: httpx.Client, tiny: EnsembleEngine) -> None:
    reported = client.post("/tokenize", json={"model": "tiny", "prompt": "The sea"}).json()
    assert reported["tokens"] == tiny.tokenize("The sea")
    base = client.post("/tokenize", json={"model": "tiny/base", "prompt": "The sea"}).json()
    assert base["tokens"] == tiny.tokenize("The sea", members=["base"]) != reported["tokens"]
    counted = client.post("/tokenize", json={"model": "tiny", "messages": QUESTION, "tools": [ADD]}).json()
    assert counted["count"] == tiny.count_tokens(QUESTION, [ADD])


def test_the_record_has_the_requested_detail(client: httpx.Client) -> None:
    def record(**extension: Any) -> Any:
        return chat(client, max_tokens=20, specfuse=extension)["choices"][0]["specfuse"].get("record")

    assert record(ledger="none") is None
    assert record()["rounds"] == len(record(ledger="full")["rounds"]) > 1
    full_list, short_list = record(ledger="full")["differences"], record()["differences"]
    assert [each["text"] for each in short_list] == [each["text"] for each in full_list[: len(short_list)]]
    assert {"member", "words", "weight", "score"} <= full_list[0]["others"][0].keys()
    form = {"type": "json_schema", "json_schema": {"name": "digit", "schema": DIGIT}}
    [choice] = chat(client, max_tokens=60, response_format=form)["choices"]
    [field] = choice["specfuse"]["record"]["fields"]
    assert (field["path"], int(field["text"])) == ("$.a", json.loads(choice["message"]["content"])["a"])


def test_models_are_ensembles_and_their_members(client: httpx.Client) -> None:
    reported = client.get("/v1/models").json()
    assert [model["id"] for model in reported["data"]] == ["tiny", "tiny/chat", "tiny/base"]
    assert client.get("/v1/models/tiny/base").json() == reported["data"][2]
    assert reported["data"][0]["specfuse"]["members"] == ["chat", "base"]
    assert client.get("/v1/models/none").status_code == 404
