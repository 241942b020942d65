"""Runs batches of cells: on the calling thread, or several beside each other, each on a thread and fleets of its own.

What must never happen here: a thread that calls Ray when it is shut down, which ends the process without a word.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_refit.matrix.batches import batches_of
from elastic_refit.matrix.bench import Bench
from elastic_refit.matrix.cells import Cell
from elastic_refit.matrix.results import CellResult

__all__ = ["Watcher", "run_cells"]

_LOOK_S = 0.2
_ENDS_S = 40.0


@dataclass(frozen=True, slots=True)
class Watcher:
    """Told of every cell when it begins and when it has its result; from any thread."""

    began: Callable[[Cell], None]
    ended: Callable[[CellResult], None]


def run_cells(cells: Sequence[Cell], folder: Path, *, jobs: int, watcher: Watcher) -> tuple[list[str], set[str]]:
    """Run every cell, at most ``jobs`` fleets at a time; Ray is there.

    Returns what the fleets left behind, and the shared memory that must be gone when Ray is.
    """
    batches, stopping = deque(batches_of(cells, jobs)), threading.Event()
    benches = [Bench(folder) for _ in range(jobs)]
    if jobs == 1:
        _work(batches, benches[0], watcher, stopping)
    else:
        _work_beside(batches, benches, watcher, stopping)
    left = [what for bench in benches for what in bench.left]
    return left, {segment for bench in benches for segment in bench.segments}


def _work_beside(
    batches: deque[list[Cell]], benches: Sequence[Bench], watcher: Watcher, stopping: threading.Event
) -> None:
    """An interrupt takes the fleets away from under their threads, and waits until these have noticed."""
    workers = [
        threading.Thread(target=_work_until, args=(stopping, batches, bench, watcher), daemon=True) for bench in benches
    ]
    for worker in workers:
        worker.start()
    try:
        while any(worker.is_alive() for worker in workers):
            stopping.wait(_LOOK_S)
    finally:
        stopping.set()
        for bench, worker in zip(benches, workers, strict=True):
            if worker.is_alive():
                bench.break_off()
        for worker in workers:
            worker.join(_ENDS_S)


def _work_until(stopping: threading.Event, batches: deque[list[Cell]], bench: Bench, watcher: Watcher) -> None:
    try:
        _work(batches, bench, watcher, stopping)
    except BaseException:
        if not stopping.is_set():  # else its fleet was taken away
            raise


def _work(batches: deque[list[Cell]], bench: Bench, watcher: Watcher, stopping: threading.Event) -> None:
    try:
        while not stopping.is_set() and (batch := _next(batches)):
            for cell in batch:
                _run(cell, bench, watcher, stopping)
            bench.close()
    finally:
        bench.close()


def _next(batches: deque[list[Cell]]) -> list[Cell]:
    """None of the others gets it too; empty when there is no batch left."""
    try:
        return batches.popleft()
    except IndexError:
        return []


def _run(cell: Cell, bench: Bench, watcher: Watcher, stopping: threading.Event) -> None:
    if not stopping.is_set():
        watcher.began(cell)
        watcher.ended(bench.run(cell))
