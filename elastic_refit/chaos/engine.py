"""Which processes of an engine a fault against it strikes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

import psutil

from elastic_refit.chaos.faults import OF_ENGINES, Fault
from elastic_refit.errors import ConfigError
from elastic_refit.processes import identify

__all__ = ["aim_at_engine"]


def aim_at_engine(fault: Fault, pids: Sequence[int], node: str) -> Fault:
    """``fault`` with the processes that it strikes, if it is against an engine; any other fault as it is.

    ``pids`` are those of ``ShardEngine.pids()``, this process' own among them. The engine proper is what this process
    has started; a worker is what the engine has, and of several the one of ``rank_in_shard`` is meant, or the first.

    Raises:
        ConfigError: the engine has no such process.
    """
    if fault.kind not in OF_ENGINES:
        return fault
    children = [pid for pid in pids if pid != os.getpid()]
    workers = [pid for pid in children if psutil.Process(pid).ppid() in children]
    rank = fault.rank_in_shard or 0
    struck = (
        workers[rank : rank + 1] if fault.kind == "worker_kill" else [pid for pid in children if pid not in workers]
    )
    if not struck:
        raise ConfigError(f"{fault}: its engine has {len(children)} processes of its own, and none that this strikes")
    return dataclasses.replace(fault, targets=tuple(identify(pid, node) for pid in struck))
