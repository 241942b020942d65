"""Workers that are forks of one process: as dead, as separate and as gone as any others."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
import ray
from ray.exceptions import ActorDiedError

from elastic_refit.forking import launch
from elastic_refit.forking.workers import forked_workers
from tests.waiting import wait_until

PRELOADED = "tabnanny"
"""A module of the standard library that nothing else imports."""
ANSWER_S = 60.0


@ray.remote(num_cpus=0)
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


@pytest.fixture(scope="module")
def forking_cluster() -> Iterator[None]:
    with forked_workers(PRELOADED):
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        try:
            yield
        finally:
            ray.shutdown()


def _server_of(worker: int) -> psutil.Process:
    parent = psutil.Process(worker).parent()
    assert parent is not None
    return parent


@pytest.mark.usefixtures("forking_cluster")
def test_workers_are_forks_that_have_imported_what_was_asked_for() -> None:
    first, second = Worker.remote(), Worker.remote()
    pids = ray.get([first.pid.remote(), second.pid.remote()], timeout=ANSWER_S)
    assert len({os.getpid(), *pids}) == 3
    assert {_server_of(pid).pid for pid in pids} == {_server_of(pids[0]).pid}
    assert "elastic_refit.forking.server" in _server_of(pids[0]).cmdline()
    assert ray.get(first.has_imported.remote(PRELOADED), timeout=ANSWER_S)


@pytest.mark.usefixtures("forking_cluster")
def test_a_killed_fork_is_dead_for_ray_and_no_zombie_for_anybody() -> None:
    worker = Worker.remote()
    process = psutil.Process(ray.get(worker.pid.remote(), timeout=ANSWER_S))
    process.send_signal(signal.SIGSTOP)
    process.kill()
    with pytest.raises(ActorDiedError):
        ray.get(worker.pid.remote(), timeout=ANSWER_S)
    process.wait(ANSWER_S)
    assert not process.is_running()


@pytest.mark.usefixtures("forking_cluster")
def test_the_raylet_ends_what_a_killed_fork_has_started_as_it_would_otherwise() -> None:
    worker = Worker.remote()
    child = psutil.Process(ray.get(worker.start_child.remote(), timeout=ANSWER_S))
    os.kill(ray.get(worker.pid.remote(), timeout=ANSWER_S), signal.SIGKILL)
    child.wait(ANSWER_S)


@pytest.mark.usefixtures("forking_cluster")
def test_a_fork_has_the_variables_of_its_runtime_environment_and_waits_for_its_own_children() -> None:
    worker = Worker.options(runtime_env={"env_vars": {"A_VARIABLE_OF_THIS_TEST": "7"}}).remote()
    assert ray.get(worker.variable.remote("A_VARIABLE_OF_THIS_TEST"), timeout=ANSWER_S) == "7"
    assert ray.get(worker.waits_for_children.remote(), timeout=ANSWER_S) == 3
    other = Worker.remote()
    assert ray.get(other.variable.remote("A_VARIABLE_OF_THIS_TEST"), timeout=ANSWER_S) is None


@pytest.mark.usefixtures("forking_cluster")
def test_without_its_server_a_worker_starts_as_an_interpreter_of_its_own() -> None:
    first = Worker.remote()
    server = _server_of(ray.get(first.pid.remote(), timeout=ANSWER_S))
    server.kill()
    wait_until(lambda: server.status() == psutil.STATUS_ZOMBIE, ANSWER_S)
    later = Worker.options(runtime_env={"env_vars": {"FRESH": "1"}}).remote()
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
