"""Giving communicators back to NCCL without waiting for it.

An abort is two events. The flags are raised at once, and the stuck kernels end. Then the library reclaims, in the
thread that called it; that can take long, or for ever while a peer on the same node is frozen.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from elastic_refit.communicators.nccl_library import NcclFailure

__all__ = ["Reclaim"]

logger = logging.getLogger(__name__)


class Reclaim:
    """Does ``work(flagged)`` on a thread of its own; another one says so if it is not done within ``deadline_s``."""

    def __init__(self, work: Callable[[Callable[[], None]], None], *, deadline_s: float) -> None:
        self.flagged = threading.Event()
        """Set when the work under way has been told to end."""
        self.reclaimed_s: float | None = None
        """Seconds from ``start`` until everything was given back; None until then."""
        self._work = work
        self._deadline_s = deadline_s
        self._started_at = 0.0

    def start(self) -> None:
        self._started_at = time.monotonic()
        threading.Thread(target=self._watch, name="nccl-reclaim-watch", daemon=True).start()

    @property
    def is_overdue(self) -> bool:
        """It was not done within its deadline, and still is not."""
        return self.reclaimed_s is None and 0.0 < self._started_at < time.monotonic() - self._deadline_s

    def _watch(self) -> None:
        worker = threading.Thread(target=self._reclaim, name="nccl-reclaim", daemon=True)
        worker.start()
        worker.join(self._deadline_s)
        if worker.is_alive():
            logger.error("nccl_reclaim_overdue", extra={"deadline_s": self._deadline_s})

    def _reclaim(self) -> None:
        try:
            self._work(self.flagged.set)
            self.reclaimed_s = time.monotonic() - self._started_at
        except NcclFailure as failure:
            logger.error("nccl_reclaim_failed", extra={"error": str(failure)})
        finally:
            self.flagged.set()  # whatever happened, it is no use to wait for it
