"""The demo as a Ray job, seen the way an operator sees it: through the job's status and the task table."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.demo_runs import ROOT
from tests.waiting import wait_until

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

pytestmark = [pytest.mark.ray, pytest.mark.faults]

_TASKS = 10_000


@pytest.fixture(scope="module")
def dashboard() -> Iterator[str]:
    """A cluster of its own with a dashboard; gives the dashboard's URL.

    It and its agent listen wherever there is room: the usual ports may be another cluster's of this machine.
    """
    from ray.cluster_utils import Cluster

    options = {"num_cpus": 4, "include_dashboard": True, "dashboard_port": None, "dashboard_agent_listen_port": 0}
    cluster = Cluster(initialize_head=True, head_node_args=options)
    try:
        yield f"http://{cluster.webui_url}"
    finally:
        cluster.shutdown()


def test_as_a_job_the_fleet_shows_in_the_task_table_and_the_dead_shard_as_failed(dashboard: str) -> None:
    from ray.job_submission import JobStatus, JobSubmissionClient

    client = JobSubmissionClient(dashboard)
    command = Path(sys.executable).with_name("elastic-refit")
    entrypoint = str(command) if command.exists() else f"{sys.executable} -m elastic_refit.cli"
    command_line = f"{entrypoint} demo --engine torch --steps 6 --kill 0@3:bucket:2"
    job = wait_until(lambda: _submitted(client, command_line), timeout_s=60)
    ended = {JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED}
    seen: dict[str, set[str]] = {}

    def is_over() -> bool:
        _note(dashboard, seen)
        return client.get_job_status(job) in ended

    wait_until(is_over, timeout_s=240, interval_s=0.5)
    _note(dashboard, seen)
    logs = client.get_job_logs(job)
    assert client.get_job_status(job) == JobStatus.SUCCEEDED, logs
    assert "ok: 6 steps, 1 incident," in logs.strip().splitlines()[-1]
    assert "RUNNING" in seen["shard[1]=HEALTHY"], seen
    assert wait_until(lambda: "FAILED" in _states_of("shard[0]=", _note(dashboard, seen)), timeout_s=30)
    assert "refit[v1] world=5" in seen
    assert "refit[v6] world=4" in seen


def _submitted(client: JobSubmissionClient, entrypoint: str) -> str:
    """The job's id; empty while the dashboard has not heard of the node's agent, which starts after ``ray.init``."""
    environment = {"RAY_AUTH_MODE": "disabled", **_marks()}
    try:
        job = client.submit_job(entrypoint=entrypoint, runtime_env={"working_dir": str(ROOT), "env_vars": environment})
    except RuntimeError as error:
        if "No available agent" not in str(error):
            raise
        return ""
    return str(job)


def _marks() -> dict[str, str]:
    from tests.conftest import RUN_MARK

    return {RUN_MARK: os.environ[RUN_MARK]}


def _note(dashboard: str, seen: dict[str, set[str]]) -> dict[str, set[str]]:
    """Add the states that each named task has now to those that it was seen in, and return all."""
    from ray.util.state import list_tasks

    rows: list[Any] = list_tasks(address=dashboard, limit=_TASKS, raise_on_missing_output=False)
    for row in rows:
        seen.setdefault(row.name, set()).add(row.state)
    return seen


def _states_of(prefix: str, seen: dict[str, set[str]]) -> set[str]:
    return {state for name, states in seen.items() if name.startswith(prefix) for state in states}
