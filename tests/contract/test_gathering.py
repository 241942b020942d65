"""Trainers that gather from each other: none holds a tensor whole, none waits for ever, a retry finds them in step."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from elastic_refit.chaos import Fault
from elastic_refit.core.evidence import Testimony
from elastic_refit.core.ids import ShardId, TrainerId
from elastic_refit.core.messages import PingOrder
from elastic_refit.errors import CommunicatorAborted, PeerLost
from elastic_refit.matrix.gathering import Exchange, GatheredWeights
from tests.refit_group import Group, Weights
from tests.waiting import wait_until

DEADLINE_S = 30.0
SECRET = b"of one test"


def _exchanges(count: int, *, patience_s: float = DEADLINE_S) -> list[Exchange]:
    exchanges = [Exchange(rank, secret=SECRET, patience_s=patience_s) for rank in range(count)]
    addresses = [exchange.address for exchange in exchanges]
    with ThreadPoolExecutor(max_workers=count) as threads:
        list(threads.map(lambda exchange: exchange.meet(addresses), exchanges))
    return exchanges


@pytest.fixture
def pair() -> Iterator[list[Exchange]]:
    exchanges = _exchanges(2)
    yield exchanges
    for exchange in exchanges:
        exchange.close()


def _sources(
    exchanges: Sequence[Exchange], whole: Mapping[str, torch.Tensor], version: int = 1
) -> list[GatheredWeights]:
    return [GatheredWeights(exchange, version, whole) for exchange in exchanges]


def test_every_rank_gets_the_whole_of_what_none_of_them_holds() -> None:
    whole = {
        "wide": torch.arange(1001, dtype=torch.float32).reshape(7, 143),
        "odd": torch.arange(5, dtype=torch.bfloat16),
        "one": torch.tensor(3, dtype=torch.int64),
        "none": torch.empty(0),
    }
    exchanges = _exchanges(3)
    with ThreadPoolExecutor(max_workers=3) as threads:
        found = list(threads.map(lambda source: source.materialize(list(whole)), _sources(exchanges, whole)))
    for tensors in found:
        assert all(torch.equal(tensors[name], tensor) for name, tensor in whole.items())
    for exchange in exchanges:
        exchange.close()


def test_who_comes_first_waits_until_it_is_aborted_and_again_until_it_is_restarted(pair: list[Exchange]) -> None:
    first, second = _sources(pair, {"w": torch.arange(9)})
    with ThreadPoolExecutor(max_workers=2) as threads:
        waiting = threads.submit(first.materialize, ["w"])
        first.abort("a test")
        with pytest.raises(CommunicatorAborted, match="a test"):
            waiting.result(timeout=DEADLINE_S)
        with pytest.raises(CommunicatorAborted, match="a test"):
            first.materialize(["w"])
        first.restart()
        both = [threads.submit(source.materialize, ["w"]) for source in (first, second)]
        assert all(torch.equal(each.result(timeout=DEADLINE_S)["w"], torch.arange(9)) for each in both)


def test_nobody_waits_longer_than_its_patience_nor_for_a_rank_that_is_gone() -> None:
    first, second = _exchanges(2, patience_s=0.05)
    source = GatheredWeights(first, 1, {"w": torch.arange(9)})
    with pytest.raises(CommunicatorAborted, match="rank 1 did not come"):
        source.materialize(["w"])
    second.close()
    first.close()


def test_parts_of_an_older_version_are_not_taken_for_those_of_a_newer_one(pair: list[Exchange]) -> None:
    old = _sources(pair, {"w": torch.zeros(9)}, version=1)
    new = _sources(pair, {"w": torch.ones(9)}, version=2)
    with ThreadPoolExecutor(max_workers=2) as threads:
        ahead = threads.submit(old[0].materialize, ["w"])
        pair[0].abort("v1 is over")
        assert isinstance(ahead.exception(timeout=DEADLINE_S), CommunicatorAborted)
        pair[0].restart()
        found = [threads.submit(source.materialize, ["w"]) for source in new]
        assert all(torch.equal(each.result(timeout=DEADLINE_S)["w"], torch.ones(9)) for each in found)


@pytest.fixture
def group(pair: list[Exchange]) -> Iterator[Group]:
    """Two trainers that gather from each other, and three shards. ``may_come`` holds the second trainer back at w5."""
    group = Group(3, trainers=2, chaos=())
    whole = Weights(1)
    group.weights = whole
    group.sources = {
        TrainerId(0): GatheredWeights(pair[0], 1, whole.tensors),
        TrainerId(1): HeldBack(pair[1], 1, whole.tensors),
    }
    yield group
    group.close()


class HeldBack(GatheredWeights):
    """A rank that comes to gather w5 only when it may."""

    def __init__(self, exchange: Exchange, version: int, whole: Mapping[str, torch.Tensor]) -> None:
        super().__init__(exchange, version, whole)
        self.may_come = threading.Event()
        self.may_come.set()

    def materialize(self, names: Sequence[str]) -> Mapping[str, torch.Tensor]:
        if "w5" in names:
            assert self.may_come.wait(DEADLINE_S)
        return super().materialize(names)


def test_a_refit_that_breaks_while_trainers_gather_frees_both_and_the_retry_lands(group: Group) -> None:
    group.arm(Fault("raise", ShardId(0), 1, "bucket:2"))
    answers, _ = group.transfer(group.build(1, [0, 1, 2]), 1)
    assert all(isinstance(answers[trainer], Testimony) for trainer in group.trainers), answers
    start = 1 + min(group.settle(ShardId(shard), 1).applied_through for shard in (1, 2))
    group.refit(1, epoch=2, shards=[1, 2], start=start)
    assert group.holds_all(1)
    assert group.holds_all(2)


def test_a_trainer_that_waits_for_the_others_parts_says_so_and_is_freed_by_an_abort(group: Group) -> None:
    late = group.sources[TrainerId(1)]
    assert isinstance(late, HeldBack)
    late.may_come.clear()
    with ThreadPoolExecutor(max_workers=1) as thread:
        attempt = thread.submit(group.transfer, group.build(1, [0, 1, 2]), 1)
        wait_until(lambda: _waits_for_source(group, TrainerId(0)), DEADLINE_S)
        group.settle(TrainerId(0), 1)
        assert not attempt.done(), "the other one is still held back"
        late.may_come.set()
        group.settle(TrainerId(1), 1)  # it may have gone on to the next, for which the other one will not come
        answers, _ = attempt.result(timeout=DEADLINE_S)
    assert isinstance(answers[TrainerId(0)], Testimony)
    start = 1 + min(group.settle(ShardId(shard), 1).applied_through for shard in range(3))
    group.refit(1, epoch=2, shards=[0, 1, 2], start=start)
    assert group.holds_all(0)


def _waits_for_source(group: Group, trainer: TrainerId) -> bool:
    beacon = group.members[trainer].ping(PingOrder(0)).beacon
    return (beacon.phase, beacon.waiting_on) == ("packing", "source")


def test_a_rank_that_is_gone_is_lost_at_once(pair: list[Exchange]) -> None:
    source = GatheredWeights(pair[0], 1, {"w": torch.arange(9)})
    with ThreadPoolExecutor(max_workers=1) as thread:
        waiting = thread.submit(source.materialize, ["w"])
        pair[1].close()
        assert isinstance(waiting.exception(timeout=DEADLINE_S), PeerLost)


def test_a_rank_that_is_ahead_may_have_given_the_same_tensor_twice(
    pair: list[Exchange], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does for a tensor that lies in two buckets."""
    whole = {"wide": torch.arange(64, dtype=torch.float32)}
    ahead, behind = _sources(pair, whole)
    given: list[bytes] = []
    is_over, outbox = pair[1]._is_over, pair[0]._outboxes[1]

    def put(part: bytes) -> None:
        outbox.put(part)
        given.append(part)

    monkeypatch.setitem(pair[0]._outboxes, 1, SimpleNamespace(put=put))
    monkeypatch.setattr(pair[1], "_is_over", lambda keys: is_over(keys) and len(given) > 1)
    with ThreadPoolExecutor(max_workers=1) as thread:
        gone_ahead = thread.submit(lambda: [ahead.materialize(["wide"]) for _ in range(2)])
        found = [behind.materialize(["wide"]) for _ in range(2)]
        found += gone_ahead.result(timeout=DEADLINE_S)
    assert all(torch.equal(tensors["wide"], whole["wide"]) for tensors in found)
