"""One member of our engine compared with other decoders of its model: the library's `generate`, and a vLLM server.

    python benchmarks/peers.py [--vllm URL] [--tokens 48] [--repeats 3] [--threads N] [--json FILE]

SmolLM2-135M-Instruct in bf16 on the processor, no adapter, greedy, answers of forced length; alone and eight at once,
all alternately in one run, so that other work on the machine affects all. The engine fuses nothing here: one member
decodes by itself. Where llama-cpp-python is installed, a member on llama.cpp runs along, of the file as it is (Q4_1),
compared with that library itself. The server has to serve the same converted weights (`--print-folder` prints their
folder).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from figures import RESULTS, Figure, report
from transformers import AutoModelForCausalLM
from vllm_peer import Peer

sys.path.insert(0, str(Path(__file__).parents[1]))

from specfuse_shared import EnsembleConfig, EnsembleEngine, MemberConfig, Message, SamplingParams, demo_members
from specfuse_shared.loading.gguf import converted
from specfuse_shared.loading.planning import has_llama_cpp
from tests.support.against_naive import local_members

if TYPE_CHECKING:
    from llama_peer import LlamaPeer

QUESTIONS = [f"Describe entry {n} of the observatory's log: its moon, its wind and its visitors." for n in range(8)]


class Peers:
    def __init__(self, folder: Path, file: Path, tokens: int, url: str | None) -> None:
        member = MemberConfig(str(folder), name="smollm2", dtype="bfloat16", device="cpu")
        self.engine = EnsembleEngine(EnsembleConfig([member], reuse_prefixes=False)).load()
        self.local, self.tokens = local_members(self.engine)[0], tokens
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self.server = Peer(url) if url is not None else None
        self.llama: tuple[EnsembleEngine, LlamaPeer] | None = None
        if has_llama_cpp():
            from llama_peer import LlamaPeer

            quantised = MemberConfig(str(file), name="smollm2", backend="llama.cpp")
            there = EnsembleEngine(EnsembleConfig([quantised], reuse_prefixes=False)).load()
            self.llama = there, LlamaPeer(file, torch.get_num_threads())
        self.prompts = [self.local.encode_prompt([Message("user", question)]) for question in QUESTIONS]

    def ours(self, count: int, engine: EnsembleEngine | None = None) -> float:
        """Tokens a second of the engine."""
        params = SamplingParams(max_tokens=self.tokens, min_tokens=self.tokens, ignore_eos=True)
        start = time.perf_counter()
        results: list[Any] = (engine or self.engine).generate_batch(QUESTIONS[:count], params)
        return float(sum(r.usage.completion_tokens for r in results)) / (time.perf_counter() - start)

    @torch.inference_mode()
    def library(self, count: int) -> float:
        """Tokens a second of `generate` over a padded batch."""
        longest = max(map(len, self.prompts[:count]))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in self.prompts[:count]])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in self.prompts[:count]])
        start = time.perf_counter()
        length = {"max_new_tokens": self.tokens, "min_new_tokens": self.tokens}
        self.model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **length)
        return count * self.tokens / (time.perf_counter() - start)

    def run(self, repeats: int) -> list[Figure]:
        figures: list[Figure] = []
        kinds: dict[str, Callable[[int], float]] = {"engine": self.ours, "generate": self.library}
        if (server := self.server) is not None:
            kinds["vLLM"] = lambda n: server.speed(self.prompts[:n], self.tokens)
        pairs = [("engine", name) for name in list(kinds)[1:]]
        if self.llama is not None:
            engine, peer = self.llama
            kinds["engine on llama.cpp"] = lambda n: self.ours(n, engine)
            kinds["llama.cpp"] = lambda n: peer.speed(self.prompts[:n], self.tokens)
            pairs += [("engine on llama.cpp", "llama.cpp"), ("engine on llama.cpp", "engine")]
        for count in (1, len(QUESTIONS)):
            found: dict[str, list[float]] = {name: [] for name in kinds}
            for _ in range(repeats + 1):
                for name, speed in kinds.items():
                    found[name].append(speed(count))
            rates = {name: statistics.median(values[1:]) for name, values in found.items()}
            for ours, name in pairs:
                detail = f"{rates[ours]:.1f} ÷ {rates[name]:.1f} tokens/s"
                figures.append(Figure(f"{count} at once: {ours} ÷ {name}", rates[ours] / rates[name], 1, True, detail))
        return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", metavar="URL", help="of a running vLLM server with the same model")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--print-folder", action="store_true", help="print the folder of the weights and end")
    parser.add_argument("--json", type=Path, default=RESULTS / "peers.json")
    parser.add_argument("--threads", type=int, help="of this process, else as many as torch takes")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    [smollm2] = [member for member in demo_members() if "smollm2" in member.label]
    folder = converted(Path(smollm2.model), None, lambda stage: None)
    if options.print_folder:
        print(folder)
        return
    peers = Peers(folder, Path(smollm2.model), options.tokens, options.vllm)
    figures = peers.run(options.repeats)
    facts = [("vLLM", "not asked" if peers.server is None else f"{peers.server.version}, {peers.server.model}")]
    report("one member compared with other engines, SmolLM2-135M, bf16", figures, options.json, facts)
    peers.engine.close()


if __name__ == "__main__":
    main()
