"""The cost of a member on a vLLM server, by each of the ways that one server offers.

python benchmarks/servers.py --server http://127.0.0.1:8000/v1 MODEL [--tokens 1000] [--candidates 2] [--prompts]

Each round drafts five tokens and judges candidates of five after a context that has grown by a segment: at the token
endpoint, by prefixes after the cache (`logprob_token_ids`), and with --prompts by `prompt_logprobs`. At the token
endpoint the draft's own candidate is known with the draft, so that one is also left out. Then answers under a JSON
schema are drafted with as few requests as the server allows, and with one a token. All ways alternate on one server,
which needs --enable-scale-out for all of them. Its key, if it has one, is in $SPECFUSE_SERVER_KEY.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from statistics import median
from typing import Any

from specfuse_shared import Grammar, MemberConfig, Message, SamplingParams
from specfuse_shared.members.server.member import ServerMember
from specfuse_shared.members.server.session import ServerSession
from specfuse_shared.members.server.vllm import CompletionsEndpoint, Continuation, ScoredLine, ServerClient
from specfuse_shared.members.stages import Commit, Draft, Drafted, Op
from specfuse_shared.text.grammars.constraint import AnswerConstraint

KEY_ENV = "SPECFUSE_SERVER_KEY"
SEGMENT = 5
SCHEMA = {
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "purpose": {"type": "string", "maxLength": 80},
        "sails": {"type": "integer"},
        "old": {"type": "boolean"},
    },
    "required": ["name", "purpose", "sails", "old"],
}
FILLER = "The harbour master counts the boats, writes down their names and looks at the sea again. "
SUBJECTS = (
    "a ship",
    "a fishing boat",
    "a ferry",
    "a lighthouse tender",
    "a rowing boat",
    "a tug",
    "a barge",
    "a yacht",
)

Way = Callable[[list[ScoredLine]], Awaitable[Any]]


def ways_of(member: ServerMember, client: ServerClient, prompts: bool) -> dict[str, Way]:
    """How lines may be judged there."""
    text, model = CompletionsEndpoint(client), member.dialect.model
    ways: dict[str, Way] = {"prefixes": lambda lines: text.by_prefixes(model, lines)}
    if prompts:
        ways["prompt_logprobs"] = lambda lines: text.by_prompts(model, lines)
    if member.dialect.verification == "tokens":
        ways |= {"tokens": member.dialect.judged, "tokens, own known": lambda lines: member.dialect.judged(lines[1:])}
    return ways


async def measure(
    member: ServerMember, ways: Mapping[str, Way], tokens: int, rounds: int, candidates: int
) -> dict[str, list[float]]:
    """Seconds of each round's draft, and of its verification by each way."""
    codec, dialect = member.text.codec, member.dialect
    ids = tuple(codec.encode(FILLER * (tokens // 10))[:tokens])
    seconds: dict[str, list[float]] = {"draft": [], **{way: [] for way in ways}}
    for number in range(rounds):
        began = time.perf_counter()
        draft = (await dialect.continued(Continuation(ids, SEGMENT, SamplingParams(), 0, member.stop_ids))).ids
        seconds["draft"].append(time.perf_counter() - began)
        order = list(ways)
        for turn, way in enumerate(order[number % len(order) :] + order[: number % len(order)]):
            # other candidates each time, since the cache would know them
            starts = [(7 * number + 31 * turn + 101 * n) % (tokens - SEGMENT) for n in range(1, candidates)]
            others = [ScoredLine(ids, ids[start : start + SEGMENT], member.stop_ids) for start in starts]
            began = time.perf_counter()
            await ways[way]([ScoredLine(ids, tuple(draft)), *others])
            seconds[way].append(time.perf_counter() - began)
        ids += tuple(draft)
    return seconds


async def drafted(member: ServerMember, subject: str, context: int) -> tuple[float, int]:
    """Seconds of all drafts of an answer under the schema after `context` tokens, and how many it drafted."""
    params = SamplingParams(max_tokens=120, grammar=Grammar.json_schema(SCHEMA))
    asked = f"{FILLER * (context // 20)}Describe {subject} in that harbour, as JSON."
    prompt = member.text.encode_prompt([Message("user", asked)])
    session = member.open(prompt, params, seed=0)
    constraint = AnswerConstraint(Grammar.json_schema(SCHEMA), member.text.codec, params.max_tokens)
    await session.prefill()
    seconds, tokens, over, number = 0.0, 0, False, 0
    while not over:
        text = constraint.forced()
        if not text:
            began = time.perf_counter()
            draft = await stage_of(session, Draft(SEGMENT, number))
            seconds += time.perf_counter() - began
            assert isinstance(draft, Drafted)
            tokens += draft.tokens
            admitted = constraint.admit(draft.text, draft.ends)
            text, over = admitted.text, admitted.ends or admitted.reason is not None
        over = over or constraint.accepts(text)
        constraint.commit(text)
        await stage_of(session, Commit(text))
        number += 1
    return seconds, tokens


async def stage_of(session: ServerSession, op: Op) -> Any:
    return await session.stage(op)


async def under_a_schema(member: ServerMember, context: int, answers: int, asked: list[int]) -> dict[str, list[float]]:
    """Milliseconds and requests of each drafted token, a row an answer: with grammars at the server, and without."""
    rows: dict[str, list[float]] = {"few": [], "few, requests": [], "each": [], "each, requests": []}
    for number, subject in enumerate(SUBJECTS[:answers]):
        for way in ("few", "each") if number % 2 else ("each", "few"):
            member.dialect.takes_grammars, before = way == "few", asked[0]
            seconds, tokens = await drafted(member, subject, context)
            rows[way].append(1e3 * seconds / tokens)
            rows[f"{way}, requests"].append((asked[0] - before) / tokens)
    return rows


async def run(options: Any) -> None:
    key = KEY_ENV if os.environ.get(KEY_ENV) else None
    config = MemberConfig(options.model, server=options.server, api_key_env=key, server_timeout=600.0)
    member, asked = ServerMember(config), [0]

    def count(member: str, answers: int, seconds: float, steps: int = 1) -> None:
        asked[0] += 1

    await member.connect(count)
    client = ServerClient(str(config.server), os.environ.get(KEY_ENV), timeout=config.server_timeout)
    ways = ways_of(member, client, options.prompts)
    seconds = await measure(member, ways, options.tokens, options.rounds, options.candidates)
    shown = {name: median(found[1:]) for name, found in seconds.items()}
    for name, value in shown.items():
        print(f"{name:<18} {1e3 * value:8.1f} ms (median of {options.rounds - 1} rounds)")
    for name in list(shown)[1:]:
        times, whole = (
            shown["prefixes"] / shown[name],
            (shown["draft"] + shown["prefixes"]) / (shown["draft"] + shown[name]),
        )
        print(f"{name:<18} {times:8.2f} × the speed of prefixes; a whole round {whole:.2f} ×")
    if member.dialect.takes_grammars:
        rows = {
            name: median(found)
            for name, found in (await under_a_schema(member, options.tokens, options.answers, asked)).items()
        }
        for way in ("few", "each"):
            print(f"schema, {way:<10} {rows[way]:8.1f} ms and {rows[f'{way}, requests']:.2f} requests a token")
        print(f"schema             {rows['each'] / rows['few']:8.2f} × cheaper")
    await client.close()
    await member.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="hub id or folder of the tokenizer, and the server's name of the model")
    parser.add_argument("--server", required=True)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--candidates", type=int, default=2)
    parser.add_argument("--prompts", action="store_true", help="also by prompt_logprobs, which takes long")
    parser.add_argument("--answers", type=int, default=6, help="answers under a schema each way, at most 8")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
