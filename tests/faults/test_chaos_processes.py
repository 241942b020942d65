"""Kills, freezes and a held interpreter, in real processes: whoever is struck is, in the phase that was meant."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120
SHARD_PHASES = (
    "idle",
    "joining:prepare",
    "joining:connect",
    "before",
    "bucket:0",
    "bucket:3",
    "finalizing",
    "ack",
    "settle",
    "rebuild",
    "retry",
)
TRAINER_PHASES = ("packing", "bucket:2", "ack")


class Children:
    """Runs cases in one process after the other."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "tests.chaos_children", str(folder)]
        self._parent = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def become(self, kind: str, member: str, phase: str, rank: int | None = None) -> dict[str, Any]:
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.write(json.dumps({"kind": kind, "member": member, "phase": phase, "rank": rank}) + "\n")
        self._parent.stdin.flush()
        became: dict[str, Any] = json.loads(self._parent.stdout.readline())
        return became

    def close(self) -> None:
        self._parent.communicate(timeout=DEADLINE_S)


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Children]:
    children = Children(tmp_path_factory.mktemp("stacks"))
    yield children
    children.close()


@pytest.mark.parametrize(("kind", "state"), [("kill", "Z"), ("freeze", "T")])
@pytest.mark.parametrize("phase", SHARD_PHASES)
def test_every_process_of_a_shard_is_struck_where_the_record_says(
    children: Children, kind: str, state: str, phase: str
) -> None:
    became = children.become(kind, "shard[0]", phase)
    assert [record[1] for record in became["records"]] == [True]
    assert became["records"][0][0].startswith(phase)
    assert (became["landed"], became["own"], became["other"]) == (False, state, state)


@pytest.mark.parametrize("phase", TRAINER_PHASES)
def test_a_trainer_is_killed_where_the_record_says(children: Children, phase: str) -> None:
    became = children.become("kill", "trainer[0]", phase)
    assert became["records"] == [[phase, True]]
    assert (became["landed"], became["own"], became["other"]) == (False, "Z", "Z")


@pytest.mark.parametrize(("kind", "state"), [("kill", "Z"), ("freeze", "T")])
def test_one_process_of_several_is_struck_alone(children: Children, kind: str, state: str) -> None:
    became = children.become(kind, "shard[0]", "bucket:1", rank=1)
    assert became["records"] == [["bucket:1", True]]
    assert (became["landed"], became["other"]) == (True, state)
    assert became["own"] not in "TZ"


@pytest.mark.parametrize("phase", ["bucket:1", "before", "finalizing"])
def test_a_held_interpreter_runs_no_other_thread_and_gives_its_stacks_without_being_set_free(
    children: Children, phase: str
) -> None:
    became = children.become("gil", "shard[0]", phase)
    assert became["records"] == [[phase, True]]
    assert not became["landed"]
    assert became["own"] in "RSD", "it is alive"
    assert not became["beats"]
    assert "hold_interpreter" in became["stacks"]
