"""Engines by name, and what is said when one cannot be had."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from elastic_refit.engines.base import Hosting
from elastic_refit.engines.registry import build_engine, is_inline, require_engine
from elastic_refit.engines.vllm_process import fitting_options
from elastic_refit.engines.vllm_terms import require_known, vllm_environment
from elastic_refit.errors import ConfigError

find_spec = importlib.util.find_spec


def hide(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    def without(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == library else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)


def test_an_unknown_engine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'sglang' is unknown; use one of vllm, torch"):
        build_engine("sglang", "model", {})


def test_without_vllm_the_sentence_says_how_to_get_it_and_how_to_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "vllm")
    with pytest.raises(ConfigError, match=r"vLLM is not installed: pip install 'elastic-refit\[cpu\]'.*--engine torch"):
        require_engine("vllm")
    require_engine("torch")


def test_without_transformers_no_engine_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "transformers")
    with pytest.raises(ConfigError, match="transformers is not installed"):
        require_engine("torch")


def test_a_missing_model_is_found_before_anything_is_loaded(tmp_path: Path) -> None:
    for kind in ("vllm", "torch"):
        with pytest.raises(ConfigError, match="no directory"):
            build_engine(kind, str(tmp_path / "nowhere"), {})


def test_an_option_that_the_torch_engine_does_not_know_is_named() -> None:
    with pytest.raises(ConfigError, match="'enforce_eager'"):
        build_engine("torch", "model", {"enforce_eager": True})


def test_naming_an_engine_and_asking_for_its_environment_imports_nothing_heavy() -> None:
    modules = "base checkpoint gate registry update vllm_engine"
    imports = ", ".join(f"elastic_refit.engines.{name}" for name in modules.split())
    loaded = "{'ray', 'torch', 'transformers', 'vllm'} & set(sys.modules)"
    code = f"import sys, elastic_refit.demo.tiny_model, {imports}; print({loaded})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "set()"


def test_the_vllm_environment_keeps_the_engine_in_its_process_and_off_the_network() -> None:
    environment = vllm_environment(is_inline=True)
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert environment["HF_HUB_OFFLINE"] == environment["VLLM_NO_USAGE_STATS"] == "1"


def test_a_vllm_that_nobody_has_looked_at_is_refused_by_name() -> None:
    for known in ("0.32.0", "0.33.1+cpu"):
        require_known(known)
    for unknown in ("0.31.2", "0.34.0", "1.0"):
        with pytest.raises(ConfigError, match=rf"vLLM {unknown} is unknown .* knows 0.32, 0.33"):
            require_known(unknown)


def test_an_engine_lives_where_it_is_told_and_else_where_its_kind_does() -> None:
    assert [is_inline(kind, Hosting()) for kind in ("vllm", "torch")] == [False, True]
    assert not is_inline("torch", Hosting(width=2))
    assert is_inline("vllm", Hosting(process="inline"))
    with pytest.raises(ConfigError, match="one rank"):
        build_engine("torch", "model", {}, hosting=Hosting(width=2, process="inline"))


def test_the_ranks_of_a_vllm_engine_are_those_of_its_parallelism(tmp_path: Path) -> None:
    assert fitting_options({}, 4) == {"tensor_parallel_size": 4}
    assert fitting_options({"pipeline_parallel_size": 2}, 4)["tensor_parallel_size"] == 2
    for options in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 3}, {"data_parallel_size": 2}):
        with pytest.raises(ConfigError, match="_parallel_size"):
            fitting_options(options, 4)
