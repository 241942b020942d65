"""Configuration: defaults, the file, ``--set``, and one sentence for each mistake."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
from pydantic import ValidationError

from elastic_refit.config import LedgerConfig, RunConfig, Section, export_schema, load_config
from elastic_refit.core.deadlines import Deadlines, check
from elastic_refit.core.ledger_state import LedgerPolicy
from elastic_refit.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"


def load(tmp_path: Path, text: str, *overrides: str) -> RunConfig:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, overrides, model=RunConfig)


def complaint(tmp_path: Path, text: str, *overrides: str) -> str:
    """The sentence about a configuration that cannot be used, without the folder."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *overrides)
    assert "\n" not in caught.value.message
    return caught.value.message.replace(f"{tmp_path}/", "")


# -- what ships


def test_the_example_loads_and_says_what_its_comments_say() -> None:
    config = load_config(CONFIGS / "run.yaml", model=RunConfig)
    assert config.fleet.shards == len(config.fleet.widths or [])
    assert config.refit.bucket_bytes == 64 << 20
    assert config.engine.options["max_model_len"] == 4096


def test_the_committed_schema_is_the_one_of_the_code() -> None:
    committed = json.loads((CONFIGS / "run.schema.json").read_text())
    assert committed == export_schema(RunConfig)


def test_every_setting_is_described_in_the_schema_and_closed_to_unknown_keys() -> None:
    schema = export_schema(RunConfig)
    sections = schema["$defs"].values()
    assert all(section["additionalProperties"] is False for section in (schema, *sections))
    undescribed = [
        name for section in sections for name, field in section["properties"].items() if "description" not in field
    ]
    assert undescribed == []


def test_the_defaults_hold_the_algebra_and_protect_the_first_refit() -> None:
    config = RunConfig()
    check(config.deadlines.limits)
    assert config.deadlines.bandwidth.bytes_per_s == config.deadlines.bandwidth_floor_bytes_per_s
    assert config.deadlines.limits.driver_s(config.refit.max_recoveries_per_refit) < float("inf")


def test_the_configured_limits_are_all_limits_there_are() -> None:
    limits = RunConfig().deadlines.limits
    assert {each.name: getattr(limits, each.name) for each in fields(Deadlines)} == {
        each.name: getattr(RunConfig().deadlines, each.name) for each in fields(Deadlines)
    }


def test_the_ledgers_policy_takes_every_setting_of_its_section() -> None:
    policy = LedgerPolicy(**LedgerConfig().model_dump())
    assert policy == LedgerPolicy()


# -- precedence


def test_a_file_changes_what_it_names_and_nothing_else(tmp_path: Path) -> None:
    config = load(tmp_path, "fleet:\n  shards: 5\n")
    assert config == RunConfig.model_validate({"fleet": {"shards": 5}})
    assert config.refit == RunConfig().refit


def test_set_wins_over_the_file_and_a_later_set_over_an_earlier_one(tmp_path: Path) -> None:
    assert load(tmp_path, "fleet: {shards: 5}", "fleet.shards=6", "fleet.shards=7").fleet.shards == 7


def test_without_a_file_there_are_defaults_and_overrides() -> None:
    assert load_config(None, model=RunConfig) == RunConfig()
    assert load_config(None, ["refit.commit=staged"], model=RunConfig).refit.commit == "staged"


def test_values_of_overrides_are_yaml(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "fleet: {shards: 2}",
        "fleet.widths=[1, 2]",
        "ray.dashboard_port=null",
        "deadlines.bandwidth_floor_bytes_per_s=1e6",
        "engine.options.enforce_eager=true",
    )
    assert config.fleet.widths == [1, 2]
    assert config.ray.dashboard_port is None
    assert config.deadlines.bandwidth_floor_bytes_per_s == 1e6
    assert config.engine.options == {"enforce_eager": True}


def test_a_section_whose_keys_are_all_commented_out_has_its_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, "fleet:\n  # shards: 5\nrefit:\n", "fleet.shards=4").fleet.shards == 4
    assert load(tmp_path, "deadlines:\n") == RunConfig()


def test_options_of_the_engine_pass_as_they_are(tmp_path: Path) -> None:
    text = "engine: {options: {hf_overrides: {a: null}, gpu_memory_utilization: 0.5}}"
    assert load(tmp_path, text).engine.options == {"hf_overrides": {"a": None}, "gpu_memory_utilization": 0.5}


def test_a_loaded_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        RunConfig().fleet.shards = 4  # type: ignore[misc]


def test_a_model_with_more_sections_loads_the_same_way(tmp_path: Path) -> None:
    class Loop(Section):
        steps: int = 1

    class Larger(RunConfig):
        loop: Loop = Loop()

    config = load_config(None, ["loop.steps=3", "fleet.shards=4"], model=Larger)
    assert (config.loop.steps, config.fleet.shards) == (3, 4)


# -- mistakes

CANNOT_BE_USED = [
    ("fleet: {shrads: 3}", "run.yaml: there is no setting fleet.shrads; the nearest is fleet.shards"),
    ("min_healthy: 2", "run.yaml: there is no setting min_healthy; the nearest is fleet.min_healthy"),
    ("xyz: 2", "run.yaml: there is no setting xyz; there are fleet, refit, deadlines, ledger, engine, ray, chaos"),
    (
        "fleet: {zzzz: 1}",
        "run.yaml: there is no setting fleet.zzzz; "
        "there are fleet.trainers, fleet.shards, fleet.widths, fleet.min_healthy",
    ),
    ("fleet: {shards: 0}", "run.yaml: fleet.shards is 0; it must be greater than or equal to 1"),
    ("fleet: {shards: true}", "run.yaml: fleet.shards is true; it must be a valid integer"),
    ("fleet: {widths: [1, 0, 1]}", "run.yaml: fleet.widths.1 is 0; it must be greater than or equal to 1"),
    ("fleet: {widths: [1]}", "run.yaml: fleet: widths has 1 entries and shards is 3; they must be equal"),
    ("fleet: {min_healthy: 4}", "run.yaml: fleet: min_healthy (4) must not be above shards (3)"),
    ("fleet: 3", "run.yaml: fleet is 3; it must be a mapping of settings"),
    ("engine: {options: 3}", "run.yaml: engine.options is 3; it must be a mapping of settings"),
    ("refit: {commit: fast}", "run.yaml: refit.commit is \"fast\"; it must be 'streamed' or 'staged'"),
    ("refit: {bucket_bytes: 17}", "run.yaml: refit.bucket_bytes is 17; it must be a multiple of 16"),
    ("deadlines: {ping_s: .inf}", "run.yaml: deadlines.ping_s is Infinity; it must be a finite number"),
    ("deadlines: {ping_s: 0}", "run.yaml: deadlines.ping_s is 0; it must be greater than 0"),
    (
        "deadlines: {bandwidth_cap_bytes_per_s: 10}",
        "run.yaml: deadlines: bandwidth_cap_bytes_per_s (10) must be at least bandwidth_floor_bytes_per_s (1e+08)",
    ),
    (
        "ledger: {suspect_after_probes: 4}",
        "run.yaml: ledger: dead_after_probes (3) must be at least suspect_after_probes (4)",
    ),
    (
        "ledger: {suspect_after_requests: 4}",
        "run.yaml: ledger: dead_after_requests (3) must be at least suspect_after_requests (4)",
    ),
    (
        "fleet: {shards: 0, trainers: 0}",
        "run.yaml: fleet.trainers is 0; it must be greater than or equal to 1 (and 1 more)",
    ),
    ("3: x", "run.yaml: 3 is a setting's name and must be text"),
    ("- a", "run.yaml: must be a mapping of settings, not a list"),
    ("", "run.yaml: is empty; it must hold at least one setting"),
    ("# only a comment\n", "run.yaml: is empty; it must hold at least one setting"),
    ("fleet:\n  shards: [1", "run.yaml: line 2: expected ',' or ']', but got '<stream end>'"),
    ("fleet: {}\n\tray: {}", "run.yaml: line 2: found character '\\t' that cannot start any token"),
    ("fleet:\n  shards: 1\n  shards: 2", "run.yaml: line 3: shards is given twice"),
    ("a: !!python/name:os.system", "run.yaml: line 1: could not determine a constructor for the tag "),
]


@pytest.mark.parametrize(("text", "sentence"), CANNOT_BE_USED)
def test_a_mistake_is_one_sentence_with_the_field_its_value_and_what_is_allowed(
    tmp_path: Path, text: str, sentence: str
) -> None:
    if sentence.endswith(" "):
        assert complaint(tmp_path, text).startswith(sentence)
    else:
        assert complaint(tmp_path, text) == sentence


def test_limits_that_contradict_each_other_are_rejected_with_both_names_and_numbers(tmp_path: Path) -> None:
    assert complaint(tmp_path, "deadlines: {abort_s: 10}") == (
        "run.yaml: deadlines: abort_s (10 s) must be at least finalize_s + evidence_s + fence_s + order_s (20.5 s): "
        "a rank that overstays its phase must be named before the others abort"
    )


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("fleet.shards=x", '--set fleet.shards=x: fleet.shards is "x"; it must be a valid integer'),
        (
            "fleet.widths=[1,2,0]",
            "--set fleet.widths=[1,2,0]: fleet.widths.2 is 0; it must be greater than or equal to 1",
        ),
        (
            "fleet.min_healthy=9",
            "run.yaml with --set fleet.min_healthy=9: fleet: min_healthy (9) must not be above shards (3)",
        ),
        ("shards=1", "--set shards=1: there is no setting shards; the nearest is fleet.shards"),
        ("fleet.shards", "--set fleet.shards: must have the form section.field=value"),
        ("fleet..shards=1", "--set fleet..shards=1: must have the form section.field=value"),
        ("=1", "--set =1: must have the form section.field=value"),
        (
            "fleet.shards=[1",
            "--set fleet.shards=[1: the value is not YAML: expected ',' or ']', but got '<stream end>'",
        ),
        ("fleet.trainers.x=1", "--set fleet.trainers.x=1: trainers is 2, not a section with settings"),
    ],
)
def test_a_mistake_in_an_override_names_the_override(tmp_path: Path, override: str, sentence: str) -> None:
    assert complaint(tmp_path, "fleet: {trainers: 2}", override) == sentence


def test_an_override_elsewhere_is_not_blamed_for_the_file(tmp_path: Path) -> None:
    assert complaint(tmp_path, "fleet: {shards: 0}", "fleet.trainers=2").startswith("run.yaml: fleet.shards")


def test_a_long_value_is_cut_in_the_sentence(tmp_path: Path) -> None:
    sentence = complaint(tmp_path, f"fleet: {{shards: {'x' * 500}}}")
    assert len(sentence) < 200
    assert sentence.endswith("...; it must be a valid integer")


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff")
    for path, why in (
        (tmp_path / "missing.yaml", "there is no such file"),
        (tmp_path, "cannot be read: Is a directory"),
        (tmp_path / "latin.yaml", "is not UTF-8 text: invalid start byte at byte 3"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(path, model=RunConfig)
        assert caught.value.message == f"{path}: {why}"
