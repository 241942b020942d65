"""What is built is what is in the tree, and its entry points lead somewhere."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENTRY_POINTS = {
    "console_scripts": {"elastic-refit": "elastic_refit.cli:main"},
    "vllm.general_plugins": {"elastic_refit": "elastic_refit.engines.vllm_worker:register"},
}


def build_wheel(tree: Path, into: Path) -> zipfile.ZipFile:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    result = subprocess.run([*command, "--wheel-dir", into, tree], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    (path,) = into.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy of the tracked files, as they lie: without .git, so without a tag to name the version."""
    tree, into = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        if (source := ROOT / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, tree / name, follow_symlinks=False)
    return build_wheel(tree, into)


def modules_in_tree() -> set[str]:
    own = {path.relative_to(ROOT).as_posix() for path in (ROOT / "elastic_refit").rglob("*.py")}
    shell = {f"elastic_refit/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "actors").rglob("*.py")}
    return own | shell


def entry_points(wheel: zipfile.ZipFile) -> dict[str, dict[str, str]]:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))
    parser = configparser.ConfigParser(delimiters=["="])
    parser.read_string(wheel.read(name).decode())
    return {section: dict(parser[section]) for section in parser.sections()}


def test_the_wheel_holds_every_module_of_the_tree_and_no_other(wheel: zipfile.ZipFile) -> None:
    built = {name for name in wheel.namelist() if name.endswith(".py")}
    generated = {"elastic_refit/_version.py"}
    assert built - generated == modules_in_tree() - generated
    assert "elastic_refit/actors/__init__.py" in built


def test_the_wheel_carries_every_shipped_configuration(wheel: zipfile.ZipFile) -> None:
    shipped = {f"elastic_refit/configs/{path.name}" for path in (ROOT / "configs").iterdir()}
    assert shipped
    assert shipped - set(wheel.namelist()) == set()


def test_the_wheel_installs_one_top_level_package(wheel: zipfile.ZipFile) -> None:
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"elastic_refit"}


def test_the_wheel_says_that_it_is_typed_and_carries_its_licence(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert "elastic_refit/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_a_tree_without_git_builds_under_the_fallback_version(wheel: zipfile.ZipFile) -> None:
    assert "'0.1.0.dev0'" in wheel.read("elastic_refit/_version.py").decode()


def test_every_entry_point_names_a_function_that_the_wheel_defines(wheel: zipfile.ZipFile) -> None:
    assert entry_points(wheel) == ENTRY_POINTS
    for target in (target for group in ENTRY_POINTS.values() for target in group.values()):
        module, _, function = target.partition(":")
        assert f"def {function}(" in wheel.read(f"{module.replace('.', '/')}.py").decode()
