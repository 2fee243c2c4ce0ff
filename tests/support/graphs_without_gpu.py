"""A replacement for CUDA graphs on a CPU: a capture is recorded, and a replay repeats it in the same memory.

It raises the errors of a real driver: for a capture into a memory pool without users, a capture that never ended, a
read by the host during a capture, a thread that waits for the whole device during a capture, and work on a stream
outside the capture (which a replay leaves out). A replay with freed memory raises as well, which a real one reads
silently; this includes the workspace of a stream, which is freed with any graph that was captured in it. Streams are
assigned cyclically, 32 of each priority.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from specfuse_shared.runtime.cuda_graphs import Graphs

Pool = tuple[int, int]
_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class FreedMemoryError(AssertionError):
    """A replay would read or write freed memory."""


class Stream:
    """The work of one stream; streams that wait for a capturing stream join the capture."""

    def __init__(self, number: int = 0) -> None:
        self.graph: Graph | None = None
        self.cuda_stream = number

    def wait_stream(self, stream: Stream) -> None:
        self.graph = self.graph or stream.graph

    def synchronize(self) -> None:
        assert self.graph is None, "operation not permitted when stream is capturing"


@dataclass
class Driver:
    """The state of a driver and an allocator, for all threads."""

    uses: Counter[Pool] = field(default_factory=Counter)
    pools: set[Pool] = field(default_factory=set)
    allocating: list[Pool] = field(default_factory=list)
    """Pools with a capture in progress according to the allocator."""
    captures: int = 0
    replays: int = 0
    freed: list[str] = field(default_factory=list)
    """Number of replays over freed memory."""
    failing: list[Exception] = field(default_factory=list)
    """Errors that the next captures raise half-way."""
    waiting_elsewhere: int = 0
    """Number of next captures during which another thread waits for the whole device."""
    workspaces: Counter[int] = field(default_factory=Counter)
    """Number of times that each stream's workspace was freed."""
    seconds: float = 0.0
    """The seconds of work on the device; each replay takes `a_replay`, and the host does not wait for it."""
    a_replay: float = 0.01
    lags: bool = False
    """Whether the device still computes what was queued."""
    capturing: set[Graph] = field(default_factory=set)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _streams: dict[int, Iterator[int]] = field(default_factory=lambda: {0: itertools.count(), -1: itertools.count()})
    _local: threading.local = field(default_factory=threading.local)

    @property
    def stream(self) -> Stream:
        if not hasattr(self._local, "stream"):
            self._local.stream = Stream()
        return self._local.stream  # type: ignore[no-any-return]

    def new_stream(self, device: object = None, priority: int = 0) -> Stream:
        return Stream(1 + next(self._streams[priority]) % 32 - 100 * priority)

    def synchronize(self, device: object = None) -> None:
        for graph in self.capturing:
            graph.breaks()

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before = self.stream
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    def pool(self) -> Pool:
        return (0, next(self._numbers))

    def begin(self, pool: Pool) -> None:
        """As torch does: the device's allocator first, then the host's, which forgets no pool by itself."""
        self.allocating.append(pool)
        if pool in self.pools and not self.uses[pool]:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self.pools.add(pool)
        self.uses[pool] += 1

    def end(self, pool: Pool) -> None:
        if pool in self.allocating:
            self.allocating.remove(pool)

    def release(self, pool: Pool, stream: int) -> None:
        self.uses[pool] -= 1
        self.workspaces[stream] += 1


@dataclass
class _Lasting:
    """A tensor over memory from outside the capture, which may be freed before a replay."""

    storage: StorageWeakRef
    like: tuple[torch.dtype, int, torch.Size, tuple[int, ...]]

    def tensor(self) -> torch.Tensor:
        if self.storage.expired():
            raise FreedMemoryError("a replay over memory that was freed")
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        dtype, offset, size, stride = self.like
        return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)


class Graph:
    """The engine's `torch.cuda.CUDAGraph`."""

    driver: Driver

    def __init__(self) -> None:
        self._recorder: Recorder | None = None
        self._work: list[tuple[Any, Any, Any, list[tuple[int, torch.Tensor]]]] = []
        self._made: list[torch.Tensor] = []

    def capture_begin(self, pool: Pool, capture_error_mode: str = "global") -> None:
        driver = self.driver
        self._pool = pool
        driver.begin(pool)
        driver.stream.graph = self
        driver.capturing.add(self)
        self._stream, self._workspace = driver.stream.cuda_stream, driver.workspaces[driver.stream.cuda_stream]
        self._recorder = Recorder(self, driver)
        self._recorder.__enter__()

    def capture_end(self) -> None:
        driver, recorder = self.driver, self._recorder
        if recorder is None:
            raise RuntimeError("capture_end without capture_begin")
        recorder.__exit__(None, None, None)
        driver.capturing.discard(self)
        self._recorder = driver.stream.graph = None
        if recorder.broken:
            raise RuntimeError("operation failed due to a previous error during capture")
        driver.end(self._pool)
        self._work, self._made = recorder.work, recorder.made
        driver.captures += 1
        weakref.finalize(self, driver.release, self._pool, self._stream)

    def breaks(self) -> None:
        assert self._recorder is not None
        self._recorder.broken = True

    def replay(self) -> None:
        self.driver.replays += 1
        self.driver.seconds += self.driver.a_replay
        if self.driver.workspaces[self._stream] != self._workspace:
            self.driver.freed.append("the workspace of a stream")
            raise FreedMemoryError("a replay over a workspace that went with another graph")
        for tensor in self._made:  # a pool's memory serves other graphs in between
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
        try:
            for func, args, kwargs, outputs in self._work:
                args, kwargs = tree_map(_there, (args, kwargs))
                result = tree_leaves(func(*args, **kwargs))
                for place, tensor in outputs:
                    tensor.copy_(result[place])
        except FreedMemoryError as error:
            self.driver.freed.append(str(error))
            raise


class Recorder(TorchDispatchMode):
    """Notes what runs on streams that take part in a capture."""

    def __init__(self, graph: Graph, driver: Driver) -> None:
        super().__init__()
        self.graph, self.driver, self.broken = graph, driver, False
        self.work: list[tuple[Any, Any, Any, list[tuple[int, torch.Tensor]]]] = []
        self.made: list[torch.Tensor] = []
        self._own: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.driver.failing and len(self.work) > 5:
            self.broken = True
            raise self.driver.failing.pop(0)
        if self.driver.waiting_elsewhere and len(self.work) > 5:
            self.driver.waiting_elsewhere -= 1
            thread = threading.Thread(target=self.driver.synchronize)
            thread.start()
            thread.join()
        if _READS.intersection(func.tags) and func is not torch.ops.aten.index.Tensor:
            self.broken = True
            raise RuntimeError("operation not permitted when stream is capturing")
        result = func(*args, **kwargs)
        if self.driver.stream.graph is not self.graph:
            return result
        storages = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        outputs: list[tuple[int, torch.Tensor]] = []
        for place, leaf in enumerate(tree_leaves(result)):
            if isinstance(leaf, torch.Tensor) and _storage(leaf) not in storages:
                outputs.append((place, leaf))
                self.made.append(leaf)
                self._own.add(_storage(leaf))
        self.work.append((func, *tree_map(self._kept, (args, kwargs)), outputs))
        return result

    def _kept(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or _storage(leaf) in self._own:
            return leaf
        like = leaf.dtype, leaf.storage_offset(), leaf.shape, leaf.stride()
        return _Lasting(StorageWeakRef(leaf.untyped_storage()), like)


def _there(leaf: Any) -> Any:
    return leaf.tensor() if isinstance(leaf, _Lasting) else leaf


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class Event:
    """A position in a stream, with the device's work before it."""

    driver: Driver

    def __init__(self, enable_timing: bool = False) -> None:
        self.at: float | None = None

    def record(self, stream: Stream) -> None:
        self.at = self.driver.seconds

    def query(self) -> bool:
        return not self.driver.lags

    def elapsed_time(self, end: Event) -> float:
        assert self.at is not None
        assert end.at is not None
        return 1000 * (end.at - self.at)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Make members on the CPU capture their steps with this replacement during a test."""
    result = Driver()
    graph_class: Any = type("Graph", (Graph,), {"driver": result})
    for name, value in {
        "CUDAGraph": graph_class,
        "Stream": result.new_stream,
        "Event": type("Event", (Event,), {"driver": result}),
        "stream": result.on,
        "current_stream": lambda device=None: result.stream,
        "graph_pool_handle": result.pool,
        "device": lambda device: nullcontext(),
        "synchronize": result.synchronize,
        "empty_cache": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda device, pool: result.end(pool), raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    made = Graphs.__init__

    def captures(self: Graphs, device: torch.device, member: str, reason: str | None = None) -> None:
        made(self, device, member, reason)
        self.reason = reason

    monkeypatch.setattr(Graphs, "__init__", captures)
    return result
