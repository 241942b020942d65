"""Which cells share a fleet, and in which order they run on it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from elastic_refit.matrix.cells import Cell
from elastic_refit.matrix.shape import shape_of

__all__ = ["ENDS_THE_FLEET", "batches_of"]

ENDS_THE_FLEET = frozenset({"TrainerLost", "CoordinatorLost", "LedgerLost"})
"""Errors after which there is nothing left to run another cell on."""


def batches_of(cells: Iterable[Cell], jobs: int) -> list[list[Cell]]:
    """Cells that share a fleet, the longest batch first; one that is longer than a job's share is cut.

    In a batch, what its fleet does not survive comes last; before it come cold cells, behind those that lose a shard,
    so that nobody has to be killed only to break up a group.
    """
    by_shape = defaultdict(list)
    for cell in cells:
        by_shape[shape_of(cell)].append(cell)
    share = -(-sum(map(len, by_shape.values())) // jobs)
    batches = []
    for batch in by_shape.values():
        ordered = sorted(batch, key=_when)
        parts = -(-len(ordered) // share)
        batches += [ordered[part::parts] for part in range(parts)]
    return sorted(batches, key=len, reverse=True)


def _when(cell: Cell) -> int:
    ruins = cell.state == "RETIRED" or cell.error in ENDS_THE_FLEET or "coordinator" in (cell.actor, _second(cell))
    return 2 if ruins else int(cell.cold)


def _second(cell: Cell) -> str | None:
    return None if cell.also is None else cell.also.actor
