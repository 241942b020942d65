"""The gate in front of an engine that runs in the calling process: one generation at a time, none while paused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from elastic_refit.errors import ShardError

__all__ = ["GenerationGate"]


class GenerationGate:
    """Any thread may use it. Nobody waits for ever: :meth:`close` sends everybody home."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._paused = False
        self._running = False
        self._closed = False

    @property
    def is_paused(self) -> bool:
        return self._paused

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Wait until nothing else runs and the gate is open, then hold it.

        Raises:
            ShardError: the engine was closed, before or while waiting.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not (self._paused or self._running))
            self._refuse_if_closed()
            self._running = True
        try:
            yield
        finally:
            with self._changed:
                self._running = False
                self._changed.notify_all()

    def pause(self) -> None:
        """Let nobody in from now on, and return when the generation that is inside has left."""
        with self._changed:
            self._paused = True
            self._changed.wait_for(lambda: not self._running)

    def resume(self) -> None:
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def close(self) -> None:
        """Refuse everybody who waits or comes, and return when the generation that is inside has left."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._running)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise ShardError("the engine is closed")
