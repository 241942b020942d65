"""One cell on one fleet: arm its faults, push, and look at everything afterwards."""

from __future__ import annotations

import time
from dataclasses import dataclass

import ray

from elastic_refit.actors.sabotage import thaw
from elastic_refit.core.ledger_state import LedgerState
from elastic_refit.errors import ElasticRefitError
from elastic_refit.matrix.aftermath import look_at_ledger, look_at_processes, look_at_shards
from elastic_refit.matrix.cells import Cell
from elastic_refit.matrix.intruder import wake_the_condemned
from elastic_refit.matrix.lab import Lab
from elastic_refit.matrix.moments import Moments
from elastic_refit.matrix.observation import Observation
from elastic_refit.matrix.strikes import plan_faults

__all__ = ["observe"]

_DIES_S = 10.0
_FREEZES_S = 1.0


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

    def carry_out(self) -> None:
        lab, seen = self.lab, self.seen
        before, began_s = lab.state(), time.time()
        seen.planned = plan_faults(self.cell, lab, lab.version + 1)
        lab.fleet.chaos.arm(*seen.planned)
        self._strike_idle(before)
        stopped = lab.stop_agents() if self.cell.fence == "unreachable" else ()
        try:
            self._push()
            self._look(before, began_s)
        finally:
            thaw(stopped)

    def _look(self, before: LedgerState, began_s: float) -> None:
        lab, seen = self.lab, self.seen
        seen.ended_s = time.monotonic()
        seen.version, seen.num_buckets = lab.version, lab.num_buckets
        records = lab.fleet.chaos.records()
        seen.records = tuple(record for record in records if record.fault.version > lab.version - self.cell.refits)
        thaw(tuple(lab.servants()))
        look_at_ledger(seen, lab.state(), epoch=before.refits.epoch, began_s=began_s)
        look_at_processes(seen, lab)
        look_at_shards(seen, lab)
        if self.cell.thaw == "after_recovery":
            seen.intruders = wake_the_condemned(lab, seen.condemned or ())

    def _push(self) -> None:
        for _ in range(self.cell.refits):
            try:
                report = self.lab.refit(while_waiting=Moments(self.cell, self.lab).look)
            except ElasticRefitError as error:
                self.seen.error = error
                incident = error.fields.get("incident")
                if incident is not None:
                    self.seen.incidents.append(incident)
                return
            self.seen.landed.append(report.version)
            if report.incident is not None:
                self.seen.incidents.append(report.incident)

    def _strike_idle(self, before: LedgerState) -> None:
        for fault in self.seen.planned:
            if fault.phase != "idle":
                continue
            handle = self.lab.fleet.members[fault.striker]
            limit_s = _DIES_S if fault.kind == "kill" else _FREEZES_S
            ray.wait([handle.idle.remote(fault.version)], timeout=limit_s)
            if fault.victim == "ledger":
                after = self.lab.state()
                self.seen.is_replayed = (after.shards, after.refits) == (before.shards, before.refits)
