"""The part of the broadcast benchmark that needs Ray: the same bytes through the object store."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import ray

from elastic_refit.bench import broadcast

__all__ = ["measure"]

_STORE_SLACK = 3
"""Times the bytes that the store may hold: what was put before is freed a little later."""
_WAIT_S = 300.0


class StoreReader:
    """Takes an object out of the store and copies it into memory of its own, as a receiver of weights must."""

    def __init__(self, size_bytes: int) -> None:
        self._held: npt.NDArray[np.uint8] = np.zeros(size_bytes, np.uint8)

    def take(self, holder: list[ray.ObjectRef]) -> int:
        self._held[:] = ray.get(holder[0])
        return int(self._held[-1])


def measure(*, size_bytes: int = 256 << 20, **settings: Any) -> dict[str, Any]:
    """As :func:`elastic_refit.bench.broadcast.measure`, with ``ray.put`` + get among the rivals.

    Starts a Ray of its own, on this machine, and ends it.
    """
    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=max(_STORE_SLACK * size_bytes, 128 << 20),
    )
    try:
        return broadcast.measure(size_bytes=size_bytes, object_store=_through_the_store, **settings)
    finally:
        ray.shutdown()


def _through_the_store(size_bytes: int, receivers: int) -> Callable[[], float]:
    reader = ray.remote(num_cpus=0)(StoreReader)
    readers = [reader.remote(size_bytes) for _ in range(receivers)]
    weights = np.ones(size_bytes, np.uint8)

    def move() -> float:
        began = time.perf_counter()
        stored = ray.put(weights)
        ray.get([each.take.remote([stored]) for each in readers], timeout=_WAIT_S)
        return time.perf_counter() - began

    return move
