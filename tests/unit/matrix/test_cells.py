"""A matrix file as it is written: what may be left out, what may not be in it, and what cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic_refit.core.ids import ShardId, TrainerId
from elastic_refit.errors import ConfigError
from elastic_refit.matrix.cells import Cell, choose_cells, load_cells
from elastic_refit.matrix.validation import check_cells, why_not_run

OWN = Path(__file__).resolve().parents[3] / "configs" / "matrix.yaml"
MID = "id: mid, fault: kill, phase: 'bucket:2', outcome: recovers, names: [0], rule: 1"


def cell(**changes: Any) -> Cell:
    row = {"id": "x", "fault": "kill", "phase": "bucket:2", "outcome": "recovers", "names": [0], "rule": 1}
    return Cell.model_validate({key: value for key, value in {**row, **changes}.items() if value is not None})


def written(folder: Path, *rows: str, defaults: str = "{}") -> Path:
    path = folder / "cells.yaml"
    path.write_text(f"defaults: {defaults}\ncells:\n" + "".join(f"  - {{{row}}}\n" for row in rows))
    return path


def test_our_own_file_holds_no_impossible_cell_and_says_of_each_that_is_not_run_why() -> None:
    cells = load_cells(OWN)
    check_cells(cells)
    skipped = {each.id for each in cells if why_not_run(each) is not None}
    assert len(cells) > 90
    assert {"reshard-ok", "store-kill", "checkpoint-kill", "flapping", "node-loss", "scale-up", "drain"} <= skipped
    assert not skipped & {"kill-mid", "freeze-mid", "engine-kill-mid", "tp-one-rank-frozen", "coordinator-kill"}


def test_a_cell_has_the_defaults_of_its_file_unless_it_says_otherwise(tmp_path: Path) -> None:
    path = written(tmp_path, MID, f"{MID.replace('mid', 'two', 1)}, shards: 2", defaults="{trainers: 3, shards: 5}")
    first, second = load_cells(path)
    assert (first.trainers, first.num_shards) == (3, 5)
    assert (second.trainers, second.num_shards) == (3, 2)


def test_widths_say_how_many_shards_there_are_whatever_the_default(tmp_path: Path) -> None:
    (found,) = load_cells(written(tmp_path, f"{MID}, widths: [2, 1]", defaults="{shards: 3}"))
    check_cells([found])
    assert found.num_shards == 2


def test_a_note_may_hold_commas_and_nothing_else_may_come_in_that_way(tmp_path: Path) -> None:
    (found,) = load_cells(written(tmp_path, f"{MID}, note: answered, then died"))
    assert found.note == "answered, then died"
    with pytest.raises(ConfigError, match="there is no key then died"):
        load_cells(written(tmp_path, f"{MID}, note: answered, rebuilds: 1, then died"))


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (("id: mid, falut: kill, outcome: ends",), "cell mid: there is no key falut; the nearest is fault"),
        (("id: mid, fault: kill",), "cell mid: outcome is required"),
        (("fault: none, outcome: continues",), "cell number 1: id is required"),
        (("id: mid, fault: explode, outcome: ends",), "cell mid: fault"),
        (("id: mid, fault: kill, phase: ack, outcome: ends, refits: 0",), "cell mid: refits is 0; it must be greater"),
        ((MID, MID), "cell mid: the id is given 2 times"),
    ],
)
def test_a_mistake_in_a_row_is_one_sentence_with_the_cell_and_the_key(
    tmp_path: Path, rows: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_cells(written(tmp_path, *rows))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_default_that_is_no_key_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="defaults: there is no key trainer; the nearest is trainers"):
        load_cells(written(tmp_path, MID, defaults="{trainer: 2}"))


def test_chosen_cells_keep_the_order_of_the_file_and_an_unknown_one_is_a_mistake(tmp_path: Path) -> None:
    cells = load_cells(written(tmp_path, MID, MID.replace("mid", "late", 1)))
    assert [each.id for each in choose_cells(cells, ["late", "mid"])] == ["mid", "late"]
    assert choose_cells(cells, []) == cells
    assert [each.id for each in choose_cells(cells, ["m*"])] == ["mid"]
    assert choose_cells(cells, [], engine="torch") == cells
    assert choose_cells(cells, ["mid"], engine="vllm") == []
    with pytest.raises(ConfigError, match="there is no cell mit; the nearest is mid"):
        choose_cells(cells, ["mit"])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"victim": 3}, "victim names shard 3; shards are 0 to 2"),
        ({"victims": [0, 0]}, "victims names a shard twice"),
        ({"names": [4]}, "names names shard 4"),
        ({"trainer_victim": 2}, "trainer_victim is 2; trainers are 0 to 1"),
        ({"widths": [2, 1, 1], "rank_in_shard": 2}, "rank_in_shard is 2; shard 0 has 2 ranks"),
        ({"widths": [1, 1], "shards": 3}, "widths has 2 entries and shards is 3"),
        ({"min_healthy": 4}, "min_healthy is 4 and there are 3 shards"),
        ({"transport": "pigeon"}, "transport 'pigeon' is unknown; there are broadcast, "),
        ({"phase": None}, "phase is required"),
        ({"phase": "bucket:6"}, "phase is 'bucket:6'; there are 6 buckets, 0 to 5"),
        ({"phase": "somewhere"}, "phase cannot be: "),
        ({"phase": "packing"}, "phase cannot be: "),
        ({"fault": "corrupt", "phase": "idle"}, "phase cannot be: corrupt of shard"),
        ({"fault": "engine_kill"}, "fault is engine_kill, and the torch engine has no processes of its own"),
        ({"fault": "wedge", "actor": "ledger", "phase": "before"}, "kind cannot be: wedge of ledger"),
        ({"also": {"victim": 7, "fault": "kill", "phase": "ack"}}, "also (victim) is shard 7"),
        ({"then": {"victim": 1, "fault": "kill", "phase": "ack"}}, "then (phase) is 'ack'; a failure of the recovery"),
        ({"state": "DEAD"}, "state is DEAD: such a shard takes no part"),
        ({"fault": "partition"}, "between belongs to a partition"),
        ({"fault": "partition", "between": [0, 2]}, "between is [0, 2]; bytes travel between neighbours"),
        ({"thaw": "in_evidence"}, "thaw needs a freeze"),
        ({"fault": "none", "phase": None, "thaw": "after_stall"}, "thaw is given without a fault"),
        ({"outcome": "ends"}, "error is None; an outcome 'ends' names an error"),
        ({"outcome": "ends", "error": "Oops"}, "error is 'Oops'"),
        ({"error": "TrainerLost"}, "error is given, and the outcome is recovers"),
        ({"names": None}, "names is required where the outcome is recovers"),
        ({"rule": 6}, "rule 6 is none of 1 to 5"),
        ({"gathering": True, "trainers": 1}, "gathering needs at least two trainers"),
    ],
)
def test_a_cell_that_cannot_be_is_refused_by_its_key(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_cells([cell(), cell(**{**changes, "id": "odd"})])
    assert f"cell odd: {sentence}" in str(caught.value)


def test_what_needs_parts_that_are_not_there_yet_is_told_and_not_refused() -> None:
    for changes in ({"transport": "reshard"}, {"restart": True}, {"phase": "loaded"}, {"scale_to": 5}, {"drain": [0]}):
        asked = cell(**changes) if "drain" not in changes else cell(fault="none", phase=None, **changes)
        check_cells([asked])
        assert why_not_run(asked), changes


def test_every_fault_of_a_cell_is_a_blow_against_somebody() -> None:
    asked = cell(victims=[0, 2], also={"trainer_victim": 1, "fault": "freeze", "phase": "before"})
    assert [(blow.fault, blow.target, blow.is_then) for blow in asked.blows()] == [
        ("kill", ShardId(0), False),
        ("kill", ShardId(2), False),
        ("freeze", TrainerId(1), False),
    ]
    then = cell(actor="ledger", then={"victim": 1, "fault": "kill", "phase": "retry"}).blows()
    assert [(blow.target, blow.is_then) for blow in then] == [("ledger", False), (ShardId(1), True)]
    assert cell(fault="none", phase=None).blows() == ()
