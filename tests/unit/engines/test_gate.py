"""The gate of an engine that runs in the calling process."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from elastic_refit.engines.gate import GenerationGate
from elastic_refit.errors import ShardError

WAIT_S = 30.0


class Generation:
    """Somebody who stays inside the gate until told to leave."""

    def __init__(self, pool: ThreadPoolExecutor, gate: GenerationGate) -> None:
        self.inside, self.leave = threading.Event(), threading.Event()
        self.done: Future[None] = pool.submit(self._run, gate)

    def _run(self, gate: GenerationGate) -> None:
        with gate.generating():
            self.inside.set()
            assert self.leave.wait(WAIT_S)


def test_generations_pass_one_at_a_time() -> None:
    gate = GenerationGate()
    with ThreadPoolExecutor(2) as pool:
        first = Generation(pool, gate)
        assert first.inside.wait(WAIT_S)
        second = Generation(pool, gate)
        assert not second.inside.is_set()
        first.leave.set()
        assert second.inside.wait(WAIT_S)
        second.leave.set()
        second.done.result(WAIT_S)


def test_pausing_returns_only_when_the_running_generation_has_left() -> None:
    gate = GenerationGate()
    with ThreadPoolExecutor(2) as pool:
        running = Generation(pool, gate)
        assert running.inside.wait(WAIT_S)
        pausing = pool.submit(gate.pause)
        assert not pausing.done()
        running.leave.set()
        pausing.result(WAIT_S)
        assert running.leave.is_set()
        assert gate.is_paused


def test_who_comes_while_paused_enters_after_the_resume() -> None:
    gate = GenerationGate()
    gate.pause()
    with ThreadPoolExecutor(1) as pool:
        waiting = Generation(pool, gate)
        waiting.leave.set()
        assert not waiting.inside.is_set()
        gate.resume()
        waiting.done.result(WAIT_S)


def test_a_generation_that_raises_leaves_the_gate() -> None:
    gate = GenerationGate()
    with pytest.raises(KeyError), gate.generating():
        raise KeyError
    with gate.generating():
        pass


def test_closing_sends_home_who_waits_and_waits_for_who_is_inside() -> None:
    gate = GenerationGate()
    with ThreadPoolExecutor(3) as pool:
        running = Generation(pool, gate)
        assert running.inside.wait(WAIT_S)
        waiting = Generation(pool, gate)
        closing = pool.submit(gate.close)
        with pytest.raises(ShardError, match="closed"):
            waiting.done.result(WAIT_S)
        assert not closing.done()
        running.leave.set()
        closing.result(WAIT_S)
    with pytest.raises(ShardError, match="closed"), gate.generating():
        raise AssertionError("a closed gate let somebody in")
