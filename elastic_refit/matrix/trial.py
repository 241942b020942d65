"""One cell on one fleet: arm its faults, push, thaw what is to be thawed, and look at everything afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import ray

from elastic_refit.actors.sabotage import thaw
from elastic_refit.chaos import Fault
from elastic_refit.errors import ElasticRefitError
from elastic_refit.matrix.aftermath import look_at_ledger, look_at_processes, look_at_shards
from elastic_refit.matrix.cells import Cell
from elastic_refit.matrix.lab import Lab
from elastic_refit.matrix.observation import Observation
from elastic_refit.matrix.strikes import plan_faults

__all__ = ["observe"]

_IDLE_S = 10.0


def observe(cell: Cell, lab: Lab) -> Observation:
    """Carry ``cell`` out on a fleet that was made ready for it."""
    trial = _Trial(cell, lab, Observation(lab.limits, refit_s=lab.refit_s))
    trial.carry_out()
    return trial.seen


@dataclass(slots=True)
class _Trial:
    cell: Cell
    lab: Lab
    seen: Observation
    planned: tuple[Fault, ...] = ()
    epoch: int = 0
    began_s: float = 0.0
    thawed: bool = False
    _thaw_when: Callable[[float], bool] | None = field(default=None)

    def carry_out(self) -> None:
        lab, seen = self.lab, self.seen
        before = lab.state()
        self.epoch, self.began_s = before.refits.epoch, time.time()
        self.planned = seen.planned = plan_faults(self.cell, lab, lab.version + 1)
        lab.fleet.chaos.arm(*self.planned)
        self._strike_idle()
        self._push()
        seen.ended_s = time.monotonic()
        seen.version, seen.num_buckets = lab.version, lab.num_buckets
        records = lab.fleet.chaos.records()
        seen.records = tuple(record for record in records if record.fault.version > lab.version - self.cell.refits)
        look_at_ledger(seen, lab.state(), epoch=self.epoch, began_s=self.began_s)
        look_at_processes(seen, lab)
        look_at_shards(seen, lab)

    def _push(self) -> None:
        for _ in range(self.cell.refits):
            try:
                report = self.lab.refit(while_waiting=self._look)
            except ElasticRefitError as error:
                self.seen.error = error
                incident = error.fields.get("incident")
                if incident is not None:
                    self.seen.incidents.append(incident)
                return
            self.seen.landed.append(report.version)
            if report.incident is not None:
                self.seen.incidents.append(report.incident)

    def _strike_idle(self) -> None:
        for fault in self.planned:
            if fault.phase == "idle":
                handle = self.lab.fleet.members[fault.striker]
                ray.wait([handle.idle.remote(fault.version)], timeout=_IDLE_S if fault.kind == "kill" else 1.0)

    def _look(self) -> None:
        """Called again and again while a refit runs: thaw who is to be thawed, at its moment."""
        if self.cell.thaw is None or self.thawed:
            return
        struck = [each.at_s for each in self.lab.fleet.chaos.records() if each.fault.version == self.lab.version]
        if struck and struck[0] is not None and time.monotonic() - struck[0] >= self._patience_s():
            self.thawed = True
            thaw(tuple(self.lab.ever))

    def _patience_s(self) -> float:
        """How long after the strike: well before a stall is seen, in the middle of the look, or well after it."""
        limits = self.lab.limits
        match self.cell.thaw:
            case "before_stall":
                return 0.5 * limits.stall_s
            case "in_evidence":
                return limits.stall_s + 0.5 * limits.ping_s
            case "after_stall":
                return limits.stall_s + 2 * limits.ping_s
            case _:
                return float("inf")
