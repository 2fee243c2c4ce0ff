"""A process that generates random answers under grammars from its standard input, and prints their outcomes."""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from typing import Any

from specfuse_shared import Grammar
from specfuse_shared.errors import SpecFuseError
from specfuse_shared.text.chat_template import PromptEncoder
from specfuse_shared.text.grammars.constraint import AnswerConstraint, MemberConstraint
from specfuse_shared.text.grammars.grammar import schema_request
from specfuse_shared.text.grammars.guidance import token_vocabulary
from tests.support.tiny import byte_level_tokenizer

ROUNDS, TOKENS, MOST_TOKENS = 12, 6, 64


class Follower:
    """Follows grammars like an answer of one member that produces random text."""

    def __init__(self) -> None:
        tokenizer = byte_level_tokenizer()
        self.codec = PromptEncoder(tokenizer, None, {}, "tiny").codec
        self.stop_ids = [tokenizer.eos_token_id]
        self.vocabulary = token_vocabulary(tokenizer, self.codec.bytes_of, len(tokenizer), self.stop_ids)
        self.slowest = 0.0

    def follow(self, fields: dict[str, Any], seed: int) -> str:
        """The outcome of an answer under the grammar: how it ended, or the kind of the error."""
        chance, self.slowest = random.Random(seed), 0.0
        try:
            grammar = Grammar(**fields)
            if grammar.kind == "json_schema":
                schema_request(json.loads(grammar.source))
            answer = AnswerConstraint(grammar, self.codec, MOST_TOKENS)
            member = MemberConstraint(grammar, self.vocabulary, self.stop_ids)
            return self._answer(answer, member, chance)
        except SpecFuseError as error:
            return type(error).__name__

    def _answer(self, answer: AnswerConstraint, member: MemberConstraint, chance: random.Random) -> str:
        for _ in range(ROUNDS):
            began = time.thread_time()
            text = answer.forced() or self._draft(member, chance)
            admitted = answer.admit(text, ends=True)
            answer.commit(admitted.text)
            member.commit(admitted.text)
            self.slowest = max(self.slowest, time.thread_time() - began)
            if admitted.ends or admitted.reason:
                break
        return "an answer"

    def _draft(self, member: MemberConstraint, chance: random.Random) -> str:
        member.start()
        ids: list[int] = []
        for _ in range(TOKENS):
            bits = member.allowed()
            allowed = [i for i in range(len(bits) * 8) if bits[i >> 3] >> (i & 7) & 1]
            if member.finished or not allowed or (token := chance.choice(allowed)) in self.stop_ids:
                break
            member.advance(token)
            ids.append(token)
        return self.codec.decode(ids).rstrip("\ufffd")


def main() -> None:
    """Reads a grammar a line; prints its outcome and the processor seconds of its slowest round."""
    follower = Follower()
    write_line("ready")
    for line in sys.stdin:
        fields, seed = json.loads(line)
        reported = follower.follow(fields, seed)
        write_line([reported, follower.slowest])


def write_line(what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    threading.stack_size(512 * 1024)  # the stack size of a thread on macOS
    thread = threading.Thread(target=main)
    thread.start()
    thread.join()
