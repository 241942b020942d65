"""What every communicator must do, with real processes. One parameter per implementation.

Chunks are 64 KiB here, so that a few hundred KiB are several of them; one megabyte per rank is more than the system
buffers between two ranks, so whoever sends more than a few of them to a frozen peer is blocked.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from elastic_refit.communicators.rank_processes import RankProcess, content, digest, form_group, make_specs
from elastic_refit.errors import CommunicatorAborted, CommunicatorError, PeerLost, RendezvousFailed
from tests.standin_nccl.host_memory import HostMemory
from tests.standin_nccl.library import environment

CHUNK = 64 << 10
LARGE = 32 << 20
DEADLINE_S = 40.0

Ranks = Callable[[int], list[RankProcess]]


IMPLEMENTATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "tcp over unix sockets": ("tcp", {"chunk_bytes": CHUNK}),
    "tcp over loopback": ("tcp", {"chunk_bytes": CHUNK, "use_unix": False}),
    "nccl on a stand-in": ("nccl", {"chunk_bytes": CHUNK, "device": HostMemory()}),
}


@pytest.fixture(scope="module", params=IMPLEMENTATIONS)
def pool(request: pytest.FixtureRequest) -> Iterator[tuple[str, list[RankProcess]]]:
    processes: list[RankProcess] = []
    yield request.param, processes
    for process in processes:
        process.stop()


@pytest.fixture
def backend(pool: tuple[str, list[RankProcess]]) -> str:
    return IMPLEMENTATIONS[pool[0]][0]


@pytest.fixture
def large(backend: str) -> int:
    """More than lies between the ranks; every chunk of the stand-in's is a call."""
    return LARGE if backend == "tcp" else LARGE // 8


@pytest.fixture
def ranks(pool: tuple[str, list[RankProcess]], request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Processes that are free: those of earlier tests, less the ones that were killed or are still busy."""
    implementation, processes = pool
    backend, options = IMPLEMENTATIONS[implementation]
    lent: list[RankProcess] = []

    def lend(count: int) -> list[RankProcess]:
        with environment(request.getfixturevalue("libnccl")) if backend == "nccl" else nullcontext():
            while len(processes) < len(lent) + count:
                processes.append(RankProcess(backend, **options))
        fresh = processes[len(lent) : len(lent) + count]
        lent.extend(fresh)
        return fresh

    yield lend
    for process in lent:
        if not _retire(process):
            process.stop()
            processes.remove(process)


def _retire(process: RankProcess) -> bool:
    """Close what the test left open; whether the process can be used again."""
    if not process.is_alive() or process.is_busy:
        return False
    while process.call("close"):
        pass
    return True


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.002)


def waits(*ranks: RankProcess) -> bool:
    """Whether each is inside a call and waits for somebody."""
    return all(rank.aside("status")["waiting_on"] != ("none", None) for rank in ranks)


def start_all(group: list[RankProcess], verb: str, *arguments: object, **options: object) -> None:
    for rank in group:
        rank.start(verb, *arguments, **options)


def call_all(group: list[RankProcess], verb: str, *arguments: object, **options: object) -> list[object]:
    start_all(group, verb, *arguments, **options)
    return [rank.finish() for rank in group]


def lost_or_aborted(rank: RankProcess) -> CommunicatorError:
    """What the call in progress ended with; it must not have ended well."""
    with pytest.raises((PeerLost, CommunicatorAborted)) as raised:
        rank.finish()
    return raised.value


# Bytes


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_a_broadcast_gives_every_rank_the_bytes_of_any_root(ranks: Ranks, world_size: int) -> None:
    group = ranks(world_size)
    form_group(group)
    sizes = [0, 1, 15, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5]
    for root in {0, 1, world_size // 2, world_size - 1}:
        for size in sizes:
            expected = digest(content(size, seed=size + root))
            assert set(call_all(group, "broadcast", size, root, size + root)) == {expected}


def test_a_broadcast_larger_than_every_buffer_arrives_whole(ranks: Ranks, large: int) -> None:
    group = ranks(4)
    form_group(group)
    assert set(call_all(group, "broadcast", large, 2, 7, repeat=2)) == {digest(content(large, 7))}


@pytest.mark.parametrize("form", ["B", "h", "f", "d"])
def test_a_buffer_of_any_type_is_its_bytes(ranks: Ranks, form: str) -> None:
    group = ranks(3)
    form_group(group)
    assert set(call_all(group, "broadcast", CHUNK * 2, 1, 3, form=form)) == {digest(content(CHUNK * 2, 3))}


def test_a_group_of_one_has_nothing_to_wait_for(ranks: Ranks) -> None:
    group = ranks(1)
    form_group(group)
    assert group[0].call("broadcast", CHUNK, 0, 5) == digest(content(CHUNK, 5))
    assert group[0].call("split", 0, 0) == (0, 1)
    assert group[0].call("broadcast", 0, 0, 5) == digest(b"")


def test_progress_is_reported_for_each_chunk_and_before_it_is_passed_on(ranks: Ranks) -> None:
    group = ranks(3)
    form_group(group)
    total = 3 * CHUNK + 1
    reports = call_all(group, "broadcast_progress", total, 0)
    assert reports == [[(CHUNK, total), (2 * CHUNK, total), (3 * CHUNK, total), (total, total)]] * 3
    group[1].start("broadcast_progress", total, 0, fail_at=CHUNK)
    start_all([group[0], group[2]], "broadcast_progress", total, 0)
    with pytest.raises(ZeroDivisionError):
        group[1].finish()
    assert lost_or_aborted(group[2]).peer == 1
    with pytest.raises(CommunicatorError, match="ZeroDivisionError in the middle of a call"):
        group[1].call("wait")


@pytest.mark.parametrize("size", [0, 1, CHUNK + 1, LARGE // 4])
def test_every_pair_exchanges_in_one_group_without_deadlock(ranks: Ranks, size: int) -> None:
    group = ranks(3)
    form_group(group)
    for me, rank in enumerate(group):
        peers = [peer for peer in range(3) if peer != me]
        rank.start("exchange", [("send", peer, size) for peer in peers] + [("recv", peer, size) for peer in peers])
    for me, rank in enumerate(group):
        assert rank.finish() == [digest(content(size, peer + size)) for peer in range(3) if peer != me]


def test_messages_between_two_ranks_keep_their_order(ranks: Ranks) -> None:
    group = ranks(3)
    form_group(group)
    sizes = [3, 0, CHUNK * 2, 1]
    group[0].start("exchange", [("send", 2, size) for size in sizes])
    group[2].start("exchange", [("recv", 0, size) for size in sizes], is_grouped=False)
    group[0].finish()
    assert group[2].finish() == [digest(content(size, size)) for size in sizes]


def test_a_send_reaches_a_rank_that_is_busy_receiving_from_another(ranks: Ranks) -> None:
    group = ranks(4)
    form_group(group)
    group[3].start("exchange", [("recv", 1, 4), ("recv", 0, 4)], is_grouped=False)
    group[1].start("exchange", [("recv", 0, 4), ("send", 3, 4)], is_grouped=False)
    until(lambda: waits(group[3]))
    assert group[3].aside("status")["waiting_on"] == ("recv", 1)
    group[0].call("exchange", [("send", 3, 4), ("send", 1, 4)])
    assert group[1].finish() == [digest(content(4, 4))]
    assert group[3].finish() == [digest(content(4, 5)), digest(content(4, 4))]


def test_a_split_forms_parts_ordered_by_key_and_leaves_out_who_has_no_color(ranks: Ranks) -> None:
    group = ranks(5)
    form_group(group)
    colors = [0, 1, None, 0, 0]
    for number, color in enumerate(colors):
        group[number].start("split", color, -number)
    assert [rank.finish() for rank in group] == [(2, 3), (0, 1), None, (1, 3), (0, 3)]
    part = [group[4], group[3], group[0]]
    assert set(call_all(part, "broadcast", CHUNK + 3, 1, 9)) == {digest(content(CHUNK + 3, 9))}
    for rank, key in zip(part, (0, 1, 2), strict=True):
        rank.start("split", key // 2, key)
    assert [rank.finish() for rank in part] == [(0, 2), (1, 2), (0, 1)]
    assert set(call_all(part[:2], "broadcast", 10, 1, 9)) == {digest(content(10, 9))}


def test_the_group_goes_on_after_its_parts_were_closed(ranks: Ranks) -> None:
    group = ranks(3)
    form_group(group)
    for cycle in range(3):
        assert list(call_all(group, "split", 0, cycle)) == [(0, 3), (1, 3), (2, 3)]
        call_all(group, "close")
        assert set(call_all(group, "broadcast", 10, 1, cycle)) == {digest(content(10, cycle))}


def test_ranks_that_are_out_of_step_get_an_error_and_no_bytes(ranks: Ranks) -> None:
    group = ranks(3)
    form_group(group)
    group[0].start("broadcast", CHUNK, 0, 1)
    group[1].start("broadcast", CHUNK + 1, 0, 1)
    group[2].start("broadcast", CHUNK + 1, 0, 1)
    with pytest.raises(CommunicatorError, match="out of step with rank 0"):
        group[1].finish()
    assert lost_or_aborted(group[2]).peer == 1


# Peers that die, freeze or are slow


def test_a_rank_that_never_joins_is_named_when_the_time_is_over(ranks: Ranks, backend: str) -> None:
    group = ranks(4)
    specs = make_specs([rank.call("bind") for rank in group])
    for rank, spec in zip(group[:3], specs, strict=False):
        rank.start("join", spec, 1.0)
    for rank in (group[0], group[2]):
        with pytest.raises(RendezvousFailed, match=r"rank 3 \(shard\[3\]/0\)") as raised:
            rank.finish()
        assert raised.value.missing == (3,)
    if backend == "tcp":
        group[1].finish()  # its neighbours came, and it needs nobody else
    else:
        with pytest.raises((RendezvousFailed, PeerLost)):
            group[1].finish()


def test_a_rank_that_died_before_joining_is_lost_to_its_neighbours(ranks: Ranks) -> None:
    group = ranks(4)
    specs = make_specs([rank.call("bind") for rank in group])
    group[1].kill()
    group[0].start("join", specs[0], DEADLINE_S)
    group[2].start("join", specs[2], 1.0)
    with pytest.raises(PeerLost) as lost:
        group[0].finish()
    assert lost.value.peer == 1
    with pytest.raises(RendezvousFailed, match=r"rank 1 \(shard\[1\]/0\)"):
        group[2].finish()


def test_a_rank_that_is_frozen_while_joining_holds_nobody_past_the_deadline_or_an_abort(ranks: Ranks) -> None:
    group = ranks(3)
    specs = make_specs([rank.call("bind") for rank in group])
    group[1].freeze()
    group[0].start("join", specs[0], 1.0)
    group[2].start("join", specs[2], DEADLINE_S)
    with pytest.raises(RendezvousFailed, match="rank 1"):
        group[0].finish()
    group[2].aside("abort", "rank 1 is frozen")
    with pytest.raises(CommunicatorAborted, match="rank 1 is frozen"):
        group[2].finish()
    group[1].thaw()
    with pytest.raises((PeerLost, RendezvousFailed)):
        group[1].call("join", specs[1], 1.0)


def test_a_rank_that_comes_late_to_the_rendezvous_is_waited_for(ranks: Ranks) -> None:
    group = ranks(3)
    specs = make_specs([rank.call("bind") for rank in group])
    for number in (0, 2):
        group[number].start("join", specs[number], DEADLINE_S)
    assert not group[0].is_finished(0.3)
    group[1].call("join", specs[1], DEADLINE_S)
    group[0].finish()
    group[2].finish()
    assert set(call_all(group, "broadcast", 9, 0, 9)) == {digest(content(9, 9))}


@pytest.mark.parametrize("victim", [0, 1, 2, 3])
def test_a_rank_killed_in_a_broadcast_is_lost_to_a_neighbour_and_nobody_ends_well(ranks: Ranks, victim: int) -> None:
    group = ranks(4)
    form_group(group)
    group[victim].freeze()
    others = [rank for number, rank in enumerate(group) if number != victim]
    start_all(others, "broadcast", LARGE, 0, 1)
    until(lambda: waits(*others))
    group[victim].kill()
    assert any(error.peer == victim for error in map(lost_or_aborted, others))


@pytest.mark.parametrize("victim", [1, 3])
def test_a_rank_killed_between_two_calls_is_lost_to_the_next_call(ranks: Ranks, victim: int) -> None:
    group = ranks(4)
    form_group(group)
    call_all(group, "broadcast", CHUNK, 0, 1)
    group[victim].kill()
    others = [rank for number, rank in enumerate(group) if number != victim]
    start_all(others, "broadcast", LARGE, 0, 1)
    assert any(error.peer == victim for error in map(lost_or_aborted, others))


def test_a_frozen_rank_blocks_the_others_until_they_are_aborted_and_finds_itself_alone(ranks: Ranks) -> None:
    group = ranks(4)
    form_group(group)
    group[2].freeze()
    others = [group[0], group[1], group[3]]
    start_all(others, "broadcast", LARGE, 0, 1)
    until(lambda: waits(*others))
    assert not any(rank.is_finished() for rank in others)
    for rank in others:
        rank.aside("abort", "shard[2] is frozen")
    for rank in others:
        with pytest.raises((CommunicatorAborted, PeerLost)):
            rank.finish()
        assert rank.call("status")["aborted"] == "shard[2] is frozen"
    group[2].start("broadcast", LARGE, 0, 1)
    group[2].thaw()
    assert lost_or_aborted(group[2]).peer in (1, 3)


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_rank_that_was_only_slow_completes_with_the_right_bytes(ranks: Ranks, large: int, victim: int) -> None:
    group = ranks(4)
    form_group(group)
    start_all(group, "broadcast", large, 0, 5, repeat=3)
    for _ in range(3):
        group[victim].freeze()
        assert not group[victim].is_finished(0.05)
        group[victim].thaw()
    assert {rank.finish() for rank in group} == {digest(content(large, 5))}


def test_a_rank_killed_during_an_exchange_is_lost_to_whoever_waits_for_it(ranks: Ranks) -> None:
    group = ranks(3)
    form_group(group)
    for me, rank in enumerate(group[:2]):
        rank.start("exchange", [("send", 2, LARGE), ("recv", 2, LARGE), ("recv", 1 - me, 8), ("send", 1 - me, 8)])
    until(lambda: waits(*group[:2]))
    group[2].kill()
    for rank in group[:2]:
        with pytest.raises(PeerLost) as lost:
            rank.finish()
        assert lost.value.peer == 2


# Aborts


def test_an_abort_before_joining_refuses_the_join(ranks: Ranks) -> None:
    group = ranks(2)
    specs = make_specs([rank.call("bind") for rank in group])
    group[0].call("abort", "no longer wanted")
    with pytest.raises(CommunicatorAborted) as raised:
        group[0].call("join", specs[0], DEADLINE_S)
    assert raised.value.reason == "no longer wanted"
    with pytest.raises(PeerLost):
        group[1].call("join", specs[1], DEADLINE_S)


@pytest.mark.parametrize("caller", [0, 1])
def test_an_abort_frees_a_join_in_progress(ranks: Ranks, caller: int) -> None:
    group = ranks(3)
    specs = make_specs([rank.call("bind") for rank in group])
    group[caller].start("join", specs[caller], DEADLINE_S)
    assert not group[caller].is_finished(0.1)
    group[caller].aside("abort", "enough")
    with pytest.raises(CommunicatorAborted, match="enough"):
        group[caller].finish()


@pytest.mark.parametrize("threads", [1, 8])
def test_an_abort_inside_a_call_frees_it_and_the_first_reason_stays(ranks: Ranks, threads: int) -> None:
    group = ranks(3)
    form_group(group)
    start_all(group[:2], "broadcast", LARGE, 0, 1)
    until(lambda: waits(*group[:2]))
    group[1].aside("abort", "enough", threads=threads)
    group[1].aside("abort", "again", threads=threads)
    with pytest.raises(CommunicatorAborted) as raised:
        group[1].finish()
    status = group[1].call("status")
    assert status["aborted"] == raised.value.reason
    assert status["aborted"].startswith("enough")
    assert 0 <= status["released_s"] < DEADLINE_S
    assert status["waiting_on"] == ("none", None)
    assert lost_or_aborted(group[0]).peer == 1
    group[2].start("broadcast", LARGE, 0, 1)
    assert lost_or_aborted(group[2]).peer in (0, 1)


def test_an_abort_between_calls_refuses_every_later_one(ranks: Ranks) -> None:
    group = ranks(2)
    form_group(group)
    call_all(group, "broadcast", 10, 0, 1)
    group[0].call("abort", "over")
    assert group[0].call("status")["released_s"] >= 0
    refused: list[tuple[str, *tuple[object, ...]]] = [
        ("broadcast", 10, 0, 1),
        ("exchange", [("send", 1, 3)]),
        ("exchange", []),
        ("split", 0, 0),
        ("wait",),
    ]
    for call in refused:
        with pytest.raises(CommunicatorAborted, match="over"):
            group[0].call(*call)


@pytest.mark.parametrize(
    "call",
    [("exchange", [("recv", 2, 5)]), ("exchange", [("send", 2, LARGE)]), ("split", 0, 0)],
    ids=["recv", "send", "split"],
)
def test_an_abort_frees_every_other_kind_of_call(ranks: Ranks, call: tuple[str, *tuple[object, ...]]) -> None:
    group = ranks(3)
    form_group(group)
    group[0].start(*call)
    until(lambda: waits(group[0]))
    group[0].aside("abort", "enough")
    with pytest.raises(CommunicatorAborted, match="enough"):
        group[0].finish()


def test_aborting_a_group_frees_calls_in_its_parts(ranks: Ranks) -> None:
    group = ranks(3)
    form_group(group)
    call_all(group, "split", 0, 0)
    start_all(group[:2], "broadcast", LARGE, 0, 1)
    until(lambda: waits(*group[:2]))
    for rank in group[:2]:
        rank.aside("abort", "the whole")
        lost_or_aborted(rank)
        assert rank.call("status")["aborted"] == "the whole"
        with pytest.raises(CommunicatorAborted, match="the whole"):
            rank.call("wait")


def test_aborting_a_part_leaves_the_group_usable(ranks: Ranks) -> None:
    group = ranks(3)
    form_group(group)
    call_all(group, "split", 0, 0)
    call_all(group, "abort", "the part", depth=1)
    with pytest.raises(CommunicatorAborted, match="the part"):
        group[0].call("broadcast", 3, 0, 1)
    call_all(group, "close")
    assert set(call_all(group, "broadcast", CHUNK, 2, 1)) == {digest(content(CHUNK, 1))}


def test_aborts_that_race_with_calls_never_let_one_end_well_with_wrong_bytes(ranks: Ranks) -> None:
    group = ranks(3)
    size = 4 * CHUNK
    for cycle in range(25):
        form_group(group, epoch=cycle)
        start_all(group, "broadcast", size, 0, cycle, repeat=20)
        group[2].is_finished(cycle * 0.0004)  # a little later each time
        group[cycle % 3].aside("abort", "race", threads=2)
        for rank in group:
            with contextlib.suppress(PeerLost, CommunicatorAborted):
                assert rank.finish() == digest(content(size, cycle))
        call_all(group, "close")


# Ends of life


def test_a_closed_communicator_refuses_calls_and_a_second_close_is_nothing(ranks: Ranks) -> None:
    group = ranks(2)
    form_group(group)
    call_all(group, "broadcast", 3, 0, 1)
    for rank in group:
        rank.call("close_twice")
        with pytest.raises(CommunicatorError, match="closed"):
            rank.call("wait")


def test_bytes_that_were_sent_before_a_close_still_arrive(ranks: Ranks) -> None:
    group = ranks(2)
    form_group(group)
    group[0].call("broadcast", CHUNK, 0, 4)
    group[0].call("close")
    assert group[1].call("broadcast", CHUNK, 0, 4) == digest(content(CHUNK, 4))


def test_two_hundred_rebuilds_leave_no_thread_no_descriptor_and_no_memory_behind(ranks: Ranks) -> None:
    group = ranks(3)
    expected = digest(content(2 * CHUNK, 1))

    def rebuild(cycle: int) -> None:
        form_group(group, epoch=cycle)
        assert set(call_all(group, "broadcast", 2 * CHUNK, cycle % 3, 1)) == {expected}
        call_all(group, "split", 0, 0)
        if cycle % 2:
            group[cycle % 3].call("abort", "next")
        for rank in group:
            while rank.call("close"):
                pass

    def count(what: str) -> list[int]:
        return [rank.call("resources")[what] for rank in group]

    for cycle in range(10):
        rebuild(cycle)
    until(lambda: set(count("threads")) == {2})  # the two that answer verbs
    fds, resident = count("fds"), count("resident_bytes")
    for cycle in range(10, 210):
        rebuild(cycle)
    until(lambda: set(count("threads")) == {2} and count("fds") == fds)
    growth = [after - before for before, after in zip(resident, count("resident_bytes"), strict=True)]
    assert max(growth) < 4 << 20, growth
