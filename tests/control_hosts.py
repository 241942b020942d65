"""Hosts and ends of the control channel in processes of their own, which can be killed, frozen and thawed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from typing import Any, Self

from elastic_refit.control.end import ControlEnd
from elastic_refit.control.host import ControlHost
from elastic_refit.control.setup import EndSetup, HostSetup
from elastic_refit.core.evidence import Beacon
from tests.waiting import wait_until

__all__ = ["EndProcess", "HostProcess"]

ANSWER_S = 60.0


class _Process:
    def __init__(self, target: Any, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def hear(self) -> Any:
        """The next thing that the process says."""
        assert self.pipe.poll(ANSWER_S), f"{type(self).__name__} said nothing for {ANSWER_S} s"
        return self.pipe.recv()

    def signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def freeze(self) -> None:
        """Returns when the process has stopped."""
        self.signal(signal.SIGSTOP)
        wait_until(lambda: self._state() == "T", ANSWER_S)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def _state(self) -> str:
        with open(f"/proc/{self._process.pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.pipe.close()


class HostProcess(_Process):
    """A :class:`ControlHost`; returns when it has bound."""

    def __init__(self, setup: HostSetup) -> None:
        super().__init__(_host, setup)
        assert self.hear() == "up"

    def call(self, verb: str, *arguments: Any) -> Any:
        self.pipe.send((verb, arguments))
        return self.hear()

    def beacon_of(self, name: str) -> Beacon | None:
        heard = self.call("heard").get(name)
        return None if heard is None else heard.beacon


class EndProcess(_Process):
    """A :class:`ControlEnd` that says what it is ordered; returns when it is there."""

    def __init__(self, setup: EndSetup, beacon: Beacon) -> None:
        super().__init__(_end, setup, beacon)
        assert self.hear() == "up"


def _host(pipe: Connection, setup: HostSetup) -> None:
    host = ControlHost(setup)
    pipe.send("up")
    while True:
        verb, arguments = pipe.recv()
        pipe.send(getattr(host, verb)(*arguments))


def _end(pipe: Connection, setup: EndSetup, beacon: Beacon) -> None:
    ControlEnd(setup, read_beacon=lambda: beacon, obey=lambda epoch, reason: pipe.send((epoch, reason)))
    pipe.send("up")
    signal.pause()
