"""The process that an engine was started by is killed: the engine's own processes and their memory go with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from elastic_refit.demo.tiny_model import make_tiny_model
from elastic_refit.processes import identify, is_living
from elastic_refit.shared_memory import mapped_segments
from tests.waiting import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")]

GONE_S = 20.0
OWNER = """
import sys
from elastic_refit.engines.base import Hosting
from elastic_refit.engines.registry import build_engine
from tests.engine_lab import VLLM_OPTIONS

if __name__ == "__main__":
    engine = build_engine("vllm", sys.argv[1], VLLM_OPTIONS, hosting=Hosting(width=2))
    print("loaded", *engine.pids(), flush=True)
    sys.stdin.read()
"""


def test_a_killed_owner_leaves_no_process_and_no_shared_memory_of_its_engine(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", family="llama", seed=1)
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    root = str(Path(__file__).parents[2])
    owner = subprocess.Popen(
        [sys.executable, script, tmp_path / "model"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": root},
        text=True,
    )
    assert owner.stdin is not None
    assert owner.stdout is not None
    with owner, owner.stdin, owner.stdout:
        said = next(line for line in owner.stdout if line.startswith("loaded"))
        engine = {int(pid) for pid in said.split()[1:]} - {owner.pid}
        started = psutil.Process(owner.pid).children(recursive=True)
        assert len(engine) == 3, "an EngineCore and two workers"
        assert engine < {process.pid for process in started}
        segments = mapped_segments(identify(process.pid, "here") for process in started)
        owner.send_signal(signal.SIGKILL)
        assert owner.wait(GONE_S) == -signal.SIGKILL
        wait_until(lambda: not any(map(is_living, started)), GONE_S)
        wait_until(lambda: not any(Path(segment).exists() for segment in segments), GONE_S)
