"""The process of one rank of a shard without a model: it keeps what it is fed, and does what a test tells it."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from elastic_refit.engines.base import WeightReceiver
from elastic_refit.rank_line import serve
from tests.refit_group import Engine, Weights, is_equal

__all__ = ["LightRank", "feeds_until", "holds"]


class LightRank:
    """The calls of a rank's engine; ``pause`` waits for ``may_pause``."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._receiver = Engine()
        self._lock = threading.Lock()
        self._may_pause = threading.Event()
        self._may_pause.set()

    def load(self, model: str, options: dict[str, Any], initial_version: int, rank: int) -> None:
        self._receiver.rank = rank

    def hold_pause(self) -> None:
        self._may_pause.clear()

    def may_pause(self) -> None:
        self._may_pause.set()

    def pause(self) -> None:
        assert self._may_pause.wait(60)

    def resume(self) -> None:
        self._receiver.calls.append("resume")

    def in_worker(self, function: Callable[[WeightReceiver], Any]) -> Any:
        with self._lock:
            return function(self._receiver)


def holds(version: int, receiver: WeightReceiver) -> tuple[bool, list[str]]:
    """Whether the rank holds that version, bit for bit, and what its engine was told."""
    assert isinstance(receiver, Engine)
    sent = Weights(version).tensors
    same = receiver.held.keys() == sent.keys() and all(is_equal(receiver.held[name], sent[name]) for name in sent)
    return same, receiver.calls


def feeds_until(name: str, rank: int, receiver: WeightReceiver) -> None:
    """Have this rank's engine wait for ever before it takes tensor ``name``; the others go on."""
    assert isinstance(receiver, Engine)

    def wait(fed: int) -> None:
        if fed >= int(name.removeprefix("w")):
            threading.Event().wait()

    receiver.on_feed = wait if receiver.rank == rank else None


def main(arguments: Sequence[str]) -> None:
    serve(socket.socket(fileno=int(arguments[1])), LightRank())
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv)
