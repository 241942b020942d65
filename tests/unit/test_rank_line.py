"""The line to a worker process: answers in any order, errors as they are, and an end that everybody hears of."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_refit.errors import DigestMismatch, ShardDied
from elastic_refit.rank_line import RankLine, serve

WAIT_S = 30.0


class Unpicklable(Exception):
    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one}, {other}")


class Target:
    def __init__(self) -> None:
        self.go = threading.Event()

    def block(self) -> str:
        assert self.go.wait(WAIT_S)
        return "freed"

    def let_go(self) -> None:
        self.go.set()

    def double(self, number: int) -> int:
        return 2 * number

    def mismatch(self) -> None:
        raise DigestMismatch("bucket 3 differs", bucket=3)

    def strange(self) -> None:
        raise Unpicklable(1, 2)

    def lock(self) -> object:
        return threading.Lock()


@pytest.fixture
def line() -> Iterator[RankLine]:
    mine, its = socket.socketpair()
    serving = threading.Thread(target=serve, args=(its, Target()))
    serving.start()
    line = RankLine(mine, "shard[0]/1")
    yield line
    line.close()
    serving.join(WAIT_S)
    assert not serving.is_alive()


def test_a_question_is_answered_while_another_one_blocks(line: RankLine) -> None:
    blocked = line.ask("block")
    assert line.ask("double", 21).result(WAIT_S) == 42
    assert not blocked.done()
    line.ask("let_go")
    assert blocked.result(WAIT_S) == "freed"


def test_an_error_arrives_with_its_type_and_fields(line: RankLine) -> None:
    with pytest.raises(DigestMismatch) as caught:
        line.ask("mismatch").result(WAIT_S)
    assert caught.value.bucket == 3


@pytest.mark.parametrize(("verb", "words"), [("strange", "Unpicklable: 1, 2"), ("lock", "pickle"), ("no", "no")])
def test_what_cannot_cross_the_line_is_an_error_and_the_line_goes_on(line: RankLine, verb: str, words: str) -> None:
    with pytest.raises((RuntimeError, AttributeError), match=words):
        line.ask(verb).result(WAIT_S)
    assert line.ask("double", 1).result(WAIT_S) == 2


def test_whoever_waits_or_comes_when_the_line_ends_is_told_that_the_process_died(line: RankLine) -> None:
    waiting = line.ask("block")
    line.ask("double", 1).result(WAIT_S)
    line.close()
    for asked in (waiting, line.ask("double", 1)):
        with pytest.raises(ShardDied, match=r"shard\[0\]/1"):
            asked.result(WAIT_S)
    line.close()


def test_a_line_to_a_path_where_nobody_listens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        RankLine.to(str(tmp_path / "0"), "shard[0]")
