"""Cells drawn at random, each with the outcome that follows from what was drawn. The same seed, the same cells."""

from __future__ import annotations

import random
import secrets
from typing import Any

from elastic_refit.errors import ConfigError
from elastic_refit.matrix.cells import Cell
from elastic_refit.matrix.shape import NUM_BUCKETS

__all__ = ["draw_cells", "fresh_seed"]

_MAX_TRAINERS, _MAX_SHARDS = 3, 6
_RULES = {"kill": 1, "freeze": 2, "gil": 2, "wedge": 3, "raise": 1}
_PHASES = {
    "kill": ("idle", "before", "bucket", "finalizing", "ack"),
    "freeze": ("idle", "before", "bucket", "finalizing", "ack"),
    "gil": ("bucket",),
    "wedge": ("before", "bucket", "finalizing"),
    "raise": ("bucket",),
}


def fresh_seed() -> int:
    return secrets.randbelow(2**31)


def draw_cells(count: int, seed: int) -> list[Cell]:
    """``count`` cells: world size, commit, fault, victim, phase and bucket are drawn; ids say what came out.

    Raises:
        ConfigError: ``count`` is no number of cells.
    """
    if count < 1:
        raise ConfigError(f"--random: {count} cells are none", field="random")
    dice = random.Random(seed)
    return [_draw(dice, number) for number in range(count)]


def _draw(dice: random.Random, number: int) -> Cell:
    trainers, shards = dice.randint(1, _MAX_TRAINERS), dice.randint(1, _MAX_SHARDS)
    fault = dice.choice(sorted(_RULES))
    phase = dice.choice(_PHASES[fault])
    if phase == "bucket":
        phase = f"bucket:{dice.randrange(NUM_BUCKETS)}"
    victim = dice.randrange(shards)
    drawn = {
        "trainers": trainers,
        "shards": shards,
        "commit": dice.choice(("streamed", "staged")),
        "fault": fault,
        "phase": phase,
        "victim": victim,
    }
    name = f"random-{number}-{fault}-{phase.replace(':', '')}-{trainers}x{shards}-{victim}"
    return Cell.model_validate({"id": name, **drawn, **_expected(fault, phase, victim=victim, shards=shards)})


def _expected(fault: str, phase: str, *, victim: int, shards: int) -> dict[str, Any]:
    """With nobody left the run ends; lost between refits there is no incident; else the one is named and left out."""
    if shards == 1:
        return {"outcome": "ends", "error": "NoSurvivingShards"}
    if phase == "idle":
        return {"outcome": "continues", "rebuilds": 1}
    return {"outcome": "recovers", "names": [victim], "rule": _RULES[fault], "rebuilds": 1}
