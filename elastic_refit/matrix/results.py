"""What a run of the matrix showed: one result per cell, how many held, and what recovery cost.

What must never happen here: a cell that was not run, or a check that was not made, counted as passed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

from elastic_refit.matrix.cells import Cell

__all__ = ["CellResult", "MatrixResult", "TimeToRecover", "not_run", "time_to_recover"]

Status = Literal["passed", "failed", "not_run"]

_LIMIT_S = {"kill": 1.0, "freeze": 1.5}
"""What a recovery may cost beside one refit; a freeze has ``stall_s`` to be seen as well."""


@dataclass(frozen=True, slots=True)
class CellResult:
    """One cell. ``outcome``, ``names``, ``rule`` and ``error`` are what was seen, not what the cell asks for.

    ``expected`` is the outcome that it asks for.
    ``names`` are indices of shards that the verdict named, ``trainers`` of trainers.
    ``why``: what did not hold, or why it was not run. ``landed_in``: the phases in which its faults struck, by their
    own records. ``seconds``: the incident by stage, ``recover`` from the strike to the landed refit, ``refit`` one
    without a fault on the same fleet, and ``cell`` everything. ``refit_multiple``: ``recover`` in such refits.
    """

    id: str
    status: Status
    state: str
    fault: str = "none"
    outcome: str | None = None
    names: tuple[int, ...] = ()
    trainers: tuple[int, ...] = ()
    rule: tuple[int, ...] = ()
    error: str | None = None
    sentence: str = ""
    landed_in: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    refit_multiple: float | None = None
    why: str = ""
    expected: str | None = None

    @property
    def passed(self) -> bool:
        return self.status == "passed"

    def to_dict(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        rule, landed = data["rule"], data["landed_in"]
        return {
            "id": self.id,
            "passed": self.passed,
            **data,
            "names": list(self.names),
            "trainers": list(self.trainers),
            "rule": rule[0] if len(rule) == 1 else list(rule) or None,
            "landed_in": landed[0] if len(landed) == 1 else list(landed) or None,
        }


def not_run(cell: Cell, why: str) -> CellResult:
    return CellResult(cell.id, "not_run", cell.state, cell.fault, why=why)


def broke(cell: Cell, why: str, cell_s: float | None = None) -> CellResult:
    """Of a cell of which nothing was seen, which is a failure; ``cell_s``: how long it was tried, in seconds."""
    seconds = {} if cell_s is None else {"cell": cell_s}
    return CellResult(cell.id, "failed", cell.state, cell.all_faults, seconds=seconds, why=why, expected=cell.outcome)


@dataclass(frozen=True, slots=True)
class TimeToRecover:
    """From the strike to the landed refit, over the recovered cells of one fault, in seconds."""

    cells: int
    p50_s: float
    p95_s: float
    limit_s: float
    """What was aimed at: a constant and one refit, the median of these cells'."""


@dataclass(slots=True)
class MatrixResult:
    """``left``: processes, ports and shared memory that were there when everything had been closed."""

    cells: list[CellResult] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    seed: int | None = None
    stall_s: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.left and not self.count("failed")

    def count(self, status: Status) -> int:
        return sum(cell.status == status for cell in self.cells)

    def to_dict(self) -> dict[str, Any]:
        return {
            "passed": self.count("passed"),
            "failed": self.count("failed"),
            "not_run": self.count("not_run"),
            "seed": self.seed,
            "left": self.left,
            "time_to_recover": {
                fault: dataclasses.asdict(times)
                for fault, times in time_to_recover(self.cells, stall_s=self.stall_s).items()
            },
            "cells": [cell.to_dict() for cell in self.cells],
        }

    def write(self, path: Path) -> None:
        """Store as JSON, whole or not at all."""
        draft = path.with_name(path.name + ".tmp")
        draft.write_text(json.dumps(self.to_dict(), indent=2) + "\n")
        os.replace(draft, path)


def time_to_recover(cells: Sequence[CellResult], *, stall_s: float) -> dict[str, TimeToRecover]:
    """For kills and for freezes, of those cells that recovered."""
    found = {}
    for fault, constant_s in _LIMIT_S.items():
        of_fault = [c.seconds for c in cells if c.fault == fault and c.outcome == "recovers" and "recover" in c.seconds]
        if not of_fault:
            continue
        times = sorted(seconds["recover"] for seconds in of_fault)
        refit_s = median([seconds["refit"] for seconds in of_fault if "refit" in seconds] or [0.0])
        limit_s = constant_s + refit_s + (stall_s if fault == "freeze" else 0.0)
        found[fault] = TimeToRecover(len(times), _percentile(times, 0.5), _percentile(times, 0.95), limit_s)
    return found


def _percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of them do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
