"""A member's side of text: its chat template, its encoding, its tokens as a grammar reads them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from specfuse_shared.messages import Message, Tool
from specfuse_shared.text.chat_template import PLAIN_TURN_ENDS, PromptEncoder
from specfuse_shared.text.grammars.grammar import Grammar
from specfuse_shared.text.grammars.guidance import Vocabulary, token_vocabulary


class MemberText:
    """What a member's tokenizer and template say, wherever its model runs.

    `codec`: that of its answers. `vocabulary_size`: rows of the model's logits. `turn_ends`: texts by which
    a base model ends its turn.
    """

    def __init__(self, prompts: PromptEncoder, stop_ids: Sequence[int], vocabulary_size: int) -> None:
        self.prompts = prompts
        self.codec = prompts.answer_codec
        self.turn_ends = PLAIN_TURN_ENDS if prompts.kind == "plain" else ()
        self._stop_ids = tuple(stop_ids)
        self._vocabulary_size = vocabulary_size

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Prompt ids of a conversation and the tools that its answer may call. Raises `RequestError`."""
        return self.prompts.encode(messages, tools)

    def encode_thoughts(self, thoughts: str = "") -> list[int]:
        """Ids between the prompt and the answer: `thoughts`, and what ends them. None for a member that has none."""
        return (
            [*self.prompts.codec.encode(f"{thoughts}\n"), *self.prompts.thoughts_closing()]
            if self.prompts.thinks
            else []
        )

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokens as the grammar library reads them; built when the first grammar comes."""
        return token_vocabulary(self.prompts.tokenizer, self.codec.bytes_of, self._vocabulary_size, self._stop_ids)

    def prepare(self, grammar: Grammar | None = None) -> None:
        """Compile a grammar, in the thread that asks, so that no lane has to; None: only read the vocabulary.

        Raises `ConfigError` if it cannot be.
        """
        vocabulary = self.vocabulary
        if grammar is not None:
            vocabulary.matcher(grammar.compiled)
