"""What a user may get wrong: one sentence that names the field or the fix, exit code 2, nothing left running."""

from __future__ import annotations

import importlib.util
import socket
import sys
from pathlib import Path

import pytest

from elastic_refit.cli import main
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
        (["--kill", "7@1:bucket:0"], "no shard[7]"),
        (["--kill", "0@99:bucket:0"], "no step 99"),
        (["--freeze", "0@1:lunch"], "SHARD@STEP:PHASE"),
        (["--json", "/nowhere/at/all/out.json"], "/nowhere/at/all"),
        (["--engine", "sglang"], "--engine"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _main(["demo", "--engine", "torch", *arguments], monkeypatch) == 2
    said = capsys.readouterr().err
    assert says in said
    assert "Traceback" not in said


def test_an_occupied_dashboard_port_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert _main(["demo", "--engine", "torch", "--set", f"ray.dashboard_port={port}"], monkeypatch) == 2
    assert f"port {port} is taken" in capsys.readouterr().err


def test_an_engine_that_is_not_installed_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else real(name))
    assert _main(["demo"], monkeypatch) == 2
    assert "vLLM is not installed" in capsys.readouterr().err


def test_a_mistake_in_a_process_of_its_own_leaves_nothing_running() -> None:
    finished = run("demo", "--engine", "torch", "--set", "ray.address=127.0.0.1:1", timeout_s=120)
    assert finished.exit_code == 2, finished.output
    assert "ray.address" in finished.output
    assert "Traceback" not in finished.output
    assert finished.left == ()


def test_a_ray_that_cannot_start_is_one_sentence_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    finished = run("demo", "--engine", "torch", env={"RAY_TMPDIR": str(tmp_path / "file" / "ray")}, timeout_s=120)
    assert finished.exit_code == 2, finished.output
    assert "Ray cannot start on this machine: NotADirectoryError" in finished.output
    assert "Traceback" not in finished.output
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


def test_a_config_file_with_a_typo_names_the_file_and_the_nearest_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("fleet:\n  shard: 3\n")
    assert _main(["demo", "--config", str(path)], monkeypatch) == 2
    said = capsys.readouterr().err
    assert "mine.yaml" in said
    assert "shards" in said


def _main(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of the command, run in this process: it ends before anything is started."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(sys, "argv", ["elastic-refit", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    code = ended.value.code
    assert isinstance(code, int)
    return code
