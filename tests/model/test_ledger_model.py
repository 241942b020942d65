"""Every order of a small world: three shards, two crashes, two refits, a coordinator that is replaced.

The world is what really is: who lives, what each shard holds, how far the coordinator is. What it says to the ledger
arrives at once, or late: in any order, past its epoch, past its incarnation, or never. Each world may hold back a few
messages, any of them. Only opening an epoch and a refit is always waited for, as the protocol does before the first
byte. After every delivery, and its repetition, the invariants of the ledger must hold, and nobody may be promoted who
does not really hold the version that landed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import fields
from typing import Final, NamedTuple

import pytest

from elastic_refit.core.events import (
    ActorDied,
    Condemned,
    Entry,
    EpochOpened,
    Event,
    FleetEvent,
    Loaded,
    ProbeOk,
    RefitEnded,
    RefitLanded,
    RefitOpened,
    Registered,
    RequestFailed,
    Restarting,
    Retired,
    ShardCommitted,
    WeightsPartial,
)
from elastic_refit.core.ids import ShardId
from elastic_refit.core.ledger import new_ledger
from elastic_refit.core.ledger_queries import absent, joinable
from elastic_refit.core.ledger_state import LedgerPolicy, LedgerState, OpenRefit, ShardRecord
from elastic_refit.core.ledger_table import SERVING, ShardState
from tests.ledger_invariants import checked_fold

NUM_SHARDS = 3
MAX_EPOCHS = 3
S0, S1 = ShardId(0), ShardId(1)
PARTIAL = -1
"""What a shard holds between its first bucket and its commit."""


class Shard(NamedTuple):
    """One seat as it really is. ``holds``: a version, None, or PARTIAL."""

    id: ShardId
    is_alive: bool = True
    holds: int | None = None


class Attempt(NamedTuple):
    """The refit that the coordinator is in."""

    epoch: int
    version: int
    participants: tuple[ShardId, ...]


class World(NamedTuple):
    ledger: LedgerState
    shards: tuple[Shard, ...]
    attempt: Attempt | None = None
    in_flight: frozenset[int] = frozenset()
    """Numbers of entries that were said and have not arrived."""
    num_refits: int = 0
    num_crashes: int = 0
    coordinator: int = 1
    num_late: int = 0
    max_crashes: int = 0
    max_late: int = 0

    def key(self) -> str:
        """What the future depends on: not how the world came here, nor the words that were kept of it.

        The shards are alike, so that worlds which differ only in who is called what are one.
        """
        refits, attempt = self.ledger.refits, self.attempt
        planned = [group.participants for group in (refits.open, attempt) if group is not None]
        about: list[list[str]] = [[], [], [], []]
        for number in self.in_flight:
            index, rest = _ABOUT[number]
            about[index].append(rest)
        seats = [
            (
                (shard.id.incarnation, shard.is_alive, shard.holds or 0),
                (record.id.incarnation, record.state, record.version or 0, record.weights_epoch),
                (record.request_failures, [_seated(group, shard.id.index) for group in planned]),
                sorted(about[shard.id.index]),
            )
            for shard, record in zip(self.shards, _records(self.ledger), strict=True)
        ]
        book = (refits.epoch, refits.coordinator_incarnation, refits.highest_version, refits.landed_version)
        groups = [group and (group.epoch, group.version) for group in (refits.open, attempt)]
        return repr((sorted(seats), sorted(about[-1]), book, groups, self[4:]))


def _seated(group: Collection[ShardId], index: int) -> int:
    return next((shard.incarnation for shard in group if shard.index == index), -1)


Move = tuple[str, World]


def _beginning(*in_flight: Event, max_crashes: int, max_late: int) -> World:
    shards = tuple(Shard(ShardId(index)) for index in range(NUM_SHARDS))
    world = World(new_ledger(LedgerPolicy(restart_budget=9)), shards, max_crashes=max_crashes, max_late=max_late)
    for shard in shards:
        world = _told(world, Registered(shard.id))
    for event in in_flight:
        world = _with_late(world, event)
    return world


_ENTRIES: Final[list[Entry]] = []
_NUMBERS: Final[dict[Event, int]] = {}
_ABOUT: Final[list[tuple[int, str]]] = []
"""The index of the shard that each entry is about, or -1, and the rest of it."""


def _number(event: Event) -> int:
    """Nothing is said twice in a world, so that one event is one entry, on every way to it."""
    if event not in _NUMBERS:
        _NUMBERS[event] = len(_ENTRIES)
        _ENTRIES.append(Entry("world", 0, len(_ENTRIES), 1.0, event))
        _ABOUT.append(_about(event))
    return _NUMBERS[event]


def _about(event: Event) -> tuple[int, str]:
    if isinstance(event, FleetEvent):
        return -1, repr(event)
    rest = [getattr(event, each.name) for each in fields(event) if each.name != "shard"]
    return event.shard.index, repr((type(event).__name__, event.shard.incarnation, rest))


def _said(world: World, *events: Event) -> Iterator[World]:
    """Every way in which ``events`` arrive: each at once, or late, while the world may hold more back."""
    if not events:
        yield world
        return
    yield from _said(_told(world, events[0]), *events[1:])
    if world.num_late < world.max_late:
        number = _number(events[0])
        late = world._replace(in_flight=world.in_flight | {number}, num_late=world.num_late + 1)
        yield from _said(late, *events[1:])


def _delivered(world: World, number: int) -> World:
    ledger, _ = checked_fold(world.ledger, _ENTRIES[number])
    for before, after, shard in zip(_records(world.ledger), _records(ledger), world.shards, strict=False):
        if after.state in SERVING and before.state not in SERVING and after.id == shard.id and shard.is_alive:
            assert shard.holds == ledger.refits.landed_version, f"{after.id} was promoted and holds {shard.holds}"
    return world._replace(ledger=ledger, in_flight=world.in_flight - {number})


def _records(ledger: LedgerState) -> tuple[ShardRecord, ...]:
    found = (ledger.shards.get(index) for index in range(NUM_SHARDS))
    return tuple(record for record in found if record is not None)


def _told(world: World, event: Event) -> World:
    """``event`` is said and waited for."""
    return _delivered(world, _number(event))


def _with_shard(world: World, shard: Shard) -> World:
    return world._replace(shards=tuple(shard if shard.id.index == old.id.index else old for old in world.shards))


def _moves(world: World) -> Iterator[Move]:
    for number in sorted(world.in_flight):
        yield f"late: {_ENTRIES[number].event}", _delivered(world, number)
    yield from _crashes(world)
    yield from _restarts(world)
    yield from _coordinator_moves(world)


def _crashes(world: World) -> Iterator[Move]:
    if world.num_crashes == world.max_crashes:
        return
    for shard in world.shards:
        if shard.is_alive:
            gone = _with_shard(world, shard._replace(is_alive=False))._replace(num_crashes=world.num_crashes + 1)
            for after in _said(gone, ActorDied(shard.id, "killed")):
                yield f"crash {shard.id}", after


def _restarts(world: World) -> Iterator[Move]:
    """The supervisor acts on what the ledger says, and waits until it has noted the successor."""
    for shard, record in zip(world.shards, _records(world.ledger), strict=True):
        if record.id == shard.id and record.state is ShardState.DEAD:
            successor = Shard(ShardId(shard.id.index, shard.id.incarnation + 1))
            noted = _told(_with_shard(world, successor), Restarting(successor.id))
            for after in _said(noted, Loaded(successor.id)):
                yield f"restart {successor.id}", after


def _coordinator_moves(world: World) -> Iterator[Move]:
    if world.attempt is not None:
        yield from _attempt_moves(world, world.attempt)
    elif world.num_refits < 2:
        yield from _open(world, version=world.num_refits + 1, participants=joinable(world.ledger))


def _attempt_moves(world: World, attempt: Attempt) -> Iterator[Move]:
    members = [shard for shard in world.shards if shard.id in attempt.participants and shard.is_alive]
    for shard in members:
        if shard.holds != attempt.version:
            whole = _with_shard(world, shard._replace(holds=attempt.version))
            for after in _said(whole, ShardCommitted(shard.id, attempt.epoch, attempt.version)):
                yield f"{shard.id} commits", after
    is_whole = len(members) == len(attempt.participants) and all(s.holds == attempt.version for s in members)
    after_it = world._replace(attempt=None, num_refits=world.num_refits + 1)
    if is_whole:
        for after in _said(after_it, RefitLanded(attempt.epoch, attempt.version)):
            yield "land", after
    if len(members) < len(attempt.participants):
        yield from _recover(world, attempt, members)
    if world.coordinator == 1:
        orphan = _with_late(after_it._replace(coordinator=2), EpochOpened(attempt.epoch + 1, 1))
        if is_whole:
            orphan = _with_late(orphan, RefitLanded(attempt.epoch, attempt.version))
        yield "coordinator is replaced", orphan


def _with_late(world: World, event: Event) -> World:
    """The last words of a coordinator are late whatever else is."""
    return world._replace(in_flight=world.in_flight | {_number(event)})


def _recover(world: World, attempt: Attempt, survivors: list[Shard]) -> Iterator[Move]:
    alive = tuple(shard.id for shard in survivors)
    words: list[Event] = [
        Condemned(shard, "own_fault", "its process is gone") for shard in attempt.participants if shard not in alive
    ]
    for shard in survivors:
        if shard.holds != attempt.version:
            world = _with_shard(world, shard._replace(holds=PARTIAL))
            words.append(WeightsPartial(shard.id, attempt.epoch, attempt.version))
    for broken in _said(world, *words):
        ended = broken._replace(attempt=None, num_refits=world.num_refits + 1)
        for after in _said(ended, RefitEnded(attempt.epoch, attempt.version, "budget spent")):
            yield "give up", after
        yield from _open(broken, version=attempt.version, participants=alive)


def _open(world: World, *, version: int, participants: tuple[ShardId, ...]) -> Iterator[Move]:
    epoch = world.ledger.refits.epoch + 1
    if not participants or epoch > MAX_EPOCHS:
        return
    if world.attempt is None:
        assert not set(participants) & set(absent(world.ledger)), "absent waits in a membership"
    opened = _told(world, EpochOpened(epoch, world.coordinator))
    opened = _told(opened, RefitOpened(epoch, version, participants))
    assert opened.ledger.refits.open is not None and opened.ledger.refits.open.epoch == epoch
    yield f"open epoch {epoch} for {participants}", opened._replace(attempt=Attempt(epoch, version, participants))


def _explore(world: World) -> tuple[int, set[tuple[str, ...]]]:
    """Visit every reachable world; how many there are, and which fleets were seen in the ledger."""
    seen = {world.key()}
    fleets = set()
    path: dict[str, tuple[str, str]] = {}
    frontier = [world]
    while frontier:
        here = frontier.pop()
        fleets.add(tuple(sorted(record.state.name for record in _records(here.ledger))))
        try:
            moves = list(_moves(here))
        except AssertionError as error:
            raise AssertionError(f"{error}, after: {'; '.join(_way(path, here.key()))}") from error
        fresh = {there.key(): (label, there) for label, there in moves if there.key() not in seen}
        seen.update(fresh)
        path.update({key: (here.key(), label) for key, (label, _) in fresh.items()})
        frontier.extend(there for _, there in fresh.values())
    return len(seen), fleets


def _way(path: dict[str, tuple[str, str]], key: str) -> list[str]:
    steps: list[str] = []
    while key in path:
        key, label = path[key]
        steps.append(label)
    return steps[::-1]


@pytest.mark.parametrize(
    ("max_crashes", "max_late", "coordinator", "late"),
    [
        pytest.param(2, 1, 2, (), id="two crashes and a late message"),
        pytest.param(1, 2, 2, (), id="one crash and two late messages"),
        pytest.param(1, 1, 1, (), id="one crash, a late message and a replaced coordinator"),
        pytest.param(1, 0, 2, (RequestFailed(S0, "shard"), ProbeOk(S0), Retired(S1)), id="suspicion and retirement"),
    ],
)
def test_no_order_of_a_small_world_makes_the_ledger_lie(
    max_crashes: int, max_late: int, coordinator: int, late: tuple[Event, ...]
) -> None:
    world = _beginning(*late, max_crashes=max_crashes, max_late=max_late)._replace(coordinator=coordinator)
    num_worlds, fleets = _explore(world)
    assert num_worlds > 1000
    assert {("HEALTHY", "HEALTHY", "HEALTHY"), ("DEAD", "HEALTHY", "HEALTHY")} <= fleets


def _lands_without_commit(record: ShardRecord, refit: OpenRefit) -> bool:
    return record.id in refit.participants and not record.is_draining


def _lands_without_taking_part(record: ShardRecord, refit: OpenRefit) -> bool:
    return record.version == refit.version and not record.is_draining


def _lands_by_seat(record: ShardRecord, refit: OpenRefit) -> bool:
    return record.id.index in {shard.index for shard in refit.participants}


@pytest.mark.parametrize("bug", [_lands_without_commit, _lands_without_taking_part, _lands_by_seat])
def test_the_search_finds_a_ledger_that_promotes_too_many(
    bug: Callable[[ShardRecord, OpenRefit], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_refit.core.ledger_refits._holds", bug)
    with pytest.raises(AssertionError, match=r"was promoted|serving without"):
        _explore(_beginning(max_crashes=1, max_late=2)._replace(coordinator=2))
