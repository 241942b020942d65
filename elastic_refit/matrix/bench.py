"""Where cells run one after the other: a fleet for them, made anew when it must be, and a result for every cell.

What must never happen here: a cell without a result, or a fleet that is not closed.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from elastic_refit.matrix.batches import ENDS_THE_FLEET
from elastic_refit.matrix.cells import Cell
from elastic_refit.matrix.checks import judge
from elastic_refit.matrix.lab import Lab, LabUnclean
from elastic_refit.matrix.observation import Observation
from elastic_refit.matrix.results import CellResult, broke
from elastic_refit.matrix.shape import shape_of
from elastic_refit.matrix.trial import observe

__all__ = ["Bench"]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Bench:
    """One thread uses it; another may break it off. ``left`` and ``segments`` are of every fleet that was closed."""

    folder: Path
    lab: Lab | None = None
    left: list[str] = field(default_factory=list)
    segments: set[str] = field(default_factory=set)
    _is_broken_off: bool = False

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
            result = broke(cell, why, time.monotonic() - began_s)
            self.close()
        else:
            self._clear_up(seen)
        return result

    def close(self) -> None:
        lab, self.lab = self.lab, None
        if lab is not None:
            self.left += lab.close()
            self.segments |= lab.segments

    def break_off(self) -> None:
        """End the fleet, whatever is going on: who works on it finds out, and makes no other one."""
        self._is_broken_off = True
        if self.lab is not None:
            self.lab.fleet.close()

    def _lab_for(self, cell: Cell) -> Lab:
        if self.lab is not None:
            try:
                self.lab.make_ready(cell)
                return self.lab
            except LabUnclean as error:
                logger.warning("fleet_unclean", extra={"reason": str(error)})
                self.close()
        if self._is_broken_off:
            raise LabUnclean("the run was interrupted")
        self.lab = Lab(shape_of(cell), Path(tempfile.mkdtemp(prefix="fleet-", dir=self.folder)))
        self.lab.bring_up()
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
        cell.all_faults,
        outcome=seen.outcome,
        expected=cell.outcome,
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
