"""What a round costs a member behind a vLLM server, beside the usual way of scoring given text there.

python benchmarks/servers.py --server http://127.0.0.1:8000/v1 MODEL [--tokens 1000] [--rounds 10]

Each round drafts five tokens and judges two candidates of five behind a context that has grown by a segment, once by
prefixes behind the server's cache (`logprob_token_ids`), once by `prompt_logprobs`; both take turns on one server. Its
key, if it has one, is in $SPECFUSE_SERVER_KEY.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from statistics import median
from typing import Any

from specfuse_shared import MemberConfig, SamplingParams
from specfuse_shared.members.server.dialect import Continuation, ScoredLine
from specfuse_shared.members.server.member import ServerMember

KEY_ENV = "SPECFUSE_SERVER_KEY"
SEGMENT = 5


async def measure(member: ServerMember, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round's draft, and of its verification both ways."""
    codec, dialect = member.text.codec, member.dialect
    text = "The harbour master counts the boats, writes down their names and looks at the sea again. "
    ids = tuple(codec.encode(text * (tokens // 10))[:tokens])
    seconds: dict[str, list[float]] = {"draft": [], "prefixes": [], "prompt_logprobs": []}
    await dialect.continued(Continuation(ids, 1, SamplingParams(), 0, member.stop_ids))
    for number in range(rounds):
        began = time.perf_counter()
        draft, _ = await dialect.continued(Continuation(ids, SEGMENT, SamplingParams(), 0, member.stop_ids))
        seconds["draft"].append(time.perf_counter() - began)
        start = 7 * number % (tokens - SEGMENT)
        lines = [ScoredLine(ids, tuple(draft)), ScoredLine(ids, ids[start : start + SEGMENT], member.stop_ids)]
        for way in ("prefixes", "prompt_logprobs") if number % 2 else ("prompt_logprobs", "prefixes"):
            dialect.verification = "prefixes" if way == "prefixes" else "prompt"
            began = time.perf_counter()
            await dialect.judged(lines)
            seconds[way].append(time.perf_counter() - began)
        ids += tuple(draft)
    return seconds


async def run(options: Any) -> None:
    key = KEY_ENV if os.environ.get(KEY_ENV) else None
    member = ServerMember(MemberConfig(options.model, server=options.server, api_key_env=key))
    await member.connect(lambda name, answers, seconds: None)
    seconds = await measure(member, options.tokens, options.rounds)
    await member.close()
    shown = {name: median(found[1:]) for name, found in seconds.items()}
    for name, value in shown.items():
        print(f"{name:<16} {1e3 * value:8.1f} ms (median of {options.rounds - 1} rounds)")
    usual = shown["draft"] + shown["prompt_logprobs"]
    print(f"verification     {shown['prompt_logprobs'] / shown['prefixes']:8.1f} × cheaper than by prompt_logprobs")
    print(f"a whole round    {usual / (shown['draft'] + shown['prefixes']):8.1f} × cheaper, 2 requests")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="hub id or folder of the tokenizer, and the server's name of the model")
    parser.add_argument("--server", required=True)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=10)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
