"""What a user may get wrong: one sentence that names the field or the fix, exit code 2, nothing left running."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.integration.demo_runs import run

pytestmark = pytest.mark.ray


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--set", "demo.stepz=3"], "demo.stepz"),
        (["--set", "refit.bucket_bytes=7"], "refit.bucket_bytes"),
        (["--shards", "0"], "fleet.shards"),
        (["--set", "deadlines.abort_s=1"], "abort_s"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--set", "demo.model=/nowhere/at/all"], "/nowhere/at/all"),
        (["--kill", "0@1:bucket:99"], "no bucket 99"),
        (["--kill", "7@1:bucket:0"], "no shard 7"),
        (["--kill", "0@99:bucket:0"], "no step 99"),
        (["--freeze", "0@1:lunch"], "SHARD@STEP:PHASE"),
        (["--json", "/nowhere/at/all/out.json"], "/nowhere/at/all"),
        (["--engine", "sglang"], "--engine"),
        (["--set", "ray.address=127.0.0.1:1"], "ray.address"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(arguments: list[str], says: str) -> None:
    finished = run("demo", "--engine", "torch", *arguments, timeout_s=120)
    assert finished.exit_code == 2, finished.output
    assert says in finished.output
    assert "Traceback" not in finished.output
    assert finished.left == ()


def test_an_occupied_dashboard_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        finished = run("demo", "--engine", "torch", "--set", f"ray.dashboard_port={port}")
    assert finished.exit_code == 2, finished.output
    assert f"port {port} is taken" in finished.output
    assert finished.left == ()


def test_a_cluster_with_too_few_cpus_is_named(ray_cluster: None) -> None:
    import ray

    address = ray.get_runtime_context().gcs_address
    finished = run(
        "demo", "--engine", "torch", "--set", "ray.cpus_per_shard=4", env={"RAY_ADDRESS": address}, timeout_s=120
    )
    assert finished.exit_code == 2, finished.output
    assert "need 12.5 CPUs" in finished.output
    assert finished.left == ()


def test_a_config_file_with_a_typo_names_the_file_and_the_nearest_key(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("fleet:\n  shard: 3\n")
    finished = run("demo", "--config", str(path))
    assert finished.exit_code == 2, finished.output
    assert "mine.yaml" in finished.output
    assert "shards" in finished.output
