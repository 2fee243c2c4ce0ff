"""The cost of a round with both members on nodes of a Ray cluster, compared with the same members in this process.

python benchmarks/cluster.py FOLDER FOLDER [--answers 6] [--tokens 120]

Starts a cluster of three nodes on this machine; answers alternate, so that both see the same machine. Needs a core for
each member and one to coordinate: with fewer, the measurement shows how cores are shared.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from statistics import median

import ray
from ray.cluster_utils import Cluster

from specfuse_shared import EnsembleConfig, EnsembleEngine, MemberConfig, SamplingParams


def rounds(engine: EnsembleEngine, number: int, tokens: int) -> list[float]:
    """Seconds of each round of an answer."""
    result = engine.generate(f"Say much {number}.", SamplingParams(max_tokens=tokens, ignore_eos=True))
    return [r.timing.total for r in result.rounds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("members", nargs="+", metavar="FOLDER")
    parser.add_argument("--answers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=120)
    options = parser.parse_args()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in options.members:
        cluster.add_node(num_cpus=1)
    here = EnsembleConfig([MemberConfig(folder) for folder in options.members], exit="never")
    there = replace(here, runtime="ray", ray_address=cluster.address)
    found: list[list[float]] = [[], []]
    with EnsembleEngine(here) as local, EnsembleEngine(there) as distant:
        for number in range(options.answers):
            for seconds, engine in zip(found, (local, distant), strict=True):
                seconds += rounds(engine, number, options.tokens)
    ray.shutdown()
    cluster.shutdown()
    for name, seconds in zip(("in this process", "on Ray"), found, strict=True):
        print(f"{name:<16} {1e3 * median(seconds):8.1f} ms a round (median of {len(seconds)})")


if __name__ == "__main__":
    main()
