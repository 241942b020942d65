"""The ledger actor with real Ray: its process is killed while events stream in, and what was acknowledged stays."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
from ray.actor import ActorHandle

from elastic_refit.actors.ledger import ShardLedger, ledger_actor
from elastic_refit.actors.ledger_client import LedgerClient
from elastic_refit.core.events import (
    ActorDied,
    Entry,
    Event,
    ProbeFailed,
    ProbeOk,
    Registered,
    RequestFailed,
    RequestSucceeded,
)
from elastic_refit.core.ids import ShardId
from elastic_refit.core.ledger_queries import snapshot
from elastic_refit.core.ledger_state import LedgerPolicy
from elastic_refit.errors import LedgerLost, NoSurvivingShards
from elastic_refit.journal import read_journal

POLICY = LedgerPolicy(max_history=4096)
LEDGER_S = 30.0


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


@pytest.fixture
def ledger(ray_cluster: None, journal: Path) -> Iterator[ActorHandle[ShardLedger]]:
    actor = ledger_actor(journal, run_id="run", policy=POLICY)
    yield actor
    ray.kill(actor)


def test_the_ledger_restores_itself_and_nothing_acknowledged_is_lost_or_applied_twice(
    ledger: ActorHandle[ShardLedger], journal: Path
) -> None:
    seed = random.randrange(2**32)
    dice = random.Random(seed)
    clients = [LedgerClient(ledger, writer=f"writer{each}", ledger_s=LEDGER_S) for each in range(2)]
    clients[0].record(*(Registered(ShardId(index)) for index in range(4)))
    acknowledged = [0, 0]
    stop = threading.Event()

    def stream(number: int) -> None:
        while not stop.is_set():
            shard = ShardId(number)
            clients[number].record(ProbeFailed(shard, "timeout", "x"), ProbeOk(shard), RequestSucceeded(ShardId(3)))
            acknowledged[number] += 3

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(4):
        _until_more_than(sum(acknowledged) + dice.randrange(30, 300), acknowledged, f"seed {seed}: events stopped")
        os.kill(_pid(ledger), signal.SIGKILL)
    _until_more_than(sum(acknowledged), acknowledged, f"seed {seed}: no event after the last kill")
    stop.set()
    for thread in threads:
        thread.join(timeout=LEDGER_S)
        assert not thread.is_alive()

    state = clients[0].state()
    numbers = {name: ranges for (name, _), (_, ranges) in state.writers.items()}
    assert numbers == {"writer0": ((0, 3 + acknowledged[0]),), "writer1": ((0, acknowledged[1] - 1),)}, seed
    kept = read_journal(journal)
    assert kept.num_entries == 4 + sum(acknowledged), seed
    assert kept.state == state, seed


def test_a_call_that_arrives_twice_applies_once(ledger: ActorHandle[ShardLedger]) -> None:
    client = LedgerClient(ledger, writer="driver", ledger_s=LEDGER_S)
    client.record(Registered(ShardId(0)))
    client.record(RequestFailed(ShardId(0), "shard"))
    repeated = client.state()
    twin = LedgerClient(ledger, writer="driver", incarnation=client.incarnation, ledger_s=LEDGER_S)
    acks = twin.record(Registered(ShardId(0)), RequestFailed(ShardId(0), "shard")).acks
    assert [ack.status for ack in acks] == ["duplicate", "duplicate"]
    assert client.state() == repeated


def test_a_frozen_ledger_is_lost_within_the_deadline_and_gets_the_events_when_it_is_back(
    ledger: ActorHandle[ShardLedger],
) -> None:
    client = LedgerClient(ledger, writer="driver", ledger_s=LEDGER_S)
    client.record(Registered(ShardId(0)))
    hasty = LedgerClient(ledger, writer="router", ledger_s=0.2)
    pid = _pid(ledger)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(LedgerLost, match=r"did not answer router within ledger_s = 0\.2 s"):
            hasty.record(RequestFailed(ShardId(0), "shard", "lost"))
        with pytest.raises(LedgerLost):
            hasty.serving()
    finally:
        os.kill(pid, signal.SIGCONT)
    _until(lambda: bool(client.suspected()), "the event that timed out never arrived")
    _until(lambda: _flushed(hasty), "the ledger does not answer after it was thawed")
    record = client.state().shards.get(0)
    assert record is not None and record.request_failures == 1


def test_the_receipt_says_when_nobody_is_left(ledger: ActorHandle[ShardLedger]) -> None:
    client = LedgerClient(ledger, writer="driver", ledger_s=LEDGER_S)
    assert client.record(Registered(ShardId(0))).exhaustion is None
    receipt = client.record(ActorDied(ShardId(0), "killed"))
    assert isinstance(receipt.exhaustion, NoSurvivingShards)
    with pytest.raises(NoSurvivingShards, match="1 DEAD"):
        client.raise_if_exhausted()
    assert client.absent() == (ShardId(0),)
    assert client.serving() == ()
    assert client.snapshot() == snapshot(client.state())


def test_a_clock_that_runs_ahead_does_not_take_the_ledger_with_it(ledger: ActorHandle[ShardLedger]) -> None:
    ahead = LedgerClient(ledger, writer="skewed", ledger_s=LEDGER_S, clock=lambda: time.time() + 3600)
    ahead.record(Registered(ShardId(0)))
    assert ahead.state().now_s <= time.time()


def test_a_journal_of_another_run_stops_the_ledger_by_name(ledger: ActorHandle[ShardLedger], journal: Path) -> None:
    LedgerClient(ledger, writer="driver", ledger_s=LEDGER_S).record(Registered(ShardId(0)))
    ray.kill(ledger)
    other = LedgerClient(ledger_actor(journal, run_id="other", policy=POLICY), writer="driver", ledger_s=LEDGER_S)
    with pytest.raises(LedgerLost, match="is the journal of run 'run', not of 'other'"):
        other.serving()


def test_a_ledger_compacts_its_journal_and_goes_on_when_it_cannot(
    journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_refit.actors.ledger.COMPACT_BYTES", 1000)
    ledger = ShardLedger(str(journal), "run", POLICY)
    sizes = [_record(ledger, seq, journal) for seq in range(30)]
    assert min(sizes[10:]) < max(sizes[:10]) < 8000
    journal.with_name(f"{journal.name}.new").mkdir()
    sizes = [_record(ledger, seq, journal) for seq in range(30, 60)]
    assert sizes == sorted(sizes)
    assert read_journal(journal).state == ledger.state()
    ledger._journal.close()


def test_a_client_cannot_be_sent_to_another_process(ledger: ActorHandle[ShardLedger]) -> None:
    client = LedgerClient(ledger, writer="driver", ledger_s=LEDGER_S)
    with pytest.raises(TypeError, match="make another client"):
        ray.put(client)


def _record(ledger: ShardLedger, seq: int, journal: Path) -> int:
    event: Event = RequestSucceeded(ShardId(0)) if seq else Registered(ShardId(0))
    assert [ack.status for ack in ledger.record((Entry("driver", 0, seq, 1.0, event),)).acks] == ["applied"]
    return journal.stat().st_size


def _pid(ledger: ActorHandle[ShardLedger]) -> int:
    pid: object = ray.get(ledger.__ray_call__.remote(lambda _: os.getpid()), timeout=LEDGER_S)
    assert isinstance(pid, int)
    return pid


def _flushed(client: LedgerClient) -> bool:
    try:
        client.record()
    except LedgerLost:
        return False
    return True


def _until_more_than(num_events: int, acknowledged: list[int], what: str) -> None:
    _until(lambda: sum(acknowledged) > num_events, what)


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LEDGER_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
