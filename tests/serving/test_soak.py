"""Minutes of requests of all kinds: memory stays within the settings, and latency does not grow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil
import pytest
from serving import KINDS, Report, Tenth, soak

from specfuse_shared import EnsembleConfig, EnsembleEngine, MemberConfig
from specfuse_shared.serving.admission import release
from tests.support.tiny import save_pair

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CACHE_BYTES = 24 << 20
WARM_MINUTES, MINUTES = 1.0, 4.0
FRAGMENTED_MIB = 150
"""Memory that the allocator keeps between answers, and frees when none runs (`IdleTrim`)."""
KERNELS_MIB = 60
"""Memory of kernels compiled for new shapes, and of grammars; both are bounded in number."""


@dataclass
class Soaked:
    """The memory of the process after the first request of each kind and at the end, without free memory."""

    before_mib: float
    report: Report
    after_mib: float


def process_mib() -> float:
    release()
    return float(psutil.Process().memory_info().rss / 2**20)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnsembleEngine]:
    pair = save_pair(tmp_path_factory, max_position_embeddings=4096)
    members = [MemberConfig(str(folder), name=name) for name, folder in pair.items()]
    with EnsembleEngine(EnsembleConfig(members, cache_bytes=CACHE_BYTES)) as engine:
        yield engine.load()


@pytest.fixture(scope="module")
def soaked(engine: EnsembleEngine) -> Soaked:
    soak(engine, WARM_MINUTES, users=6, long_words=400)
    return Soaked(process_mib(), soak(engine, MINUTES, users=6, long_words=400), process_mib())


def test_every_kind_of_request_succeeded(soaked: Soaked, engine: EnsembleEngine) -> None:
    assert soaked.report.errors == []
    assert set(soaked.report.kinds) == {kind.__name__ for kind in KINDS}
    metrics = engine.metrics()
    assert (metrics.running, metrics.waiting, metrics.cache_bytes) == (0, 0, 0)


def test_caches_stay_within_cache_bytes(soaked: Soaked) -> None:
    tenths = soaked.report.tenths
    assert 0.3 * CACHE_BYTES < max(tenth.caches_bytes for tenth in tenths) <= CACHE_BYTES
    assert 0 < max(tenth.prefix_bytes for tenth in tenths) <= CACHE_BYTES / 8


def test_the_process_does_not_grow(soaked: Soaked) -> None:
    peak = max(tenth.process_mib for tenth in soaked.report.tenths)
    assert peak - soaked.before_mib < CACHE_BYTES / 2**20 + FRAGMENTED_MIB
    assert soaked.after_mib - soaked.before_mib < KERNELS_MIB


def test_latency_does_not_grow(soaked: Soaked) -> None:
    """Measured in processor seconds, since other programs may use the machine."""
    tenths = soaked.report.tenths
    half = len(tenths) // 2
    assert _work(tenths[half:]) < 1.4 * _work(tenths[:half])


def _work(tenths: Sequence[Tenth]) -> float:
    """Processor seconds of a request."""
    return sum(tenth.cpu_seconds for tenth in tenths) / sum(len(tenth.seconds) for tenth in tenths)
