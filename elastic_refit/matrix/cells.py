"""A matrix file as it is written: its cells, their keys, and one sentence about each that cannot be used.

A file is ``{defaults: {key: value}, cells: [{id: …}]}``; a key that a cell leaves out is the file's default, then the
one here. What must never happen here: a key that is ignored, or a mistake that is found after something has started.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationError

from elastic_refit.chaos import Fault, FaultKind
from elastic_refit.config import Count, Section
from elastic_refit.config_source import describe, read_mapping
from elastic_refit.core.events import CommitMode
from elastic_refit.core.ids import Member, ShardId, TrainerId
from elastic_refit.errors import ConfigError

__all__ = ["STATES", "Actor", "Blow", "Cell", "FaultName", "Outcome", "choose_cells", "load_cells"]

FaultName = FaultKind | Literal["none"]
State = Literal["HEALTHY", "SUSPECT", "STALE", "DEAD", "RESTARTING", "RETIRED"]
Outcome = Literal["continues", "recovers", "ends"]
Actor = Literal["ledger", "coordinator"]
Index = Annotated[int, Field(ge=0)]

STATES: tuple[State, ...] = get_args(State)


class SecondFault(Section):
    """A fault beside the cell's own: in the same attempt (``also``), or in the recovery from the first (``then``)."""

    victim: Index | None = None
    trainer_victim: Index | None = None
    actor: Actor | None = None
    fault: FaultKind
    phase: str


class Cell(Section):
    """One row. Indices are of shards unless the name says otherwise; times are in seconds."""

    id: Annotated[str, Field(min_length=1)]
    note: str | None = None

    trainers: Count = 2
    shards: Count = 3
    widths: list[Count] | None = None
    """Ranks of each shard; it says how many shards there are as well."""
    engine: Literal["torch", "vllm"] = "torch"
    transport: str = "broadcast"
    commit: CommitMode = "streamed"
    bucket_bytes: Annotated[int, Field(ge=16, multiple_of=16)] | None = None
    min_healthy: Annotated[int, Field(ge=0)] = 1
    max_recoveries: Annotated[int, Field(ge=0)] = 1
    gathering: bool = False
    """Every trainer holds a part of each tensor, and they gather it from each other."""

    cold: bool = False
    """No refit before the faulted one: the group is not built yet."""
    setup: list[str] = Field(default_factory=list)
    state: State = "HEALTHY"
    """What the ledger thinks of the victim when the faulted refit is asked for."""
    suspects: list[Index] = Field(default_factory=list)
    """Shards whose requests had failed before."""

    fault: FaultName
    phase: str | None = None
    victim: Index = 0
    victims: list[Index] | None = None
    trainer_victim: Index | None = None
    actor: Actor | None = None
    node: Literal["lost"] | None = None
    between: list[Index] | None = None
    """The two shards of a partition."""
    rank_in_shard: Index = 0
    also: SecondFault | None = None
    then: SecondFault | None = None
    thaw: Literal["before_stall", "in_evidence", "after_stall", "after_recovery"] | None = None
    fence: Literal["unreachable"] | None = None
    requests: Literal["running"] | None = None
    refits: Count = 1
    restart: bool = False
    repeat: bool = False
    scale_to: Count | None = None
    drain: list[Index] | None = None

    outcome: Outcome
    names: list[Index] | None = None
    """Exactly the shards that the verdict names."""
    collateral: list[Index] = Field(default_factory=list)
    """Shards that are condemned for how they took the recovery."""
    rule: int | list[int] | None = None
    error: str | None = None
    rebuilds: Annotated[int, Field(ge=0)] | None = None
    within_s: Annotated[float, Field(gt=0)] | None = None

    @property
    def num_shards(self) -> int:
        return self.shards if self.widths is None else len(self.widths)

    @property
    def rules(self) -> tuple[int, ...] | None:
        if self.rule is None:
            return None
        return tuple(sorted([self.rule] if isinstance(self.rule, int) else self.rule))

    @property
    def struck(self) -> tuple[int, ...]:
        """The shards that the cell's own fault strikes."""
        if self.fault == "none" or self.trainer_victim is not None or self.actor is not None:
            return ()
        if self.between is not None:
            return tuple(self.between)
        return tuple(self.victims) if self.victims is not None else (self.victim,)

    @property
    def all_faults(self) -> str:
        """``kill``, or ``kill+freeze`` where there is a second one."""
        seconds = (second for second in (self.also, self.then) if second is not None)
        return "+".join([self.fault, *(second.fault for second in seconds)])

    def blows(self) -> tuple[Blow, ...]:
        """Every fault of the cell, the second ones last."""
        if self.fault == "none" or self.phase is None:
            return ()
        own = [Blow(self.fault, self.phase, target) for target in self._targets()]
        more = [(second, is_then) for second, is_then in ((self.also, False), (self.then, True)) if second is not None]
        return (*own, *(Blow(each.fault, each.phase, _target(each), is_then=is_then) for each, is_then in more))

    def _targets(self) -> list[Member | Actor]:
        if self.actor is not None:
            return [self.actor]
        if self.trainer_victim is not None:
            return [TrainerId(self.trainer_victim)]
        if self.between is not None:
            return [ShardId(self.between[0])]
        return [ShardId(index) for index in self.struck]


@dataclass(frozen=True, slots=True)
class Blow:
    """One fault against one target; shards are meant by their index, whatever incarnation holds the seat.

    ``is_then``: it strikes in the recovery from the others.
    """

    fault: FaultName
    phase: str
    target: Member | Actor
    is_then: bool = False

    def fault_against(
        self,
        victim: Member | Actor,
        *,
        version: int,
        peer: Member | None = None,
        seconds: float | None = None,
        times: int = 1,
    ) -> Fault:
        """The fault to arm, in the refit of ``version``; ``peer`` and ``seconds`` where the kind of fault needs them.

        Raises:
            ConfigError: there is no such fault in such a phase.
        """
        assert self.fault != "none", "a cell without a fault has no blows"
        return Fault(
            self.fault,
            victim,
            version,
            self.phase,
            peer=peer if self.fault == "partition" else None,
            seconds=seconds if self.fault == "slow" else None,
            times=times,
        )


def _target(second: SecondFault) -> Member | Actor:
    if second.actor is not None:
        return second.actor
    return TrainerId(second.trainer_victim) if second.trainer_victim is not None else ShardId(second.victim or 0)


class _File(Section):
    defaults: dict[str, Any] = Field(default_factory=dict)
    cells: list[dict[str, Any]]


def load_cells(path: Path) -> list[Cell]:
    """The cells of a matrix file, in its order.

    Raises:
        ConfigError: one sentence that names the file, the cell and the key.
    """
    try:
        file = _File.model_validate(read_mapping(path))
    except ValidationError as failure:
        raise ConfigError(describe(failure, _File, path=path, overrides=())) from None
    for key in file.defaults:
        _require_key(f"{path}: defaults", key)
    cells = [_cell(path, number, file.defaults, row) for number, row in enumerate(file.cells, start=1)]
    for name, count in Counter(cell.id for cell in cells).items():
        if count > 1:
            raise ConfigError(f"{path}: cell {name}: the id is given {count} times", cell=name, key="id")
    return cells


def _cell(path: Path, number: int, defaults: Mapping[str, Any], row: Mapping[str, Any]) -> Cell:
    name = row.get("id", f"number {number}")
    given = _with_whole_note(row)
    for key in given:
        _require_key(f"{path}: cell {name}", key)
    try:
        return Cell.model_validate({**_applicable(defaults, row), **given})
    except ValidationError as failure:
        sentence = describe(failure, Cell, path=f"{path}: cell {name}", overrides=())
        key = str(failure.errors(include_url=False)[0]["loc"][0])
        raise ConfigError(sentence.replace("there is no setting", "there is no key"), cell=name, key=key) from None


def _require_key(where: str, key: str) -> None:
    """Before anything else about a row: a key that is misspelt is missed under its right name as well."""
    known = set(Cell.model_fields)
    if key not in known:
        raise ConfigError(f"{where}: there is no key {key}; {_nearest(str(key), known)}", key=key)


def _applicable(defaults: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """A default number of shards says nothing about a row that lists them."""
    return {key: value for key, value in defaults.items() if key != "shards" or "widths" not in row}


def _with_whole_note(row: Mapping[str, Any]) -> dict[str, Any]:
    """In ``{…, note: a, b}`` YAML takes b for a key without a value: what follows the note so is the rest of it."""
    whole: dict[str, Any] = {}
    is_in_note = False
    for key, value in row.items():
        if is_in_note and value is None:
            whole["note"] = f"{whole['note']}, {key}"
            continue
        is_in_note = key == "note"
        whole[key] = value
    return whole


def choose_cells(cells: Sequence[Cell], ids: Sequence[str], *, engine: str | None = None) -> list[Cell]:
    """The cells with these ids and that engine, in the order of ``cells``; of any id or engine if none is given.

    An id may be a pattern with ``*`` and ``?``.

    Raises:
        ConfigError: there is no such cell.
    """
    known = {cell.id for cell in cells}
    for name in ids:
        if not fnmatch.filter(known, name):
            raise ConfigError(f"--cell: there is no cell {name}; {_nearest(name, known)}", cell=name)
    chosen = {name for pattern in ids for name in fnmatch.filter(known, pattern)} if ids else known
    return [cell for cell in cells if cell.id in chosen and engine in (None, cell.engine)]


def _nearest(name: str, known: set[str]) -> str:
    near = get_close_matches(name, sorted(known), n=1)
    return f"the nearest is {near[0]}" if near else f"there are {', '.join(sorted(known))}"
