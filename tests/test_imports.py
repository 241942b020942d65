"""What an import may pull in, and what policy may touch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = {"ray", "torch", "transformers", "vllm"}
CORE = sorted((ROOT / "elastic_refit" / "core").glob("*.py"))
LIGHT_MODULES = [
    "elastic_refit",
    "elastic_refit.cli",
    "elastic_refit.config",
    "elastic_refit.errors",
    *(f"elastic_refit.core.{path.stem}" for path in CORE if path.stem != "__init__"),
]
IMPURE = {
    *("asyncio", "concurrent", "datetime", "io", "logging", "multiprocessing", "os", "pathlib", "queue", "random"),
    *("secrets", "selectors", "shutil", "signal", "socket", "subprocess", "tempfile", "threading", "time", "uuid"),
}


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)


def imported_by(path: Path) -> set[str]:
    """Every module that ``path`` imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_importing_a_light_module_loads_no_heavy_library(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


def test_actors_under_their_folder_name_refuse_to_be_imported() -> None:
    result = run_python("import actors")
    assert result.returncode == 1
    assert "import elastic_refit.actors instead" in result.stderr


def test_actors_import_under_the_package_name() -> None:
    result = run_python("import elastic_refit.actors as actors; print(actors.__name__)")
    assert result.stdout.split() == ["elastic_refit.actors"], result.stderr


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.stem)
def test_a_core_module_imports_only_pure_standard_library_and_errors(path: Path) -> None:
    forbidden = {
        name
        for name in imported_by(path)
        if not name.startswith("elastic_refit.core.") and name not in ("elastic_refit.core", "elastic_refit.errors")
        if name.partition(".")[0] in IMPURE or name.partition(".")[0] not in sys.stdlib_module_names
    }
    assert forbidden == set()
