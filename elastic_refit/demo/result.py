"""What a demo run showed: a row per step, the incidents, and whether every promise held."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_refit.chaos import Fault
from elastic_refit.incident import Incident

__all__ = ["MAX_GAP", "MIN_GAP_PREVIOUS", "DemoResult", "StepRow", "broken_promises"]

MAX_GAP = 1e-3
"""Float32 on two implementations differs by some 1e-5; wrong weights by more than this."""
MIN_GAP_PREVIOUS = 1e-2
"""The control: the same comparison with the version before must fail, or it would prove nothing."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step. ``bytes`` is one copy of the weights; gaps are maxima over all sampled tokens; ``reward`` is a mean."""

    step: int
    version: int
    world_size: int
    participants: tuple[str, ...]
    seconds: float
    bytes: int
    logprob_gap: float
    logprob_gap_previous: float | None
    reward: float
    incident: str | None

    @property
    def gb_per_s(self) -> float:
        """Bytes of the weights over the refit's seconds, in 1e9 bytes per second."""
        return self.bytes / self.seconds / 1e9


@dataclass(slots=True)
class DemoResult:
    bring_up: StepRow | None = None
    steps: list[StepRow] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    error: str | None = None
    """Why the run ended early: the error's name and sentence."""

    @property
    def ok(self) -> bool:
        return self.error is None and not self.broken

    def to_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "error": self.error,
            "broken_promises": self.broken,
            "bring_up": dataclasses.asdict(self.bring_up) if self.bring_up is not None else None,
            "steps": [dataclasses.asdict(row) for row in self.steps],
            "incidents": [incident.to_dict() for incident in self.incidents],
        }

    def write(self, path: Path) -> None:
        """Store as JSON, whole or not at all."""
        draft = path.with_name(path.name + ".tmp")
        draft.write_text(json.dumps(self.to_dict(), indent=2) + "\n")
        os.replace(draft, path)


def broken_promises(result: DemoResult, planned: Sequence[Fault], struck: Sequence[Fault]) -> list[str]:
    """What the run promised and did not keep, one sentence each. ``struck`` are the faults that have a record."""
    broken = [
        f"step {row.step}: sampled tokens differ from the trainer's by {row.logprob_gap:.1e}, limit {MAX_GAP:g}"
        for row in result.steps
        if not row.logprob_gap < MAX_GAP
    ]
    broken += [
        f"step {row.step}: the control did not fail: version {row.version - 1} differs by only "
        f"{row.logprob_gap_previous:.1e}"
        for row in result.steps[1:]
        if row.logprob_gap_previous is None or not row.logprob_gap_previous > MIN_GAP_PREVIOUS
    ]
    broken += [f"{fault} did not strike" for fault in planned if fault not in struck]
    start = result.bring_up
    if start is not None and len(result.steps) > 1 and not result.steps[-1].reward > start.reward:
        broken.append(f"the reward did not rise: {start.reward:.3f} at first, {result.steps[-1].reward:.3f} at the end")
    return broken
