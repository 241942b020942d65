"""Workers that are forks of one process: as dead, as separate and as gone as any others."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError

from elastic_refit.forking import launch
from elastic_refit.forking.workers import forked_workers
from elastic_refit.processes import is_living
from tests.waiting import wait_until, wait_while

PRELOADED = "tabnanny"
"""A module of the standard library that nothing else imports."""
ANSWER_S = 60.0


class Worker:
    def pid(self) -> int:
        return os.getpid()

    def has_imported(self, module: str) -> bool:
        return module in sys.modules

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def start_child(self) -> int:
        return subprocess.Popen(["sleep", "600"]).pid

    def waits_for_children(self) -> int:
        return subprocess.run(["sh", "-c", "exit 3"], check=False).returncode


def worker(**options: Any) -> ActorHandle:
    remote: Any = ray.remote  # its stubs do not know what a class becomes
    handle: ActorHandle = remote(num_cpus=0)(Worker).options(**options).remote()
    return handle


@pytest.fixture(scope="module")
def forking_cluster() -> Iterator[None]:
    with forked_workers(PRELOADED):
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        try:
            yield
        finally:
            ray.shutdown()


def _pid(one: ActorHandle) -> int:
    (pid,) = ray.get([one.pid.remote()], timeout=ANSWER_S)
    return int(pid)


def _server_of(worker: int) -> psutil.Process:
    parent = psutil.Process(worker).parent()
    assert parent is not None
    return parent


@pytest.mark.usefixtures("forking_cluster")
def test_workers_are_forks_that_have_imported_what_was_asked_for() -> None:
    first, second = worker(), worker()
    pids = [_pid(first), _pid(second)]
    assert len({os.getpid(), *pids}) == 3
    assert {_server_of(pid).pid for pid in pids} == {_server_of(pids[0]).pid}
    assert "elastic_refit.forking.server" in _server_of(pids[0]).cmdline()
    assert ray.get(first.has_imported.remote(PRELOADED), timeout=ANSWER_S)


@pytest.mark.usefixtures("forking_cluster")
def test_a_killed_fork_is_dead_for_ray_and_no_zombie_for_anybody() -> None:
    one = worker()
    process = psutil.Process(_pid(one))
    process.send_signal(signal.SIGSTOP)
    process.kill()
    with pytest.raises(ActorDiedError):
        ray.get(one.pid.remote(), timeout=ANSWER_S)
    process.wait(ANSWER_S)
    assert not process.is_running()


@pytest.mark.usefixtures("forking_cluster")
def test_the_raylet_ends_what_a_killed_fork_has_started_as_it_would_otherwise() -> None:
    one = worker()
    (pid,) = ray.get([one.start_child.remote()], timeout=ANSWER_S)
    child = psutil.Process(pid)
    os.kill(_pid(one), signal.SIGKILL)
    wait_while(lambda: is_living(child), ANSWER_S)


@pytest.mark.usefixtures("forking_cluster")
def test_a_fork_has_the_variables_of_its_runtime_environment_and_waits_for_its_own_children() -> None:
    one = worker(runtime_env={"env_vars": {"A_VARIABLE_OF_THIS_TEST": "7"}})
    assert ray.get(one.variable.remote("A_VARIABLE_OF_THIS_TEST"), timeout=ANSWER_S) == "7"
    assert ray.get(one.waits_for_children.remote(), timeout=ANSWER_S) == 3
    other = worker()
    assert ray.get(other.variable.remote("A_VARIABLE_OF_THIS_TEST"), timeout=ANSWER_S) is None


@pytest.mark.usefixtures("forking_cluster")
def test_without_its_server_a_worker_starts_as_an_interpreter_of_its_own() -> None:
    first = worker()
    server = _server_of(_pid(first))
    server.kill()
    wait_until(lambda: server.status() == psutil.STATUS_ZOMBIE, ANSWER_S)
    later = worker(runtime_env={"env_vars": {"FRESH": "1"}})
    assert not ray.get(later.has_imported.remote(PRELOADED), timeout=ANSWER_S)


def test_a_server_that_cannot_import_a_module_is_an_error_and_changes_nothing() -> None:
    parameters = importlib.import_module("ray._private.parameter").RayParams
    address = os.environ.get(launch.ADDRESS_VARIABLE)
    before = vars(parameters)["__init__"]
    with pytest.raises(OSError, match="ended at once"), forked_workers("no_such_module_anywhere"):
        pass
    assert vars(parameters)["__init__"] is before
    assert os.environ.get(launch.ADDRESS_VARIABLE) == address


def test_a_module_that_imports_ray_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError, match="ended at once"), forked_workers("elastic_refit.actors.ledger"):
        pass
    assert "which a worker must do for itself" in capfd.readouterr().err


def test_the_server_of_a_process_that_was_killed_ends_and_leaves_no_socket() -> None:
    owner = f"""
import os, sys
from elastic_refit.forking.workers import forked_workers
from elastic_refit.processes import is_living
with forked_workers({PRELOADED!r}):
    print(os.environ[{launch.ADDRESS_VARIABLE!r}], flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", owner], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip()).parent
        (server,) = psutil.Process(process.pid).children()
        assert folder.is_dir()
        process.kill()
        wait_while(lambda: is_living(server), ANSWER_S)
        wait_while(folder.exists, ANSWER_S)
