"""Runs cells on fleets: those of one shape one after the other on one fleet, several shapes beside each other if asked.

What must never happen here: a cell without a result, or a fleet that is not closed.
"""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue

from elastic_refit.matrix.batches import ENDS_THE_FLEET, batches_of
from elastic_refit.matrix.cells import Cell
from elastic_refit.matrix.checks import judge
from elastic_refit.matrix.lab import Lab, LabUnclean
from elastic_refit.matrix.observation import Observation
from elastic_refit.matrix.results import CellResult
from elastic_refit.matrix.shape import shape_of
from elastic_refit.matrix.trial import observe

__all__ = ["Watcher", "run_cells"]

logger = logging.getLogger(__name__)

_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Watcher:
    """Told of every cell when it begins and when it has its result; called on the thread of ``run_cells``."""

    began: Callable[[Cell], None]
    ended: Callable[[CellResult], None]


def run_cells(cells: Sequence[Cell], folder: Path, *, jobs: int, watcher: Watcher) -> list[str]:
    """Run every cell; Ray is there. Returns what the fleets left behind. At most ``jobs`` fleets at a time."""
    said: SimpleQueue[Cell | CellResult | None] = SimpleQueue()
    batches: SimpleQueue[list[Cell]] = SimpleQueue()
    for batch in batches_of(cells, jobs):
        batches.put(batch)
    left: list[str] = []
    workers = [
        threading.Thread(target=_work, args=(batches, folder, said, left), name=f"matrix-{number}", daemon=True)
        for number in range(jobs)
    ]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers) or not said.empty():
        _pass_on(said, watcher)
    return left


def _pass_on(said: SimpleQueue[Cell | CellResult | None], watcher: Watcher) -> None:
    try:
        news = said.get(timeout=_LOOK_S)
    except Empty:
        return
    if isinstance(news, Cell):
        watcher.began(news)
    elif news is not None:
        watcher.ended(news)


def _work(
    batches: SimpleQueue[list[Cell]], folder: Path, said: SimpleQueue[Cell | CellResult | None], left: list[str]
) -> None:
    while True:
        try:
            batch = batches.get_nowait()
        except Empty:
            return
        bench = _Bench(folder)
        for cell in batch:
            said.put(cell)
            said.put(bench.run(cell))
        bench.close()
        left.extend(bench.left)


@dataclass(slots=True)
class _Bench:
    """Where the cells of one batch run."""

    folder: Path
    lab: Lab | None = None
    left: list[str] = field(default_factory=list)

    def run(self, cell: Cell) -> CellResult:
        began_s = time.monotonic()
        try:
            lab = self._lab_for(cell)
            seen = observe(cell, lab)
            wrong = judge(cell, seen)
            result = _result(cell, seen, wrong, time.monotonic() - began_s)
        except Exception as error:
            logger.info("cell_broke", exc_info=True)
            said = str(error).strip().splitlines() or ["nothing"]
            why = f"it could not be carried out: {type(error).__name__}: {said[0]}"
            seconds = {"cell": time.monotonic() - began_s}
            result = CellResult(cell.id, "failed", cell.state, cell.fault, seconds=seconds, why=why)
            self.close()
        else:
            self._clear_up(seen)
        return result

    def close(self) -> None:
        lab, self.lab = self.lab, None
        if lab is not None:
            self.left += lab.close()

    def _lab_for(self, cell: Cell) -> Lab:
        if self.lab is not None:
            try:
                self.lab.make_ready(cell)
                return self.lab
            except LabUnclean as error:
                logger.warning("fleet_unclean", extra={"reason": str(error)})
                self.close()
        self.lab = Lab(shape_of(cell), Path(tempfile.mkdtemp(prefix="fleet-", dir=self.folder)))
        self.lab.make_ready(cell)
        return self.lab

    def _clear_up(self, seen: Observation) -> None:
        if type(seen.error).__name__ in ENDS_THE_FLEET:
            self.close()
        elif self.lab is not None:
            try:
                self.lab.clear_up()
            except Exception as error:  # noqa: BLE001 - such a fleet is not used again, and that is all
                logger.warning("fleet_unclean", extra={"reason": str(error)})
                self.close()


def _result(cell: Cell, seen: Observation, wrong: Sequence[str], cell_s: float) -> CellResult:
    incident = seen.incidents[-1] if seen.incidents else None
    seconds = dict(incident.seconds) if incident is not None else {}
    if seen.recover_s is not None and seen.incidents:
        seconds["recover"] = seen.recover_s
    if seen.refit_s is not None:
        seconds["refit"] = seen.refit_s
    multiple = seconds["recover"] / seconds["refit"] if {"recover", "refit"} <= seconds.keys() else None
    sentence = incident.sentence if incident is not None else str(seen.error or "")
    return CellResult(
        cell.id,
        "failed" if wrong else "passed",
        cell.state,
        cell.fault,
        outcome=seen.outcome,
        names=seen.shard_names,
        trainers=seen.trainer_names,
        rule=seen.rules,
        error=type(seen.error).__name__ if seen.error is not None else None,
        sentence=sentence,
        landed_in=tuple(dict.fromkeys(record.phase for record in seen.records)),
        seconds={**seconds, "cell": cell_s},
        refit_multiple=multiple,
        why="; ".join(wrong),
    )
