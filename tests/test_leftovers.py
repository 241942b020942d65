"""The check at the end of a test run: it finds what the run left alive, ends it, and fails the run for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil

from elastic_refit.processes import is_living
from tests.waiting import wait_until

CONFTEST = Path(__file__).with_name("conftest.py")
LEAVES_AN_ORPHAN = """
import os, subprocess

def test_that_leaves_a_process_to_its_parents_parent():
    spawn = "sleep 600 >/dev/null 2>&1 & echo $!"
    pid = subprocess.run(["sh", "-c", spawn], capture_output=True, check=True).stdout
    open(os.environ["ORPHAN"], "wb").write(pid)
"""
LEAVES_NOTHING = """
import subprocess

def test_that_waits_for_what_it_started():
    subprocess.run(["true"], check=True)
"""


def run_pytest(folder: Path, test: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(CONFTEST, folder / "conftest.py")
    (folder / "pytest.ini").write_text("[pytest]\nsettle_s = 0.1\n")
    (folder / "test_it.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    environment = os.environ | {"ORPHAN": str(folder / "orphan")}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or not is_living(psutil.Process(pid))


def test_a_run_that_leaves_an_orphan_ends_it_and_fails(tmp_path: Path) -> None:
    result = run_pytest(tmp_path, LEAVES_AN_ORPHAN)
    pid = int((tmp_path / "orphan").read_text())
    assert result.returncode == 1, result.stdout
    assert "1 passed" in result.stdout
    assert f"pid {pid}, parent" in result.stdout
    wait_until(lambda: is_gone(pid), 10)


def test_a_run_that_leaves_nothing_passes(tmp_path: Path) -> None:
    result = run_pytest(tmp_path, LEAVES_NOTHING)
    assert result.returncode == 0, result.stdout
    assert "left behind" not in result.stdout
