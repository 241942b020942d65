"""The demo's Ray: the cluster that is there, or one of its own that is gone afterwards, whatever happened.

What must never happen here: a process of ours alive after the driver, a frozen worker included; a process ended that is
not ours.
"""

from __future__ import annotations

import ctypes
import io
import logging
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path

import psutil
import ray

from elastic_refit.config import RunConfig
from elastic_refit.demo.interrupts import ignore_interrupts, interruptible, unwind_on_sigterm
from elastic_refit.errors import ConfigError
from elastic_refit.forking.workers import forked_workers
from elastic_refit.guardian import guarded
from elastic_refit.processes import end_descendants

__all__ = ["cluster", "log_folder"]

logger = logging.getLogger(__name__)

_PR_SET_CHILD_SUBREAPER = 36
_END_S = 20.0
_CONNECT_S = 10.0


@contextmanager
def cluster(config: RunConfig, *, has_dashboard: bool = True, forks: Sequence[str] = ()) -> Iterator[None]:
    """Join the cluster at ``ray.address``, or start one here for the ``with`` body.

    With ``forks`` the workers of one that is started here are forks of a process that has imported these modules.

    Raises:
        ConfigError: there is no such cluster, the dashboard's port is taken, or Ray cannot start.
    """
    _adopt_orphans()
    is_own = config.ray.address is None
    with interruptible(), redirect_stdout(_Discarded()), guarded() if is_own else nullcontext(), _ended():
        with forked_workers(*forks) if is_own and forks else nullcontext():
            _init(config, has_dashboard)
            unwind_on_sigterm()  # Ray's own handler, set while it starts, ends the process
            yield


@contextmanager
def _ended() -> Iterator[None]:
    """Whatever is started in the ``with`` body ends with it, Ray first."""
    before = [child.pid for child in psutil.Process().children()]
    try:
        yield
    finally:
        ignore_interrupts()
        ray.shutdown()
        left = end_descendants(timeout_s=_END_S, besides=before)
        if left:
            logger.error("processes_left", extra={"pids": left})


class _Discarded(io.TextIOBase):
    """What Ray prints on the driver's standard output about workers: the same lines are in its logs."""

    def write(self, text: str) -> int:
        logger.debug("ray_said", extra={"text": text})
        return len(text)


def log_folder() -> Path:
    """The session's log folder, which the dashboard's Logs page shows; a temporary one where Ray does not say."""
    node = getattr(getattr(ray, "_private", None), "worker", None)
    known = getattr(getattr(node, "_global_node", None), "get_logs_dir_path", None)
    folder = Path(known()) if known is not None else Path(tempfile.mkdtemp(prefix="elastic-refit-"))
    return folder if folder.is_dir() else Path(tempfile.mkdtemp(prefix="elastic-refit-"))


def _init(config: RunConfig, has_dashboard: bool) -> None:
    if config.ray.address is not None:
        _join(config.ray.address)
        return
    port = config.ray.dashboard_port
    if port is not None:
        _require_free(port)
    try:
        ray.init(
            address="local",  # without it Ray joins whatever cluster was started on this machine last
            num_cpus=config.ray.num_cpus or _num_cpus(config),
            include_dashboard=has_dashboard,
            dashboard_port=port,
            log_to_driver=False,
            logging_level=logging.ERROR,
            # Ray would run them at nice 15: whatever else runs on the machine then makes them miss their deadlines.
            _system_config={"worker_niceness": 0},
        )
    except SystemExit:
        raise KeyboardInterrupt from None  # Ray's own handler of SIGTERM
    except Exception as error:
        logger.debug("ray_did_not_start", exc_info=True)
        why = f"{type(error).__name__}: {_first_line(error)}"
        raise ConfigError(f"Ray cannot start on this machine: {why}") from None


def _join(address: str) -> None:
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal():
        _require_listener(host, int(port), address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise _no_cluster(address, _first_line(error)) from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or ["it does not say why"])[0]


def _require_listener(host: str, port: int, address: str) -> None:
    """Ray itself asks a dead address for minutes."""
    try:
        socket.create_connection((host.rpartition("/")[2], port), timeout=_CONNECT_S).close()
    except OSError as error:
        raise _no_cluster(address, str(error)) from None


def _no_cluster(address: str, why: str) -> ConfigError:
    return ConfigError(f"ray.address: no cluster answers at {address!r}: {why}", field="ray.address")


def _num_cpus(config: RunConfig) -> int:
    fleet = config.fleet.trainers * config.ray.cpus_per_trainer + config.fleet.shards * config.ray.cpus_per_shard
    return max(psutil.cpu_count() or 1, int(-(-fleet // 1)))


def _require_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError(
                f"ray.dashboard_port: port {port} is taken ({error.strerror}); name another, or null for a free one",
                field="ray.dashboard_port",
            ) from None


def _adopt_orphans() -> None:
    """Become the parent of descendants whose parents die (prctl(2)), so that every one of them can be found again."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        logger.warning("no_subreaper", extra={"errno": ctypes.get_errno()})
