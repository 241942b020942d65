"""What is the nccl communicator's own, over the stand-in for libnccl. Ranks are processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_refit.communicators.nccl import NcclBackend, Patience
from elastic_refit.communicators.rank_processes import RankProcess, content, digest, form_group, make_specs
from elastic_refit.errors import (
    CommunicatorAborted,
    CommunicatorError,
    ConfigError,
    ContextLost,
    PeerLost,
    RendezvousFailed,
    VersionMismatch,
)
from tests.standin_nccl.host_memory import HostMemory
from tests.standin_nccl.library import environment
from tests.standin_nccl.seat import NcclSeat, NotedChange
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
SIZE = 16 << 20
DEADLINE_S = 40.0


class Ranks:
    """Starts ranks, and knows what all of them asked the library for.

    ``noted`` leaves out two things: ``init``, and ``work``, which is a stream that has come to an operation.
    """

    def __init__(self, libnccl: Path, folder: Path) -> None:
        self._libnccl = libnccl
        self._log = folder / "calls"
        self._started: list[RankProcess] = []

    def start(self, count: int, switches: dict[str, str] | None = None, **options: Any) -> list[RankProcess]:
        with environment(self._libnccl, LOG=str(self._log), **(switches or {})):
            fresh = [RankProcess("nccl", seat=NcclSeat, device=HostMemory(), **options) for _ in range(count)]
        self._started += fresh
        return fresh

    def noted(self) -> list[str]:
        return [line for line in self._lines() if line not in ("init", "work")]

    def count(self, call: str) -> int:
        return self._lines().count(call)

    def _lines(self) -> list[str]:
        return self._log.read_text().splitlines() if self._log.exists() else []

    def stop(self) -> None:
        for rank in self._started:
            rank.stop()


@pytest.fixture
def ranks(libnccl: Path, tmp_path: Path) -> Iterator[Ranks]:
    ranks = Ranks(libnccl, tmp_path)
    yield ranks
    ranks.stop()


def until(condition: Callable[[], bool]) -> None:
    wait_until(condition, timeout_s=DEADLINE_S)


def start_all(group: list[RankProcess], verb: str, *arguments: object) -> None:
    for rank in group:
        rank.start(verb, *arguments)


def waits(*ranks: RankProcess) -> bool:
    return all(rank.aside("status")["waiting_on"] != ("none", None) for rank in ranks)


# Aborts


def test_an_aborted_operation_that_nccl_calls_a_success_is_an_abort(ranks: Ranks) -> None:
    group = ranks.start(3)
    form_group(group)
    start_all(group[:2], "broadcast_and_look", SIZE, 0)
    until(lambda: ranks.count("work") == 2 and group[1].aside("arrived") > 0)
    group[1].aside("abort", "enough")
    ending, arrived = group[1].finish()
    assert ending == "CommunicatorAborted"
    assert 0 < arrived < SIZE
    assert group[0].finish()[0] == "PeerLost"
    until(lambda: ranks.count("abort 1") == 2)


def test_however_often_it_is_aborted_and_closed_nccl_hears_of_it_once(ranks: Ranks) -> None:
    group = ranks.start(2)
    form_group(group)
    group[0].start("broadcast", SIZE, 1, 0)
    until(lambda: waits(group[0]))
    group[0].aside("abort", "enough", threads=8)
    group[0].aside("abort", "enough", threads=8)
    with pytest.raises(CommunicatorAborted):
        group[0].finish()
    group[0].call("close_twice")
    with pytest.raises(PeerLost):
        group[1].call("broadcast", SIZE, 1, 0)
    group[1].call("abort", "and this one")
    group[1].call("close_twice")
    until(lambda: all(rank.call("status")["reclaimed_s"] is not None for rank in group))
    assert [line for line in ranks.noted() if line != "mint"] == ["abort 1", "abort 1"]


def test_parts_are_aborted_with_their_group_in_one_call(ranks: Ranks) -> None:
    group = ranks.start(3)
    form_group(group)
    start_all(group, "split", 0, 0)
    assert [rank.finish() for rank in group] == [(0, 3), (1, 3), (2, 3)]
    group[0].start("broadcast_and_look", SIZE, 0)
    until(lambda: waits(group[0]))
    group[0].aside("abort", "the whole")
    assert group[0].finish()[0] == "CommunicatorAborted"
    until(lambda: ranks.noted() == ["mint", "split", "split", "split", "abort 2"])


def test_an_abort_frees_an_init_and_a_split_that_nccl_never_finishes(ranks: Ranks) -> None:
    """In the first the unique id is out; in the second NCCL may still fill the child."""
    group = [*ranks.start(1, {"STALL": "init"}), *ranks.start(1, {"STALL": "split"})]
    specs = make_specs([rank.call("bind") for rank in group])
    for rank, spec in zip(group, specs, strict=True):
        rank.start("join", spec, DEADLINE_S)
    until(lambda: ranks.count("init") == 2)
    assert not group[0].is_finished()
    group[0].aside("abort", "too slow")
    with pytest.raises(CommunicatorAborted, match="too slow"):
        group[0].finish()
    with pytest.raises(PeerLost):
        group[1].finish()
    group[0] = ranks.start(1)[0]
    form_group(group, epoch=2)
    start_all(group, "split", 0, 0)
    until(lambda: ranks.count("split") == 2)
    group[1].aside("abort", "too slow")
    with pytest.raises(CommunicatorAborted, match="too slow"):
        group[1].finish()
    with pytest.raises(PeerLost):
        group[0].finish()
    until(lambda: sorted(ranks.noted()) == [*["abort 1"] * 4, *["mint"] * 2, *["split"] * 2])


def test_a_reclaim_that_hangs_on_a_frozen_peer_is_reported_and_ends_with_the_peer(ranks: Ranks) -> None:
    group = ranks.start(3, {"RECLAIM_WAITS": "1"}, patience=Patience(reclaim_s=0.2))
    form_group(group)
    group[2].freeze()
    start_all(group[:2], "broadcast_and_look", SIZE, 0)
    until(lambda: waits(*group[:2]))
    for rank in group[:2]:
        rank.aside("abort", "shard[2] is frozen")
        assert rank.finish()[0] in ("CommunicatorAborted", "PeerLost")
        assert rank.call("status")["released_s"] is not None
    until(lambda: all(rank.call("is_reclaim_overdue") for rank in group[:2]))
    assert [rank.call("status")["reclaimed_s"] for rank in group[:2]] == [None, None]
    group[2].kill()
    until(lambda: all(rank.call("status")["reclaimed_s"] is not None for rank in group[:2]))
    assert not any(rank.call("is_reclaim_overdue") for rank in group[:2])


def test_work_that_outlives_its_abort_is_a_lost_context(ranks: Ranks) -> None:
    group = [*ranks.start(1, {"ORPHANS": "1"}, patience=Patience(drain_s=0.2)), *ranks.start(1)]
    form_group(group)
    group[0].start("broadcast", SIZE, 0, 1)
    until(lambda: ranks.count("work") == 1)
    group[0].aside("abort", "enough")
    with pytest.raises(ContextLost, match="still on the device"):
        group[0].finish()
    with pytest.raises(PeerLost):
        group[1].call("broadcast", SIZE, 0, 1)


# Peers


def test_a_group_whose_ranks_load_different_versions_says_who_has_which_and_asks_nccl_for_nothing(
    ranks: Ranks,
) -> None:
    group = [*ranks.start(2), *ranks.start(1, {"VERSION": "22907"})]
    specs = make_specs([rank.call("bind") for rank in group])
    for rank, spec in zip(group, specs, strict=True):
        rank.start("join", spec, DEADLINE_S)
    expected = r"2\.30\.7 on rank 0 \(shard\[0\]/0\), rank 1 \(shard\[1\]/0\); 2\.29\.7 on rank 2 \(shard\[2\]/0\)"
    for rank in group:
        with pytest.raises(VersionMismatch, match=expected) as raised:
            rank.finish()
        assert raised.value.versions == ("2.30.7", "2.30.7", "2.29.7")
    assert ranks.noted() == []


def test_ranks_with_different_chunks_are_told_so(ranks: Ranks) -> None:
    group = [*ranks.start(1, chunk_bytes=1024), *ranks.start(1, chunk_bytes=2048)]
    specs = make_specs([rank.call("bind") for rank in group])
    group[1].start("join", specs[1], DEADLINE_S)
    with pytest.raises(CommunicatorError, match="same chunk_bytes: 1024 on rank 0"):
        group[0].call("join", specs[0], DEADLINE_S)
    with pytest.raises(CommunicatorError, match="same chunk_bytes"):
        group[1].finish()


def test_no_unique_id_is_made_before_everybody_has_come(ranks: Ranks) -> None:
    group = ranks.start(3)
    specs = make_specs([rank.call("bind") for rank in group])
    for rank, spec in zip(group[:2], specs, strict=False):
        rank.start("join", spec, 0.5)
    for rank in group[:2]:
        with pytest.raises((RendezvousFailed, PeerLost)):
            rank.finish()
    assert ranks.noted() == []


def test_an_init_that_nccl_does_not_finish_ends_with_the_time_for_the_rendezvous(ranks: Ranks) -> None:
    group = [*ranks.start(1), *ranks.start(1, {"STALL": "init"})]
    specs = make_specs([rank.call("bind") for rank in group])
    group[1].start("join", specs[1], DEADLINE_S)
    with pytest.raises(RendezvousFailed, match="whole group did not come together"):
        group[0].call("join", specs[0], 3.0)
    with pytest.raises(PeerLost):
        group[1].finish()


def test_a_remote_error_of_nccl_is_the_loss_of_the_peer_that_the_ring_lost(ranks: Ranks) -> None:
    group = ranks.start(2, {"REMOTE_ERRORS": "1"})
    form_group(group)
    group[0].start("broadcast", SIZE, 0, 1)
    until(lambda: ranks.count("work") == 1)
    group[1].kill()
    with pytest.raises(PeerLost) as lost:
        group[0].finish()
    assert lost.value.peer == 1


def test_a_call_that_nccl_refuses_is_an_error_of_the_communicator_and_the_peers_are_told(ranks: Ranks) -> None:
    group = [*ranks.start(1, {"REFUSE": "1"}), *ranks.start(1)]
    form_group(group)
    group[1].start("broadcast", SIZE, 0, 0)
    with pytest.raises(CommunicatorError, match=r"NCCL failed in epoch 1: .*system error"):
        group[0].call("broadcast", SIZE, 0, 0)
    with pytest.raises(PeerLost):
        group[1].finish()


def test_work_of_the_callers_own_is_waited_for_only_so_long(ranks: Ranks) -> None:
    group = ranks.start(2)
    form_group(group)
    group[0].start("sync_foreign_work", 1, DEADLINE_S)
    group[1].call("exchange", [("send", 0, 8)])
    group[0].finish()
    with pytest.raises(CommunicatorError, match=r"not done within 0\.1 s"):
        group[0].call("sync_foreign_work", 1, 0.1)
    with pytest.raises(PeerLost):
        group[1].call("broadcast", SIZE, 0, 0)


def test_another_way_to_change_the_membership_is_asked_to_form_each_group_and_to_let_go_of_it(ranks: Ranks) -> None:
    group = ranks.start(2, membership=NotedChange())
    for epoch in (1, 2):
        form_group(group, epoch=epoch)
        for rank in group:
            rank.call("abort", "over")
        until(lambda: all(rank.call("status")["reclaimed_s"] is not None for rank in group))
    assert ranks.count("form") == ranks.count("let go") == ranks.count("abort 1") == 4


# Ends of life


def test_a_group_that_ends_well_is_flushed_and_destroyed_and_never_aborted(ranks: Ranks) -> None:
    group = ranks.start(2)
    form_group(group)
    start_all(group, "broadcast", 5, 0, 1)
    assert [rank.finish() for rank in group] == [digest(content(5, 1))] * 2
    for rank in group:
        rank.call("close")
    until(lambda: sorted(ranks.noted()) == ["destroy", "destroy", "finalize", "finalize", "mint"])


def test_a_group_that_failed_is_neither_finalized_nor_destroyed(ranks: Ranks) -> None:
    group = ranks.start(2)
    form_group(group)
    group[1].kill()
    with pytest.raises(PeerLost):
        group[0].call("broadcast", SIZE, 0, 1)
    group[0].call("close")
    until(lambda: ranks.noted() == ["mint", "abort 1"])


def test_whoever_closes_alone_goes_after_a_while_and_is_lost_to_the_others(ranks: Ranks) -> None:
    group = ranks.start(2, patience=Patience(close_s=0.2))
    form_group(group)
    group[1].start("broadcast", SIZE, 0, 1)
    group[0].call("close")
    with pytest.raises(PeerLost):
        group[1].finish()
    until(lambda: sorted(ranks.noted()) == ["abort 1", "abort 1", "finalize", "mint"])


# What is around it


@pytest.mark.parametrize("forced", ["1", "yes"])
def test_an_environment_that_makes_nccl_block_is_refused(monkeypatch: pytest.MonkeyPatch, forced: str) -> None:
    monkeypatch.setenv("NCCL_COMM_BLOCKING", forced)
    with pytest.raises(ConfigError, match=f"NCCL_COMM_BLOCKING={forced}.*unset it"):
        NcclBackend(device=HostMemory()).bind()


def test_a_version_that_cannot_abort_a_family_at_once_is_refused(ranks: Ranks) -> None:
    (rank,) = ranks.start(1, {"VERSION": "22100"})
    with pytest.raises(ConfigError, match=r"NCCL 2\.21\.0 is too old: 2\.22\.0 is needed"):
        rank.call("bind")


def run_on_stand_in(libnccl: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    with environment(libnccl):
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=60)


def test_the_stand_in_ends_a_process_that_aborts_twice(libnccl: Path) -> None:
    """Else the test above that counts aborts would prove little."""
    code = """
from nccl.bindings import nccl
config = nccl.Config()
config.blocking = 0
comm = nccl.comm_init_rank_config(1, nccl.get_unique_id().ptr, 0, config.ptr)
nccl.comm_abort(comm)
nccl.comm_abort(comm)
"""
    result = run_on_stand_in(libnccl, code)
    assert result.returncode == -signal.SIGABRT
    assert "ncclCommAbort on a communicator that was freed" in result.stderr


@pytest.mark.parametrize(("split_share", "freed"), [("0", "False"), ("1", "True")])
def test_on_the_stand_in_a_childs_work_ends_with_its_parent_only_where_they_share(
    libnccl: Path, split_share: str, freed: str
) -> None:
    """Two ranks in one process; the child's rank 0 waits for bytes that never come while its parent is aborted."""
    code = """
import sys, time
from nccl.bindings import nccl
from tests.standin_nccl.host_memory import HostMemory

config, unique = nccl.Config(), nccl.get_unique_id()
config.blocking, config.split_share = 0, int(sys.argv[1])

def settle(*comms):
    while any(nccl.comm_get_async_error(comm) == nccl.Result.InProgress for comm in comms):
        time.sleep(0.001)

parents = [nccl.comm_init_rank_config(2, unique.ptr, rank, config.ptr) for rank in range(2)]
settle(*parents)
children = [nccl.comm_split(parent, 0, 0, config.ptr) for parent in parents]
settle(*parents, *children)
stream, buffer = HostMemory().open_stream(), bytearray(8)
region = HostMemory().locate(memoryview(buffer), is_written=True)
nccl.recv(region.pointer, 8, nccl.DataType.Uint8, 1, children[0], stream.handle)
settle(children[0])
event = stream.record()
nccl.comm_abort(parents[0])
deadline = time.monotonic() + (30.0 if config.split_share else 0.3)
while not event.is_done() and time.monotonic() < deadline:
    time.sleep(0.001)
print(event.is_done())
"""
    assert run_on_stand_in(libnccl, code, split_share).stdout.split() == [freed]
