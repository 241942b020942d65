"""Processes of this node: named so that a reused pid is never mistaken, ended so that it is proved.

What must never happen here: a signal to a process that is not the recorded one, or a "gone" that was not seen.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

import psutil

from elastic_refit.core.ids import ProcessId
from elastic_refit.shared_memory import mapped_by, mapped_segments, remove, remove_abandoned

__all__ = [
    "end_all",
    "end_descendants",
    "exit_when_orphaned",
    "exit_with",
    "identify",
    "is_living",
    "kill_proved",
    "living",
    "living_descendants",
    "signal_catchers",
    "signal_processes",
    "wait_until_running",
]

_ORPHAN_LOOK_S = 1.0
_LOOK_AGAIN_S = 1.0
_STOPPED_LOOK_S = 0.05
_STOPPED = ("T", "t")
"""The states of a process that a signal or a tracer has stopped."""


def identify(pid: int, node: str) -> ProcessId:
    """The identity of a live process of this node.

    Raises:
        ProcessLookupError: there is no such process.
    """
    ticks = _start_ticks(pid)
    if ticks is None:
        raise ProcessLookupError(f"no process {pid}")
    return ProcessId(node, pid, ticks, os.getpgid(pid))


def _start_ticks(pid: int) -> int | None:
    """Field 22 of ``/proc/<pid>/stat``; the command in field 2 may hold spaces and brackets (proc(5))."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[19])


def kill_proved(processes: Iterable[ProcessId], *, timeout_s: float) -> list[ProcessId]:
    """SIGKILL these processes of this node, stopped ones too, and wait until each is gone; returns those that are not.

    A process that has become a zombie is gone: it holds no memory, no device and no socket. Shared memory that only
    they had mapped is removed: nobody is left to do it. Blocks at most ``timeout_s``.
    """
    targets = tuple(processes)
    segments = mapped_segments(targets)
    left = _kill_all(targets, time.monotonic() + timeout_s)
    if not left:
        remove_abandoned(segments)
    return left


def _kill_all(processes: Iterable[ProcessId], deadline: float) -> list[ProcessId]:
    handles: dict[ProcessId, int] = {}
    try:
        for process in processes:
            handle = _open(process)
            if handle is not None:
                handles[process] = handle
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        return [process for process, handle in handles.items() if not _ended(handle, deadline)]
    finally:
        for handle in handles.values():
            os.close(handle)


def living(processes: Iterable[ProcessId]) -> list[ProcessId]:
    """Those of these processes of this node that are still there, stopped ones too; a zombie is gone."""
    return [process for process in processes if _is_there(process)]


def _is_there(process: ProcessId) -> bool:
    handle = _open(process)
    if handle is None:
        return False
    try:
        return not _ended(handle, time.monotonic())
    finally:
        os.close(handle)


def signal_processes(processes: Iterable[ProcessId], number: int) -> list[ProcessId]:
    """Send signal ``number`` to these processes of this node, in their order; returns those that were there."""
    signalled = []
    for process in processes:
        handle = _open(process)
        if handle is not None:
            signal.pidfd_send_signal(handle, number)
            signalled.append(process)
            os.close(handle)
    return signalled


def signal_catchers(processes: Iterable[ProcessId], number: int) -> list[ProcessId]:
    """Send signal ``number`` to those of these processes of this node that run and catch it; returns them."""
    signalled = []
    for process in processes:
        handle = _open(process)
        if handle is None:
            continue
        if _catches(process.pid, number):
            signal.pidfd_send_signal(handle, number)
            signalled.append(process)
        os.close(handle)
    return signalled


def wait_until_running(processes: Iterable[ProcessId]) -> None:
    """Return when none of these processes of this node is stopped; who is gone is not. May block for ever."""
    for process in processes:
        while _status(process.pid).get("State", "").strip()[:1] in _STOPPED:
            time.sleep(_STOPPED_LOOK_S)


def _catches(pid: int, number: int) -> bool:
    """Whether the process is not stopped and has a handler."""
    status = _status(pid)
    is_stopped = status.get("State", "Z").strip()[:1] in (*_STOPPED, "Z")
    return not is_stopped and bool(int(status["SigCgt"], 16) >> (number - 1) & 1)


def _status(pid: int) -> dict[str, str]:
    """``/proc/<pid>/status`` (proc(5)); empty if there is no such process."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _open(process: ProcessId) -> int | None:
    """A pidfd of exactly this process, or None if it is gone. The start time is read after the pid is pinned."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    if _start_ticks(process.pid) == process.start_ticks:
        return handle
    os.close(handle)
    return None


def _ended(handle: int, deadline: float) -> bool:
    poller = select.poll()
    poller.register(handle, select.POLLIN)
    return bool(poller.poll(max(0.0, deadline - time.monotonic()) * 1000))


def exit_when_orphaned() -> None:
    """End this process when its parent is gone; a Ray worker whose raylet was killed may wait for its tasks for ever.

    Ray itself looks for pid 1 as the parent, which it is not where a subreaper (an init of a container, a supervisor)
    has adopted the worker. One daemon thread.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_ORPHAN_LOOK_S)
        os._exit(1)

    threading.Thread(target=watch, name="exit-when-orphaned", daemon=True).start()


def exit_with(pid: int) -> None:
    """End this process when the process ``pid`` of this node is gone, whoever is its parent. One daemon thread.

    The shared memory that it has mapped is removed: those that share it must end with the same process.
    """
    try:
        owner = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)

    def watch() -> None:
        select.select([owner], [], [])
        remove(mapped_by([os.getpid()]))
        os._exit(1)

    threading.Thread(target=watch, name=f"exit-with-{pid}", daemon=True).start()


def end_descendants(*, timeout_s: float, besides: Collection[int] = ()) -> list[int]:
    """SIGKILL every descendant of this process; returns the pids that are still there at the end.

    ``besides`` are children of this process to leave alone, with all that they have started. A killed parent hands its
    children to the nearest subreaper, so this looks again until nobody is left.
    """
    return end_all(lambda: _descendants(besides), timeout_s=timeout_s)


def end_all(find: Callable[[], Iterable[psutil.Process]], *, timeout_s: float) -> list[int]:
    """SIGKILL what ``find`` finds until it finds nobody; returns the pids that are still there after ``timeout_s``.

    Shared memory that only they had mapped is removed.
    """
    deadline = time.monotonic() + timeout_s
    segments: set[str] = set()
    while True:
        living = [process for process in find() if is_living(process)]
        segments |= mapped_by(process.pid for process in living)
        if not living or time.monotonic() >= deadline:
            remove_abandoned(segments)
            return [process.pid for process in living]
        for process in living:
            _kill(process)
        _wait_until_gone(living, min(deadline, time.monotonic() + _LOOK_AGAIN_S))


def _wait_until_gone(processes: Sequence[psutil.Process], deadline: float) -> None:
    """Those of this process are reaped; others become zombies, which whoever has inherited them may never reap."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(process.pid)
            try:
                _ended(handle, deadline)
            finally:
                os.close(handle)
    psutil.wait_procs(processes, timeout=0)


def living_descendants(*, besides: Collection[int] = ()) -> list[int]:
    """Pids of every descendant of this process that is no zombie; those of ``besides`` and theirs are left out."""
    return [process.pid for process in _descendants(besides) if is_living(process)]


def _descendants(besides: Collection[int]) -> Iterator[psutil.Process]:
    for child in psutil.Process().children():
        if child.pid not in besides:
            yield child
            with contextlib.suppress(psutil.NoSuchProcess):
                yield from child.children(recursive=True)


def is_living(process: psutil.Process) -> bool:
    """Whether it is there, and no zombie: orphans that a subreaper has inherited stay as such until it ends."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()
