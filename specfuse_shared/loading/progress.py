"""What is shown while members load: a bar on a terminal and in notebooks. Imports no torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

READY = "ready"
"""The last stage of a member."""


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """One step of loading: `stage` of member number `index` of `total`."""

    member: str
    index: int
    total: int
    stage: str


OnLoadProgress = Callable[[LoadProgress], None]


class LoadingBar:
    """A tqdm bar that counts loaded members and names the stage. It shows nothing where stderr is a file or a pipe.

    `TQDM_DISABLE=1` hides it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bar: Any = None

    def open(self, members: Sequence[str]) -> None:
        """Show the bar, before torch is imported: that takes seconds."""
        with self._lock:
            self._shown(len(members)).set_description_str(f"loading {', '.join(members)}")

    def __call__(self, progress: LoadProgress) -> None:
        with self._lock:
            bar = self._shown(progress.total)
            bar.set_description_str(f"{progress.member}: {progress.stage}")
            if progress.stage == READY:
                bar.update(1)

    def close(self) -> None:
        """Take the bar away; the next load shows a new one."""
        with self._lock:
            if self._bar is not None:
                self._bar.close()
            self._bar = None

    def _shown(self, total: int) -> Any:
        if self._bar is None:
            from tqdm.auto import tqdm

            bars = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}]"
            self._bar = tqdm(total=total, bar_format=bars, mininterval=0, leave=False, disable=None)
        return self._bar


loading_bar = LoadingBar()
"""The process's progress bar; engines load one at a time."""
