"""Refits in processes that a fault ends, stops or holds: each is forked from one that has imported everything.

``python -m tests.chaos_children FOLDER`` reads cases from standard input, a line of JSON each, and writes what became
of each to standard output as another.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elastic_refit.chaos import Fault, FaultRecord, Moment
from elastic_refit.core.ids import ShardId, TrainerId, parse_member
from elastic_refit.processes import identify
from elastic_refit.watchdog import STACK_DUMP_SIGNAL, register_stack_dump_signal
from tests.refit_group import Group
from tests.waiting import wait_until

__all__ = ["Became"]

WAIT_S = 60.0
BEAT_S = 0.005
SILENCE_S = 0.3
GONE_OR_STOPPED = "TZ"
IN_RECOVERY = ("settle", "rebuild", "retry")


@dataclass(frozen=True, slots=True)
class Became:
    """``own`` and ``other`` are states by proc(5) of the two processes that the victim consists of, X for gone."""

    records: tuple[tuple[str, bool], ...]
    """The phase, and whether the process was the victim's own; in their order."""
    landed: bool
    own: str
    other: str
    beats: bool = True
    """Whether another thread of the process still runs."""
    stacks: str = ""
    """What it gave when it was asked for its stacks, if it had fallen silent."""


def main(folder: Path) -> None:
    for number, line in enumerate(sys.stdin):
        became = observe(json.loads(line), folder / f"stacks-{number}")
        sys.stdout.write(json.dumps(asdict(became)) + "\n")
        sys.stdout.flush()


def observe(case: dict[str, Any], stacks: Path) -> Became:
    """Run a case in a child; see what becomes of it, and end it."""
    other = os.fork()
    if other == 0:
        while True:
            signal.pause()
    heard, said = os.pipe()
    own = os.fork()
    if own == 0:
        os.close(heard)
        try:
            run(case, other, said, stacks)
            signal.pause()
        finally:
            os._exit(1)
    os.close(said)
    try:
        return _watch(case, own, other, _Said(heard), stacks)
    finally:
        for pid in (own, other):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(heard)


def _watch(case: dict[str, Any], own: int, other: int, said: _Said, stacks: Path) -> Became:
    if case["kind"] == "gil":
        wait_until(lambda: said.records() and said.is_silent(), WAIT_S)
        heard = len(said.lines)
        wait_until(lambda: _asked(own, stacks) and said.is_silent(), WAIT_S)
        beats = len(said.lines) > heard
    else:
        wait_until(lambda: said.has_landed() or _state(own) in GONE_OR_STOPPED, WAIT_S)
        wait_until(lambda: _state(other) in GONE_OR_STOPPED, WAIT_S)
        beats = said.has_landed()
    text = stacks.read_text() if stacks.exists() else ""
    records = tuple((phase, pid == str(own)) for phase, pid in said.records())
    return Became(records, said.has_landed(), _state(own), _state(other), beats, text)


class _Said:
    """What a child has said, by lines."""

    def __init__(self, heard: int) -> None:
        os.set_blocking(heard, False)
        self._heard = heard
        self._last = time.monotonic()
        self.lines: list[str] = []

    def is_silent(self) -> bool:
        """Whether it has said nothing for a while."""
        self._listen()
        return time.monotonic() - self._last > SILENCE_S

    def has_landed(self) -> bool:
        self._listen()
        return "landed" in self.lines

    def records(self) -> list[list[str]]:
        self._listen()
        return [line.split()[1:] for line in self.lines if line.startswith("struck")]

    def _listen(self) -> None:
        try:
            data = os.read(self._heard, 65536)
        except BlockingIOError:
            return
        if data:
            self._last = time.monotonic()
            self.lines += data.decode().splitlines()


def _asked(pid: int, stacks: Path) -> bool:
    """Ask for the stacks; whether they are there."""
    os.kill(pid, STACK_DUMP_SIGNAL)
    return "hold_interpreter" in stacks.read_text()


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def run(case: dict[str, Any], other: int, said: int, stacks: Path) -> None:
    """A refit of version 1 with the case's fault; in the cases of a recovery one that breaks and is taken up again."""
    register_stack_dump_signal(stacks)
    member, phase = parse_member(case["member"]), case["phase"]
    processes = [identify(pid, "here") for pid in (os.getpid(), other)]
    group = Group(3, chaos=processes)
    group.keep = lambda record: _say(said, record)
    threading.Thread(target=_beat, args=(said,), daemon=True).start()
    group.arm(Fault(case["kind"], member, 1, phase, rank_in_shard=case.get("rank")))
    start, shards = 0, [0, 1, 2]
    if phase == "idle":
        group.saboteurs[member].reach(Moment(1, "idle"))
    if phase in IN_RECOVERY:
        group.arm(Fault("raise", ShardId(1), 1, "bucket:2"))
        group.transfer(group.build(1, shards), 1)
        start = 1 + min(group.settle(ShardId(shard), 1).applied_through for shard in (0, 2))
        group.settle(TrainerId(0), 1)
        shards = [0, 2]
    group.refit(1, epoch=2, shards=shards, start=start)
    os.write(said, b"landed\n")


def _say(said: int, record: FaultRecord) -> None:
    if record.fault.kind != "raise":
        os.write(said, f"struck {record.phase} {record.pid}\n".encode())


def _beat(said: int) -> None:
    while True:
        os.write(said, b"beat\n")
        time.sleep(BEAT_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)
