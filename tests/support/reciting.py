"""Reciting members: real Llama models of a few thousand weights that produce a given text."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BEGIN, END = "<|answer|>", "<|end|>"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}" + BEGIN


def reciting_tokenizer(speech: str) -> Any:
    """Byte-level BPE in which every word of the speech is one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=5000,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([speech], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, chat_template=TEMPLATE)


def reciting_model(tokenizer: Any, speech: str, certainty: float, endless: bool) -> LlamaForCausalLM:
    """One-hot embeddings and a head that maps each word to the next: attention and MLP add nothing."""
    size = len(tokenizer) + len(tokenizer) % 2
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=size,
        intermediate_size=2,
        num_hidden_layers=1,
        num_attention_heads=1,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        max_position_embeddings=4096,
    )
    model = LlamaForCausalLM(config)
    words = tokenizer(speech, add_special_tokens=False).input_ids
    assert len(set(words)) == len(words), "a repeated word has two successors"
    begin, end = tokenizer.convert_tokens_to_ids([BEGIN, END])
    following = dict.fromkeys(range(len(tokenizer)), words[0] if endless else end)
    following.update(zip([begin, *words], [*words, words[0] if endless else end], strict=True))
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_() if weight.dim() > 1 else weight.fill_(1.0)
        model.model.embed_tokens.weight.copy_(torch.eye(len(tokenizer), size))
        for word, successor in following.items():
            model.lm_head.weight[successor, word] = certainty / size**0.5
    return model
