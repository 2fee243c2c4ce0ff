"""From a conversation to one member's prompt ids.

Each member renders the conversation with its own chat template. Roles that the template does not know are
normalised, step by step, until it renders every message. Text from users, documents and tools is data: if it contains
one of the member's control strings, that stretch is encoded as plain text.

Some templates mark turns by plain text ("### Assistant:", "[/INST]"), which any text can contain. Text in a message
could then start the next turn, so a backslash after its first character breaks every such mark inside a message.

Reasoning is text that a member writes before it answers, between two markers of its chat template.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Self

from specfuse_shared.errors import MemberLoadError, RequestError
from specfuse_shared.messages import Message, Tool
from specfuse_shared.text.codec import Codec, whole_characters
from specfuse_shared.text.grammars.grammar import Grammar
from specfuse_shared.text.grammars.guidance import Vocabulary, token_vocabulary
from specfuse_shared.text.stops import partial_stop
from specfuse_shared.text.tool_calls import CALL_OPEN, CALL_SYNTAX, call_text, plain_description

Turn = dict[str, Any]
"""A message as chat templates read it."""


_RESULT = re.compile(r"^([^\S\n]*R)(esult of .*:)", re.MULTILINE)
"""A line of a user that looks like the head of a tool's result."""


def as_given(turns: list[Turn]) -> list[Turn]:
    return turns


def with_system_text(turns: list[Turn], text: str) -> list[Turn]:
    """The conversation with a further system text."""
    return merge_system([*turns, {"role": "system", "content": text}])


def merge_system(turns: list[Turn]) -> list[Turn]:
    """All system messages as one, in front."""
    system = [t["content"] for t in turns if t["role"] == "system"]
    rest = [t for t in turns if t["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(system)}, *rest] if system else rest


def tools_as_text(turns: list[Turn]) -> list[Turn]:
    """Tool calls as text of the assistant, tool results as quotes of the user, whose own texts cannot look like one."""

    def plain(turn: Turn) -> Turn:
        if turn["role"] == "tool":
            quoted = "\n".join(f"> {line}" for line in turn["content"].split("\n"))
            return {"role": "user", "content": f"Result of {turn.get('name') or 'tool'}:\n{quoted}"}
        if turn["role"] == "user":
            return {**turn, "content": _RESULT.sub(r"\1\\\2", turn["content"])}
        calls = [call_text(c["function"]["name"], c["function"]["arguments"]) for c in turn.get("tool_calls", ())]
        return {"role": turn["role"], "content": "\n".join(filter(None, [turn["content"], *calls]))}

    return [plain(t) for t in turns]


def alternate(turns: list[Turn]) -> list[Turn]:
    """Neighbours of one role as one message. If no user turn comes first, one is added: "(the conversation so far)", or
    an empty one if there is only a system text."""
    groups = (list(group) for _, group in itertools.groupby(turns, key=lambda turn: turn["role"]))
    merged = [
        group[0] if len(group) == 1 else {"role": group[0]["role"], "content": "\n\n".join(t["content"] for t in group)}
        for group in groups
    ]
    start = 1 if merged[0]["role"] == "system" else 0
    if len(merged) == start or merged[start]["role"] == "assistant":
        merged.insert(start, {"role": "user", "content": "(the conversation so far)" if len(merged) > start else ""})
    return merged


def fold_system(turns: list[Turn]) -> list[Turn]:
    """The system text in front of the first user message."""
    if turns[0]["role"] != "system":
        return turns
    system, first, *rest = turns
    return [{"role": "user", "content": f"{system['content']}\n\n{first['content']}".strip()}, *rest]


def marked(turn: Turn, mark: str) -> tuple[Turn, list[str]]:
    """The turn with markers for its text and the names of its calls, and these markers."""
    marks, marked = [], dict(turn)
    if turn["content"].strip():
        marked["content"] = f"{mark}text"
        marks.append(marked["content"])
    if "tool_calls" in turn:
        names = [f"{mark}call-{number}-" for number in range(len(turn["tool_calls"]))]
        marked["tool_calls"] = [
            {**call, "function": {**call["function"], "name": name}}
            for call, name in zip(turn["tool_calls"], names, strict=True)
        ]
        marks += names
    return marked, marks


STEPS = (as_given, merge_system, tools_as_text, alternate, fold_system)
"""In this order, until a template keeps every message."""


@dataclass(frozen=True, slots=True)
class Markers:
    """The strings around a member's reasoning, and the text between it and the answer.

    `before` and `begin`: written around `start` if the template does not begin the reasoning itself. `empty`: the text
    that ends it at once, if the template begins it. `wanted`: the member should reason.
    """

    start: str
    end: str
    closing: str
    before: str = ""
    begin: str = "\n"
    empty: str = ""
    wanted: bool = False

    def opened(self, prompt: str) -> str:
        """The prompt with begun reasoning or, if the template begins it unasked, with reasoning that ended at once."""
        begun = prompt.rstrip().endswith(self.start)
        if self.wanted:
            return prompt if begun else f"{prompt}{self.before}{self.start}{self.begin}"
        return f"{prompt.rstrip()}{self.empty or f'{chr(10) * 2}{self.closing}'}" if begun else prompt

    def in_border(self, mark: str) -> Markers:
        """Markers adapted to `mark`, the text before answers: it contains empty reasoning, or follows reasoning."""
        if self.start in mark:
            before, _, rest = mark.partition(self.start)
            return replace(self, before=before, closing=f"{self.end}{rest.rpartition(self.end)[2]}")
        return self if not mark.strip() else replace(self, closing=f"{self.closing.rstrip()}{mark}")


def _between(start: str, end: str) -> Markers:
    return Markers(start, end, closing=f"{end}\n\n")


KNOWN = (
    _between("<think>", "</think>"),
    _between("<thinking>", "</thinking>"),
    _between("<thought>", "</thought>"),
    _between("<seed:think>", "</seed:think>"),
    _between("[THINK]", "[/THINK]"),
    _between("<|START_THINKING|>", "<|END_THINKING|>"),
    Markers("<|channel>thought", "<channel|>", closing="<channel|>", empty="\n<channel|>"),
    Markers("<|channel|>analysis<|message|>", "<|end|>", closing="<|end|><|start|>assistant", begin=""),
)
"""Texts that templates put around reasoning: Gemma 4 and gpt-oss name a channel."""
_SHARED_ENDS = ("<|end|>",)
"""Ends of reasoning that also end turns, and so do not identify a template."""


def find_markers(template: str, thinking: bool | Sequence[str]) -> Markers | None:
    """The markers that are given, or those that the template knows; None if there are none."""
    if not isinstance(thinking, bool):
        start, end = thinking
        return replace(_between(start, end), wanted=True)
    markers_known = next((markers for markers in KNOWN if _knows(template, markers)), None)
    return replace(markers_known, wanted=thinking) if markers_known else None


def _knows(template: str, markers: Markers) -> bool:
    return markers.start in template or (markers.end in template and markers.end not in _SHARED_ENDS)


def end_of_thoughts(ids: Sequence[int], marker: Sequence[int], text: str, decode: Callable[[Any], str]) -> int | None:
    """How many of `ids` come before the closing marker, written as the ids `marker` or as `text`; None without it."""
    size = len(marker)
    for start in range(len(ids) - size + 1):
        if size and list(ids[start : start + size]) == list(marker):
            return start
    place = decode(ids).find(text)
    if place < 0:
        return None
    return next(count for count in range(len(ids), -1, -1) if len(decode(ids[:count])) <= place)


_LINE_START, _LINE_END = r"^[^\S\n]*", r"[^\S\n]*$"
_WORDS_ONLY = re.compile(r"[\w\s]*")


class TurnMarks:
    """The marks of one template. `borders`: its text before the messages of a conversation, and at the end.

    `has_control`: whether a text holds control tokens; `without_control`: the text around them.
    """

    def __init__(
        self, borders: Sequence[str], has_control: Callable[[str], bool], without_control: Callable[[str], list[str]]
    ) -> None:
        plain = [text for text in borders[1:] if text.strip() and not has_control(text)]
        # if one border is text, marks next to control tokens elsewhere look like turns, too
        plain_parts = [part for text in borders if has_control(text) for part in without_control(text)] if plain else []
        patterns = {pattern for text in plain for pattern in _patterns(text)}
        patterns |= {pattern for text in plain_parts for pattern in _patterns(text) if not _WORDS_ONLY.fullmatch(text)}
        longest_first = sorted(patterns, key=lambda pattern: (-len(pattern), pattern))
        self._search = re.compile("|".join(longest_first), re.MULTILINE) if patterns else None

    def broken(self, text: str) -> str:
        """The text with every mark in it broken."""
        return text if self._search is None else self._search.sub(_break, text)


def _patterns(text: str) -> list[str]:
    """Finds each line of a border: one that begins a line there only where it begins one, a mere word only alone."""
    lines = text.split("\n")
    patterns = []
    for number, line in enumerate(lines):
        if not (mark := line.strip()):
            continue
        begins, ends = number > 0, number < len(lines) - 1
        alone = ends and bool(_WORDS_ONLY.fullmatch(mark))
        whole = re.escape(mark) + (_LINE_END if alone else "")
        patterns.append(f"{_LINE_START}(?i:{whole})" if begins or alone else whole)
    return patterns


def _break(match: re.Match[str]) -> str:
    text = match[0]
    first = len(text) - len(text.lstrip()) + 1
    return f"{text[:first]}\\{text[first:]}"


APART = " . "
"""Between texts that are looked at together; no control string has it."""
_SENTINEL = re.compile("\ue000([0-9a-f]{8}):(\\d+)\ue001")


class TextGuard:
    """Replaces control strings inside message text by sentinels before rendering, and restores them as text.

    `marks`: texts that look like turns, which are broken in every message. `clean`: no text holds a control string.
    """

    def __init__(
        self, has_control: Callable[[str], bool], control: re.Pattern[str] | None, marks: TurnMarks, clean: bool
    ) -> None:
        self._nonce = secrets.token_hex(4)
        self._has_control = has_control
        self._control = control
        self._marks = marks
        self._clean = clean
        self._texts: list[str] = []

    def turn(self, message: Message) -> Turn:
        turn: Turn = {"role": message.role, "content": self.protect(message.content)}
        if message.name:
            turn["name"] = self.protect(message.name)
        if message.tool_calls:
            turn["tool_calls"] = [
                {
                    "type": "function",
                    "id": self.protect(call.id or ""),
                    "function": {"name": self.protect(call.name), "arguments": self._protect_all(call.arguments)},
                }
                for call in message.tool_calls
            ]
        if message.tool_call_id:
            turn["tool_call_id"] = self.protect(message.tool_call_id)
        return turn

    def tool(self, tool: Tool) -> dict[str, Any]:
        function: dict[str, Any] = self._protect_all(tool.as_function()["function"])
        return {"type": "function", "function": function}

    def protect(self, text: str) -> str:
        """`text` with every control string replaced; all of it where the tokenizer still finds one."""
        text = self._marks.broken(text)
        if self._clean or not self._has_control(text):
            return text
        replaced = self._control.sub(lambda m: self._sentinel(m.group()), text) if self._control else text
        visible = _SENTINEL.sub(lambda m: " " if m[1] == self._nonce else m[0], replaced)
        return self._sentinel(text) if self._has_control(visible) else replaced

    def split(self, rendered: str) -> list[tuple[str, bool]]:
        """The rendered prompt as (piece, is plain text)."""
        parts, end = list[tuple[str, bool]](), 0
        for match in _SENTINEL.finditer(rendered):
            if match[1] == self._nonce:
                parts += [(rendered[end : match.start()], False), (self._texts[int(match[2])], True)]
                end = match.end()
        return [*parts, (rendered[end:], False)]

    def _sentinel(self, text: str) -> str:
        self._texts.append(text)
        return f"\ue000{self._nonce}:{len(self._texts) - 1}\ue001"

    def _protect_all(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.protect(value)
        if isinstance(value, Mapping):
            return {self.protect(str(k)): self._protect_all(v) for k, v in value.items()}
        return [self._protect_all(v) for v in value] if isinstance(value, (list, tuple)) else value


def texts_of(messages: Sequence[Message], tools: Sequence[Tool]) -> Iterator[str]:
    """Every text of a conversation that may reach a prompt."""
    for message in messages:
        yield from filter(None, (message.content, message.name, message.tool_call_id))
        for call in message.tool_calls:
            yield from (call.id or "", call.name, *_strings_in(call.arguments))
    for tool in tools:
        yield from _strings_in(tool.as_function())


def _strings_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield str(key)
            yield from _strings_in(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _strings_in(each)


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
"""The markers that `marked` writes."""


_PROBE, _ANSWER = "specfuse-probe", "Hello there"
_CONVERSATION = ("system", "user", "assistant", "user", "assistant", "user")
_LAST_ANSWER = 4
"""Its place in that conversation."""


@dataclass(frozen=True, slots=True)
class AnswerBorder:
    """The text between a prompt, as the template ends it, and an answer.

    `mark`: text before earlier answers that prompts lack, such as a channel. `lead`: blanks at the end of the mark;
    prompts end with `written` of them. `ends`: prompt endings that need it.
    """

    mark: str = ""
    lead: str = ""
    written: int = 0
    ends: str = ""

    @classmethod
    def between(cls, answer: str, prompt: str, ends: str) -> Self:
        """`answer`: text between a question and an earlier answer; `prompt`: text after the last question."""
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
    end where the reasoning begins. That needs markers that the template knows or the user gives.
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
        chat_template = getattr(tokenizer, "chat_template", None)
        if isinstance(chat_template, dict):
            chat_template = chat_template.get("default")
        self.template: str = template or chat_template or PLAIN_TEMPLATE
        self.kind: Literal["given", "own", "plain"] = "given" if template else "own" if chat_template else "plain"
        self.markers = find_markers(self.template, thinking)
        if thinking and self.markers is None:
            raise MemberLoadError(
                f"member {member!r} shall think, but its chat template has no reasoning: leave thinking off, or give "
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
        """Prompts end where reasoning begins."""
        return self.markers is not None and self.markers.wanted

    def _codec_of_answers(self) -> Codec:
        """A codec that encodes an answer after its prompt with the same ids as an earlier answer in a conversation.

        Some tokenizers put a blank before every text. For most of them it stands for the first blank of the template's
        lead. For a few it is an additional one.
        """
        lead = "" if self.thinks else self._border.lead
        usual = self.codec.after(lead[1:] if self.codec.adds_blank else lead)
        written = self.codec.after(lead)
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
        """Text of the reasoning so far, and the number of its `ids` if the closing marker has come."""
        assert self.markers is not None, "this member does not think"
        end = end_of_thoughts(ids, self._parse(self.markers.end), self.markers.end, self.tokenizer.decode)
        text = whole_characters(self.codec.decode(ids if end is None else ids[:end]))
        return text[: len(text) - partial_stop(text, (self.markers.end,))] if end is None else text.rstrip(), end

    def thoughts_closing(self) -> list[int]:
        """Ids between the reasoning and the answer."""
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
        """The control token that the template writes after a finished assistant turn, if it writes one."""
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
        """Render; tools go where the template puts them, or else into the system text."""
        if not tools:
            return self._normalised(turns)
        if "tools" in self.template and self._shows(turns, tools):
            native = self._normalised(turns, tools)
            # all members write one answer, so a member whose template teaches another syntax is given the common one
            return native if CALL_OPEN in native else self._normalised(with_system_text(turns, CALL_SYNTAX), tools)
        return self._normalised(with_system_text(turns, plain_description([tool["function"] for tool in tools])))

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
            except Exception as error:  # a Jinja template can raise anything
                problem = str(error)
                continue
            if lost is None:
                return rendered
            problem = f"it drops {lost['content'][:40]!r}"
        raise RequestError(f"the chat template of member {self._member!r} cannot render this conversation: {problem}")

    def _lost(self, turns: list[Turn], tools: Sequence[Mapping[str, Any]]) -> Turn | None:
        """A turn whose text or calls the template leaves out, found by markers in their place."""
        probes = [marked(turn, f"specfuse-{number}-") for number, turn in enumerate(turns)]
        rendered_marks = set(_MARK.findall(self.render([turn for turn, _ in probes], tools)))
        return next(
            (t for t, (_, marks) in zip(turns, probes, strict=True) for m in marks if m not in rendered_marks), None
        )

    def _parse(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []

    def _borders(self) -> list[str]:
        """The template's text before each message of a conversation, and before the answer."""
        for roles in (_CONVERSATION, ("user", "assistant"), ("user",)):
            try:
                return self._normalised([{"role": role, "content": _PROBE} for role in roles]).split(_PROBE)
            except RequestError:  # a template may refuse, or drop, some of them
                continue
        return []

    def _answer_border(self, borders: Sequence[str]) -> AnswerBorder:
        """The text before earlier answers, compared with the end of a prompt."""
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
        """The rendered conversation up to the text of an answer, or up to reasoning."""
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


class MemberText:
    """Facts from a member's tokenizer and template, independent of its model's location.

    `codec`: for its answers. `vocabulary_size`: rows of the model's logits. `turn_ends`: texts by which
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
        """Ids between the prompt and the answer: reasoning and its end. Empty for a member without reasoning."""
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
