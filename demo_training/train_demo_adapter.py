"""Train a LoRA adapter for each of the demo's models, on a CPU, so that they answer instructions alike.

    python demo_training/train_demo_adapter.py FILE… --member gemma3-270m [--continued FOLDER] [--out FOLDER]
    python demo_training/train_demo_adapter.py FILE… --member smollm2-135m --rank 8

Rows are `{"prompt", "references": [answer]}` or, with tools, `{"messages", "tools", "answer"}` (`teaching_rows.py`).
The prompt is encoded as in the engine; the loss covers only the answer and its end of turn. One row in twenty is held
out to measure the loss. In half of the rows with a passage, it is before the question, as in retrieval prompts. Rows
with a short answer are used two more times, with an instruction for a short answer before and after the prompt. The
adapter is stored in bfloat16; `--continued` starts from another one.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from peft import LoraConfig, PeftModel, get_peft_model
from rich import print as show
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup

from specfuse_shared.loading.demo import ADAPTERS, demo_members
from specfuse_shared.loading.gguf import converted
from specfuse_shared.messages import Message, Tool
from specfuse_shared.text.chat_template import PromptEncoder

RATE, BATCH = 2e-4, 8
HELD_OUT = 20
PASSAGE, SHORT = 300, 30  # characters: minimum of a passage, maximum of a short answer
BREVITY = (
    "Answer briefly.",
    "Be brief.",
    "A short answer, please.",
    "In as few words as you can.",
    "Only the answer.",
)
HUB = {"gemma3-270m": "google/gemma-3-270m", "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct"}
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

Row = tuple[list[int], list[int]]


def main(
    data: Annotated[list[Path], typer.Argument(help="JSONL files of instructions and answers")],
    member: Annotated[str, typer.Option(help=" | ".join(HUB))] = "gemma3-270m",
    out: Annotated[Path | None, typer.Option(help="folder to write; default: the demo's")] = None,
    epochs: int = 1,
    rank: int = 16,
    continued: Annotated[Path | None, typer.Option(help="folder of the adapter to start from")] = None,
    kept: Annotated[float, typer.Option(help="weight of that adapter in a mean with the trained one")] = 0.0,
    longest: Annotated[int, typer.Option(help="maximum tokens of a row; longer ones are left out")] = 512,
) -> None:
    """Train and store the adapter."""
    if kept and continued is None:
        raise typer.BadParameter("--kept is the weight of the adapter in --continued")
    torch.manual_seed(0)
    [config] = [m for m in demo_members() if m.name == member]
    out = out or ADAPTERS / member
    folder = converted(Path(config.model), None, lambda stage: None)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = PromptEncoder(tokenizer, None, {}, member)
    rows = [row for file in data for row in read_rows(file, prompts, tokenizer.eos_token_id, longest)]
    held_out = [variants[0] for variants in rows[::HELD_OUT]]
    used = [row for number, variants in enumerate(rows) for row in variants if number % HELD_OUT]
    show(f"{len(used)} training rows, {len(held_out)} held out")
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    if continued is None:
        lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=PROJECTIONS, task_type="CAUSAL_LM")
        model: Any = get_peft_model(base, lora)
    else:
        model = PeftModel.from_pretrained(base, continued, is_trainable=True, autocast_adapter_dtype=True)
    show(f"held-out loss before: {held_out_loss(model, held_out):.3f}")
    before = {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}
    train(model, used, held_out, epochs)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.lerp(parameter.data, before[name], kept).bfloat16()
    model.peft_config["default"].base_model_name_or_path = HUB[member]
    card = out / "README.md"
    written = card.read_text(encoding="utf-8") if card.is_file() else None
    model.save_pretrained(out)
    if written is not None:  # peft writes another card
        card.write_text(written, encoding="utf-8")
    show(f"wrote {out} ({sum(f.stat().st_size for f in out.iterdir()) / 1e6:.1f} MB)")


def read_rows(path: Path, prompts: PromptEncoder, end: int, longest: int) -> list[list[Row]]:
    """The variants of every row that is not too long, each as prompt ids and answer ids (with the end of turn)."""
    rows: list[list[Row]] = []
    chance = random.Random(0)
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        text = (row["answer"] if "answer" in row else row["references"][0]).strip()
        answer = [*prompts.codec.encode(text), end]
        if "messages" in row:
            tools = [Tool.from_dict(tool) for tool in row["tools"]]
            encoded = [prompts.encode([Message.from_dict(message) for message in row["messages"]], tools)]
        else:
            encoded = [prompts.encode([Message("user", words)]) for words in variants_of(row["prompt"], text, chance)]
        if max(map(len, encoded)) + len(answer) <= longest:
            rows.append([(prompt, answer) for prompt in encoded])
    return rows


def variants_of(prompt: str, answer: str, chance: random.Random) -> list[str]:
    """The prompts of a row, as described above."""
    question, _, passage = prompt.strip().partition("\n\n")
    parts = [question, passage] if passage else [question]
    if len(passage) >= PASSAGE and chance.random() < 0.5:
        parts.reverse()
    variants = [parts]
    if len(answer) <= SHORT:
        before, after = chance.sample(BREVITY, 2)
        variants += [[before, *parts], [*parts, after]]
    return ["\n\n".join(variant) for variant in variants]


def train(model: Any, rows: list[Row], held_out: list[Row], epochs: int) -> None:
    """Train with AdamW and a cosine schedule, on batches of rows of similar length in random order."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)
    ordered = sorted(rows, key=lambda row: len(row[0]) + len(row[1]))
    batches = [ordered[n : n + BATCH] for n in range(0, len(ordered), BATCH)]
    loader: DataLoader[list[Row]] = DataLoader(batches, batch_size=None, shuffle=True)  # type: ignore[arg-type]
    schedule = get_cosine_schedule_with_warmup(optimizer, 20, epochs * len(batches))
    began, step = time.monotonic(), 0
    for epoch in range(epochs):
        model.train()
        for batch in loader:
            loss = answer_loss(model, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            if step % 20 == 0:
                show(f"step {step}/{epochs * len(batches)}  loss {loss.item():.3f}  {time.monotonic() - began:.0f} s")
        show(f"epoch {epoch + 1}: held-out loss {held_out_loss(model, held_out):.3f}")


def answer_loss(model: Any, batch: list[Row]) -> torch.Tensor:
    """Mean cross-entropy of the answers' tokens; only their states are projected to the vocabulary of 262,144."""
    width = max(len(prompt) + len(answer) for prompt, answer in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    labels = torch.full((len(batch), width), -100)
    for n, (prompt, answer) in enumerate(batch):
        ids[n, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
        labels[n, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    decoder = model.get_base_model()
    mask = torch.arange(width) < torch.tensor([[len(p) + len(a)] for p, a in batch])
    states = decoder.model(input_ids=ids, attention_mask=mask.long()).last_hidden_state[:, :-1]
    is_answer = labels[:, 1:] != -100
    logits = decoder.lm_head(states[is_answer]).float()
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:][is_answer])


@torch.inference_mode()
def held_out_loss(model: Any, rows: list[Row]) -> float:
    """Mean loss over batches of the held-out rows."""
    model.eval()
    losses = [answer_loss(model, rows[n : n + BATCH]).item() for n in range(0, len(rows), BATCH)]
    return sum(losses) / len(losses)


if __name__ == "__main__":
    typer.run(main)
