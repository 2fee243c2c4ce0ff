"""Chat templates in the shapes of public ones: each answer follows the same prefix as earlier answers.

The strongest form of this: the ids of a prompt and its answer are the beginning of the next prompt's ids.
"""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from specfuse_shared import EnsembleEngine, Grammar, Message, SamplingParams, demo_members
from specfuse_shared.loading.pretrained import MemberFiles
from specfuse_shared.text.chat_template import PLAIN_TEMPLATE, PromptEncoder
from specfuse_shared.text.codec import Encoding
from tests.support.against_naive import assert_equals_naive, local_members, with_settings
from tests.support.tiny import MESSAGES, byte_level_tokenizer, metaspace_tokenizer

EACH, DONE = "{% for m in messages %}", "{% endfor %}"
ASK = "{% if add_generation_prompt %}"


def marked(before: str, after: str, prompt: str) -> str:
    """Every turn between two strings, and the end of prompts."""
    return f"{EACH}{before}{{{{ m.content }}}}{after}{DONE}{ASK}{prompt}{{% endif %}}"


def by_role(
    user: tuple[str, str], assistant: tuple[str, str], prompt: str, system: tuple[str, str] = ("", "\n")
) -> str:
    """Turns that look different for each role."""
    names = {"system": system, "user": user, "assistant": assistant}
    return marked(
        f"{{{{ { ({role: pair[0] for role, pair in names.items()})!r}[m.role] }}}}",
        f"{{{{ { ({role: pair[1] for role, pair in names.items()})!r}[m.role] }}}}",
        prompt,
    )


ALTERNATES = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    f"{EACH}{{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}}{{{{ raise_exception('must alternate') }}}}"
    f"{{% endif %}}{DONE}"
)
TEMPLATES = {
    "chatml": marked("<|im_start|>{{ m.role }}\n", "<|im_end|>\n", "<|im_start|>assistant\n"),
    "chatml without a line break": marked("<|im_start|>{{ m.role }}\n", "<|im_end|>\n", "<|im_start|>assistant"),
    "llama 2": ALTERNATES + by_role(("[INST] ", " [/INST]"), (" ", " </s>"), ""),
    "llama 3": marked(
        "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n",
        "<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "mistral v1": ALTERNATES + by_role(("[INST] ", " [/INST]"), ("", "</s>"), ""),
    "mistral v3": ALTERNATES + by_role(("[INST] ", "[/INST]"), (" ", "</s>"), ""),
    "vicuna": by_role(("USER: ", " "), ("ASSISTANT: ", "</s>"), "ASSISTANT:", ("", " ")),
    "vicuna with a blank in the prompt": by_role(("USER: ", " "), ("ASSISTANT: ", "</s>"), "ASSISTANT: ", ("", " ")),
    "falcon": by_role(("User: ", "\n\n"), ("Assistant: ", "\n\n"), "Assistant:", ("", "\n\n")),
    "openchat": by_role(
        ("GPT4 Correct User: ", "<|end_of_turn|>"),
        ("GPT4 Correct Assistant: ", "<|end_of_turn|>"),
        "GPT4 Correct Assistant:",
    ),
    "two blanks": by_role(("Q:  ", "\n"), ("A:  ", "\n"), "A:"),
    "zephyr": marked("<|{{ m.role }}|>\n", "</s>\n", "<|assistant|>\n"),
    "phi 3": marked("<|{{ m.role }}|>\n", "<|end|>\n", "<|assistant|>\n"),
    "phi 4": marked("<|im_start|>{{ m.role }}<|im_sep|>", "<|im_end|>", "<|im_start|>assistant<|im_sep|>"),
    "gemma 2 and 3": ALTERNATES
    + by_role(
        ("<start_of_turn>user\n", "<end_of_turn>\n"),
        ("<start_of_turn>model\n", "<end_of_turn>\n"),
        "<start_of_turn>model\n",
    ),
    "gpt-oss": (
        f"{EACH}<|start|>{{{{ m.role }}}}{{% if m.role == 'assistant' %}}<|channel|>final{{% endif %}}<|message|>"
        f"{{{{ m.content }}}}<|end|>{DONE}{ASK}<|start|>assistant{{% endif %}}"
        "{# <|channel|>analysis<|message|> #}"
    ),
    "deepseek v3": by_role(("<|User|>", ""), ("<|Assistant|>", "<|end_of_sentence|>"), "<|Assistant|>", ("", "")),
    "qwen 2.5": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
        + marked("<|im_start|>{{ m.role }}\n", "<|im_end|>\n", "<|im_start|>assistant\n")
    ),
    "command-r": marked("<|START_OF_TURN|><|{{ m.role }}|>", "<|END_OF_TURN|>", "<|START_OF_TURN|><|assistant|>"),
    "command-a": by_role(
        ("<|START_OF_TURN|><|USER|>", "<|END_OF_TURN|>"),
        ("<|START_OF_TURN|><|CHATBOT|><|START_RESPONSE|>", "<|END_RESPONSE|><|END_OF_TURN|>"),
        "<|START_OF_TURN|><|CHATBOT|>",
    ),
    "granite": marked(
        "<|start_of_role|>{{ m.role }}<|end_of_role|>", "<|end_of_text|>\n", "<|start_of_role|>assistant<|end_of_role|>"
    ),
    "glm 4.5": (
        by_role(("<|user|>\n", ""), ("<|assistant|>\n<think></think>\n", ""), "<|assistant|>", ("<|system|>\n", ""))
    ),
    "alpaca": by_role(("### Instruction:\n", "\n\n"), ("### Response:\n", "\n\n"), "### Response:\n", ("", "\n\n")),
    "alpaca without a line break": by_role(
        ("### Instruction:\n", "\n\n"), ("### Response:\n", "\n\n"), "### Response:", ("", "\n\n")
    ),
    "plain": PLAIN_TEMPLATE,
}
"""Templates whose prompts end with the prefix of earlier answers."""
FORGETS = {
    "qwen 3": (
        f"{EACH}<|im_start|>{{{{ m.role }}}}\n{{{{ m.content }}}}<|im_end|>\n{DONE}{ASK}<|im_start|>assistant\n"
        "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
        "<think>\n\n</think>\n\n",
    ),
    "deepseek r1": (
        by_role(("<|User|>", ""), ("<|Assistant|>", "<|eos|>"), "<|Assistant|><think>\n", ("", "")),
        "<think>\n\n</think>\n\n",
    ),
    "gemma 4": (
        f"{EACH}<|turn>{{{{ 'model' if m.role == 'assistant' else m.role }}}}\n{{{{ m.content }}}}<turn|>\n{DONE}{ASK}"
        "<|turn>model\n{% if not enable_thinking %}<|channel>thought\n<channel|>{% endif %}{% endif %}",
        "<|channel>thought\n<channel|>",
    ),
    "gemma 4 that begins reasoning unasked": (
        f"{EACH}<|turn>{{{{ m.role }}}}\n{{{{ m.content }}}}<turn|>\n{DONE}{ASK}<|turn>model\n<|channel>thought"
        "{% endif %}{# <channel|> #}",
        "<|channel>thought\n<channel|>",
    ),
}
"""Templates that drop the reasoning of earlier answers: a prompt ends with empty reasoning that the next one lacks."""
ANSWERS = (
    "Hello there, how are you?",
    "Yes.",
    "a",
    "42 of them",
    "(see below)",
    "Größe: 3 m\nThen more.",
    "日本語です",
)


@cache
def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    if kind == "smollm2":
        loaded: PreTrainedTokenizerFast = MemberFiles(demo_members()[0]).tokenizer()
        return loaded
    return byte_level_tokenizer() if kind == "byte level" else metaspace_tokenizer()


def encoder(template: str, kind: str, thinking: bool = False) -> PromptEncoder:
    """With the template's control strings in the vocabulary, as its model has them."""
    copied = copy.deepcopy(tokenizer(kind))
    control = sorted(set(re.findall(r"<\|[^<>{}]*\|>|<\|(?:channel|turn)>|<(?:channel|turn)\|>|</s>", template)))
    roles = [f"<|{role}|>" for role in ("system", "user", "assistant")]
    copied.add_special_tokens({"additional_special_tokens": [*control, *roles]})
    return PromptEncoder(copied, template, {}, kind, thinking)


def turns(*texts: str) -> list[Message]:
    return [Message("assistant" if number % 2 else "user", text) for number, text in enumerate(texts)]


def continues(made: PromptEncoder, answer: str) -> bool:
    """Whether the prompt and the answer are the beginning of the next prompt, but for a last token that may grow."""
    ids = made.encode(turns("Hi", answer, "Bye"))
    begun = made.encode(turns("Hi")) + made.answer_codec.encode(answer)
    return ids[: len(begun) - 1] == begun[:-1]


AFTER_BLANKS = {
    *("llama 2", "mistral v3", "vicuna", "vicuna with a blank in the prompt", "falcon", "openchat", "two blanks")
}
"""Templates whose answers follow blanks."""
# a vocabulary of another family has tokens that a template's own model lacks, such as "](" and "\n\n"; and a
# tokenizer that adds a blank before every text adds it also before answers without one
FOREIGN: dict[str, set[str]] = {
    "byte level": set(),
    "smollm2": {"llama 3", "mistral v1"},
    "metaspace": set(TEMPLATES) - AFTER_BLANKS,
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] if kind == "smollm2" else []) for kind in FOREIGN]
)
def test_a_prompt_and_its_answer_are_the_beginning_of_the_next_prompt(kind: str) -> None:
    made = {name: encoder(template, kind) for name, template in TEMPLATES.items()}
    broken = {name for name in made if not all(continues(made[name], answer) for answer in ANSWERS)}
    assert broken == FOREIGN[kind], f"{len(TEMPLATES) - len(broken)} of {len(TEMPLATES)} hold"


@pytest.mark.parametrize("name", FORGETS)
def test_reasoning_that_later_prompts_drop_ends_at_once(name: str) -> None:
    template, empty = FORGETS[name]
    made = encoder(template, "byte level")
    assert made.tokenizer.decode(made.encode(turns("Hi", "Hello", "Bye"))).endswith(empty)


THOUGHTS = {
    "qwen 3": (FORGETS["qwen 3"][0], "assistant\n<think>\n", "</think>\n\n"),
    "deepseek r1": (FORGETS["deepseek r1"][0], "<|Assistant|><think>\n", "</think>\n\n"),
    "gemma 4": (FORGETS["gemma 4"][0], "<|turn>model\n<|channel>thought\n", "<channel|>"),
    "gpt-oss": (
        TEMPLATES["gpt-oss"],
        "<|start|>assistant<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
    "glm 4.5": (TEMPLATES["glm 4.5"], "<|assistant|>\n<think>\n", "</think>\n"),
    "command-a": (
        TEMPLATES["command-a"] + "{# <|START_THINKING|> #}",
        "<|CHATBOT|><|START_THINKING|>\n",
        "<|END_THINKING|><|START_RESPONSE|>",
    ),
}


@pytest.mark.parametrize("name", THOUGHTS)
def test_reasoning_is_at_the_templates_position(name: str) -> None:
    template, begun, closing = THOUGHTS[name]
    made = encoder(template, "byte level", thinking=True)
    assert made.tokenizer.decode(made.encode(turns("Hi"))).endswith(begun)
    assert made.tokenizer.decode(made.thoughts_closing()) == closing
    assert made.answer_codec.lead == ""
    written = [*made.answer_codec.encode("I wonder."), *made.thoughts_closing(), *made.answer_codec.encode("Yes.")]
    text, count = made.thoughts(written)
    assert (text, made.tokenizer.decode(written[count:])) == ("I wonder.", f"{closing}Yes.")


def test_an_end_of_turn_that_ends_reasoning_elsewhere_is_no_marker() -> None:
    assert encoder(TEMPLATES["phi 3"], "byte level").markers is None


def test_a_turn_after_an_answer_gets_no_mark_of_the_template() -> None:
    made = encoder(TEMPLATES["gpt-oss"], "byte level")
    text = made.tokenizer.decode(made.encode([*turns("Hi"), Message("tool", "12", name="clock")]))
    assert text.endswith("12<|end|><|start|>assistant<|channel|>final<|message|>")
    llama = encoder(TEMPLATES["llama 2"], "byte level")
    assert llama.tokenizer.decode(llama.encode(turns("Hi", "Yes."))).endswith(" Yes. </s>")


@pytest.mark.parametrize("kind", ["byte level", "metaspace"])
@pytest.mark.parametrize("name", ["vicuna", "two blanks", "alpaca", "chatml"])
@settings(max_examples=20, deadline=None)
@given(texts=st.lists(st.sampled_from(["Yes.", " and", "\n", "no", " (a) b", "日本", "é", " ", "  two"]), max_size=6))
def test_answers_after_blanks_are_read_as_they_were_written(name: str, kind: str, texts: list[str]) -> None:
    codec = encoder_of(name, kind).answer_codec
    text, encoding = "".join(texts), Encoding()
    for piece in texts:
        encoding = codec.extend(encoding, piece)
    assert (encoding.text, list(encoding.ids)) == (text, codec.encode(text))
    assert b"".join(codec.pieces(text)) == text.encode()
    assert codec.text_after((), encoding.ids) == text or text.startswith(" ")
    assert codec.head(encoding, len(encoding.ids)) == text


@cache
def encoder_of(name: str, kind: str) -> PromptEncoder:
    return encoder(TEMPLATES[name], kind)


@pytest.mark.parametrize("name", ["vicuna", "llama 2", "gpt-oss", "vicuna with a blank in the prompt"])
def test_members_with_such_templates_equal_the_naive_round(name: str, tiny_engine: EnsembleEngine) -> None:
    members = [replace(member, chat_template=TEMPLATES[name]) for member in tiny_engine.config.member_configs]
    with EnsembleEngine(with_settings(tiny_engine.config, members=members)) as engine:
        for params in (SamplingParams(max_tokens=60), SamplingParams(max_tokens=60, temperature=1.2, seed=7)):
            records = assert_equals_naive(engine.config, local_members(engine), MESSAGES, params, rounds=4)
            assert any(record.verified for record in records)


def test_a_value_is_drafted_after_the_blank_of_the_template(tiny_engine: EnsembleEngine) -> None:
    """The grammar has no blank there, and the answer has none."""
    members = [replace(member, chat_template=TEMPLATES["vicuna"]) for member in tiny_engine.config.member_configs]
    params = SamplingParams(max_tokens=20, grammar=Grammar.choice(["yes", "no way"]))
    with EnsembleEngine(with_settings(tiny_engine.config, members=members)) as engine:
        assert engine.generate("Is it?", params).text in ("yes", "no way")
        [chat, _] = local_members(engine)
    assert (chat.codec.lead, chat.codec.lead_ids) == (" ", chat.prompts.codec.encode(" "))
