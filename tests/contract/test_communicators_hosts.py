"""The tcp communicator over several hosts: bytes between them, windows inside them. A rank without a Unix socket is
a host of its own to the others, so one machine is enough."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elastic_refit.communicators.rank_processes import RankProcess, content, digest, form_group
from elastic_refit.errors import CommunicatorAborted, CommunicatorError, PeerLost
from tests.waiting import wait_until

CHUNK = 64 << 10
LARGE = 32 << 20
ON_THIS_HOST = [True, True, False, True, True]


@pytest.fixture(scope="module")
def processes() -> Iterator[list[RankProcess]]:
    processes = [RankProcess("tcp", chunk_bytes=CHUNK, use_unix=use_unix) for use_unix in ON_THIS_HOST]
    yield processes
    for process in processes:
        process.stop()


@pytest.fixture
def group(processes: list[RankProcess]) -> Iterator[list[RankProcess]]:
    for number, process in enumerate(processes):
        if process.is_busy or not process.is_alive():
            processes[number] = RankProcess("tcp", chunk_bytes=CHUNK, use_unix=ON_THIS_HOST[number])
            process.stop()
    form_group(processes)
    yield list(processes)
    for process in processes:
        while process.is_alive() and not process.is_busy and process.call("close"):
            pass


def broadcast_all(group: list[RankProcess], size: int, root: int) -> list[str]:
    for rank in group:
        rank.start("broadcast", size, root, size)
    return [rank.finish() for rank in group]


@pytest.mark.parametrize("root", range(5))
def test_windows_and_bytes_in_one_chain_carry_every_size_from_every_root(group: list[RankProcess], root: int) -> None:
    for size in (0, CHUNK, CHUNK + 1, 8 * CHUNK, 8 * CHUNK + 1, 50 * CHUNK + 7):
        assert set(broadcast_all(group, size, root)) == {digest(content(size, size))}


def test_roots_may_change_between_broadcasts_and_messages_may_come_between(group: list[RankProcess]) -> None:
    size = 20 * CHUNK
    for root in (3, 1, 3, 4, 0, 2, 3):
        assert set(broadcast_all(group, size, root)) == {digest(content(size, size))}
        group[1].start("exchange", [("send", 3, size), ("recv", 3, size)])
        assert group[3].call("exchange", [("recv", 1, size), ("send", 1, size)]) == [digest(content(size, size + 1))]
        assert group[1].finish() == [digest(content(size, size + 3))]


@pytest.mark.parametrize("victim", range(5))
def test_wherever_a_rank_dies_the_others_do_not_end_well(group: list[RankProcess], victim: int) -> None:
    group[victim].freeze()
    others = [rank for number, rank in enumerate(group) if number != victim]
    for rank in others:
        rank.start("broadcast", LARGE, 3, 1)
    group[victim].kill()
    errors = []
    for rank in others:
        with pytest.raises(PeerLost) as lost:
            rank.finish()
        errors.append(lost.value)
    assert any(error.peer == victim for error in errors)


def test_a_publisher_that_waits_for_its_last_reader_to_come_hears_that_it_never_will(group: list[RankProcess]) -> None:
    group[1].freeze()
    others = [group[3], group[4], group[0], group[2]]
    for rank in others:
        rank.start("broadcast", LARGE, 3, 1)
    wait_until(lambda: group[3].aside("status")["waiting_on"] == ("recv", 1), timeout_s=40)
    group[1].kill()
    for rank in others:
        with pytest.raises(PeerLost):
            rank.finish()


@pytest.mark.parametrize("absent", [0, 2, 4])
def test_an_abort_of_the_root_reaches_the_ranks_behind_one_that_has_not_come(
    group: list[RankProcess], absent: int
) -> None:
    others = [rank for number, rank in enumerate(group) if number not in (3, absent)]
    for rank in (group[3], *others):
        rank.start("broadcast", LARGE, 3, 1)
    group[3].aside("abort", "stop")
    with pytest.raises(CommunicatorAborted):
        group[3].finish()
    for rank in others:
        with pytest.raises(PeerLost):
            rank.finish()


def test_ranks_with_different_chunks_on_one_host_are_told_so() -> None:
    group = [RankProcess("tcp", chunk_bytes=chunk_bytes) for chunk_bytes in (CHUNK, 2 * CHUNK)]
    form_group(group)
    for rank in group:
        rank.start("broadcast", 10 * CHUNK, 0, 1)
    with pytest.raises(CommunicatorError, match="same chunk_bytes"):
        group[1].finish()
    with pytest.raises(PeerLost):
        group[0].finish()
    for rank in group:
        rank.stop()
