"""From a conversation to one member's prompt ids.

Each member renders the conversation with its own chat template. Roles that the template does not know are
normalised, step by step, until it renders every message. Text from users, documents and tools is data: where it
holds one of the member's control strings, that stretch is encoded as plain text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from specfuse_shared.errors import MemberLoadError, RequestError
from specfuse_shared.messages import Message, Tool
from specfuse_shared.text.codec import Codec, whole_characters
from specfuse_shared.text.roles import STEPS, Turn, marked, told
from specfuse_shared.text.stops import partial_stop
from specfuse_shared.text.text_guard import APART, TextGuard, texts_of
from specfuse_shared.text.thinking import end_of_thoughts, find_markers
from specfuse_shared.text.tool_calls import CALL_OPEN, CALL_SYNTAX, plain_description
from specfuse_shared.text.turn_marks import TurnMarks

PLAIN_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == 'system' -%}{{ message.content }}
{%- elif message.role == 'user' -%}### User:
{{ message.content }}
{%- else -%}### Assistant:
{{ message.content }}
{%- endif -%}{{ '\\n\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}### Assistant:
{% endif -%}
"""
"""For base models without a chat template: system text, then "### User:" and "### Assistant:" turns."""

PLAIN_TURN_ENDS = ("\n\n### User:", "\n\n### Assistant:", "\n### User:", "\n### Assistant:")
"""A base model ends its turn by opening the next one; its draft is cut there."""


_MARK = re.compile(r"specfuse-\d+-(?:text|call-\d+-)")
"""What `roles.marked` writes."""


_PROBE, _ANSWER = "specfuse-probe", "Hello there"
_CONVERSATION = ("system", "user", "assistant", "user", "assistant", "user")
_LAST_ANSWER = 4
"""Its place in that conversation."""


@dataclass(frozen=True, slots=True)
class AnswerBorder:
    """What stands between a prompt as the template ends it and the text of an answer.

    `mark`: what earlier answers stand behind and prompts lack, such as a channel. `lead`: blanks at the end of that;
    prompts end with so many (`written`) of them. `ends`: how prompts end that need it.
    """

    mark: str = ""
    lead: str = ""
    written: int = 0
    ends: str = ""

    @classmethod
    def between(cls, answer: str, prompt: str, ends: str) -> Self:
        """`answer`: what stands between a question and an earlier answer; `prompt`: what stands behind the last one."""
        if not answer.startswith(prompt):
            return cls()
        missing, blanks = answer.removeprefix(prompt), len(answer) - len(answer.rstrip(" "))
        written = max(0, blanks - len(missing))
        return cls(missing[: len(missing) - blanks + written], " " * blanks, written, ends)

    def completed(self, prompt: str) -> str:
        """The prompt up to the last mark in front of the answer, without blanks that belong to its first token."""
        if not prompt.endswith(self.ends):
            return prompt
        return prompt[: len(prompt) - self.written] + self.mark


class PromptEncoder:
    """Renders conversations for one member and encodes them safely.

    `template`: Jinja source given by the user, else the tokenizer's own, else `PLAIN_TEMPLATE`. `thinking`: prompts
    end where its thoughts begin, which need markers that the template knows or that are given.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str | None,
        options: Mapping[str, Any],
        member: str,
        thinking: bool | Sequence[str] = False,
    ) -> None:
        self.tokenizer = tokenizer
        self._options = {**options, "enable_thinking": bool(thinking)}
        self._member = member
        own = getattr(tokenizer, "chat_template", None)
        if isinstance(own, dict):
            own = own.get("default")
        self.template: str = template or own or PLAIN_TEMPLATE
        self.kind: Literal["given", "own", "plain"] = "given" if template else "own" if own else "plain"
        self.markers = find_markers(self.template, thinking)
        if thinking and self.markers is None:
            raise MemberLoadError(
                f"member {member!r} shall think, but its chat template knows no thoughts: leave thinking off, or give "
                'the two markers around them, MemberConfig(thinking=("<think>", "</think>"))'
            )
        self.control_ids = control_ids(tokenizer, self.template)
        self.codec = Codec(tokenizer, self.control_ids)
        added = tokenizer.added_tokens_decoder
        self._control = _alternation([str(added[i]) for i in self.control_ids if i in added])
        if self.kind != "plain":
            self._check_template()
        borders = self._borders()
        self._marks = TurnMarks(borders, self._has_control, self._around_control)
        self._border = self._answer_border(borders)
        if self.markers is not None and self.markers.wanted:
            self.markers = self.markers.in_border(self._border.mark)
        self.answer_codec = self._codec_of_answers()

    def encode(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Prompt ids of the conversation, ready for the assistant's answer. Raises `RequestError`.

        `tools` are described as the template does it; where it has no place for them, in the system text.
        """
        if not messages:
            raise RequestError("the conversation is empty: give at least one message")
        whole = APART.join(texts_of(messages, tools))
        guard = TextGuard(self._has_control, self._control, self._marks, clean=not self._has_control(whole))
        rendered = self._with_tools([guard.turn(m) for m in messages], [guard.tool(t) for t in tools])
        rendered = self._up_to_the_answer(rendered)
        ids: list[int] = []
        for piece, is_text in guard.split(rendered):
            ids += self.codec.encode(piece) if is_text else self._parse(piece)
        if not ids:
            raise RequestError(f"the chat template of member {self._member!r} rendered nothing")
        return ids

    @property
    def thinks(self) -> bool:
        """Prompts end where thoughts begin."""
        return self.markers is not None and self.markers.wanted

    def _codec_of_answers(self) -> Codec:
        """The codec that gives an answer behind its prompt the ids that it has as an earlier answer.

        Most tokenizers that put a blank before every text write the template's first one with it, and some do not.
        """
        lead = "" if self.thinks else self._border.lead
        usual = self.codec.behind(lead[1:] if self.codec.adds_blank else lead)
        written = self.codec.behind(lead)
        if written.lead == usual.lead or self._continues(usual) or not self._continues(written):
            return usual
        return written

    def _continues(self, codec: Codec) -> bool:
        """Whether a prompt and an answer in this encoding are the beginning of the next prompt, but for the last token,
        which what follows the answer may change."""
        turns = [Message("user", _PROBE), Message("assistant", _ANSWER), Message("user", _PROBE)]
        try:
            ids, later = self.encode(turns[:1]) + codec.encode(_ANSWER), self.encode(turns)
        except RequestError:
            return False
        return later[: len(ids) - 1] == ids[:-1]

    def thoughts(self, ids: Sequence[int]) -> tuple[str, int | None]:
        """Text of thoughts so far, and how many of `ids` they are if the closing marker has come."""
        assert self.markers is not None, "this member does not think"
        end = end_of_thoughts(ids, self._parse(self.markers.end), self.markers.end, self.tokenizer.decode)
        text = whole_characters(self.codec.decode(ids if end is None else ids[:end]))
        return text[: len(text) - partial_stop(text, (self.markers.end,))] if end is None else text.rstrip(), end

    def thoughts_closing(self) -> list[int]:
        """Ids between thoughts and the answer."""
        return self._parse(self.markers.closing) if self.markers else []

    def render(
        self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = (), generation_prompt: bool = True
    ) -> str:
        """The conversation as the template writes it."""
        rendered = self.tokenizer.apply_chat_template(
            list(turns),
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=generation_prompt,
            chat_template=self.template,
            **self._options,
        )
        return str(rendered)

    def turn_end(self) -> int | None:
        """The control token that the template writes behind a finished assistant turn, if it writes one."""
        probe = "specfuse-turn-end"
        turns = [{"role": "user", "content": "probe"}, {"role": "assistant", "content": probe}]
        try:
            rendered = self.tokenizer.apply_chat_template(
                turns, tokenize=False, chat_template=self.template, **self._options
            )
        except Exception:  # a template may refuse to render a finished turn; then it has no marker to offer
            return None
        after = self._parse(str(rendered).rpartition(probe)[2].lstrip())
        return after[0] if after and after[0] in self.control_ids else None

    def _with_tools(self, turns: list[Turn], tools: list[dict[str, Any]]) -> str:
        """Render; tools stand where the template puts them, or else in the system text."""
        if not tools:
            return self._normalised(turns)
        if "tools" in self.template and self._shows(turns, tools):
            native = self._normalised(turns, tools)
            # all members write one answer: one whose template teaches another syntax is told the common one
            return native if CALL_OPEN in native else self._normalised(told(turns, CALL_SYNTAX), tools)
        return self._normalised(told(turns, plain_description([tool["function"] for tool in tools])))

    def _shows(self, turns: list[Turn], tools: list[dict[str, Any]]) -> bool:
        try:
            native = self._normalised(turns, tools)
        except RequestError:
            return False
        return native != self._normalised(turns) and all(tool["function"]["name"] in native for tool in tools)

    def _normalised(self, turns: list[Turn], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Render; where the template refuses or drops a message, normalise one step further and try again."""
        problem = ""
        for step in STEPS:
            turns = step(turns)
            try:
                rendered, lost = self.render(turns, tools), self._lost(turns, tools)
            except Exception as error:  # Jinja raises whatever a template's author chose
                problem = str(error)
                continue
            if lost is None:
                return rendered
            problem = f"it drops {lost['content'][:40]!r}"
        raise RequestError(f"the chat template of member {self._member!r} cannot render this conversation: {problem}")

    def _lost(self, turns: list[Turn], tools: Sequence[Mapping[str, Any]]) -> Turn | None:
        """A turn whose text or calls the template leaves out, found by markers in their place."""
        probes = [marked(turn, f"specfuse-{number}-") for number, turn in enumerate(turns)]
        shown = set(_MARK.findall(self.render([turn for turn, _ in probes], tools)))
        return next((t for t, (_, marks) in zip(turns, probes, strict=True) for m in marks if m not in shown), None)

    def _parse(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []

    def _borders(self) -> list[str]:
        """What the template writes in front of the texts of a conversation, and in front of the answer."""
        for roles in (_CONVERSATION, ("user", "assistant"), ("user",)):
            try:
                return self._normalised([{"role": role, "content": _PROBE} for role in roles]).split(_PROBE)
            except RequestError:  # a template may refuse, or drop, some of them
                continue
        return []

    def _answer_border(self, borders: Sequence[str]) -> AnswerBorder:
        """What earlier answers stand behind, compared with the end of a prompt."""
        if len(borders) < len(_CONVERSATION) + 1:
            return AnswerBorder()
        turns = [{"role": "user", "content": _PROBE}]
        try:
            prompt, closed = self.render(turns), self.render(turns, generation_prompt=False)
        except Exception:  # such a template has been normalised; its prompts are as it ends them
            return AnswerBorder()
        opening = prompt.removeprefix(closed) if prompt.startswith(closed) else ""
        return AnswerBorder.between(borders[_LAST_ANSWER], borders[-1], opening or borders[-1])

    def _up_to_the_answer(self, rendered: str) -> str:
        """The rendered conversation with all that comes before the text of an answer, or before thoughts."""
        if self.thinks:
            assert self.markers is not None
            return self.markers.opened(rendered)
        ended = self.markers.opened(rendered) if self.markers else rendered
        return self._border.completed(ended)

    def _around_control(self, text: str) -> list[str]:
        return self._control.split(text) if self._control else [text]

    def _has_control(self, text: str) -> bool:
        return any(i in self.control_ids for i in self._parse(text))

    def _check_template(self) -> None:
        try:
            self._normalised([{"role": "user", "content": "probe"}])
        except RequestError as error:
            raise MemberLoadError(f"{error}; give a working one with MemberConfig(chat_template=…)") from error


def control_ids(tokenizer: Any, template: str) -> frozenset[int]:
    """Ids that text must never become: special tokens, and added tokens that the chat template writes itself."""
    ids = set(tokenizer.all_special_ids)
    for token_id, token in tokenizer.added_tokens_decoder.items():
        content = str(token).strip()
        if token.special or (len(content) > 1 and content in template):
            ids.add(token_id)
    return frozenset(ids)


def _alternation(strings: Sequence[str]) -> re.Pattern[str] | None:
    longest_first = sorted((s for s in strings if s.strip()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
