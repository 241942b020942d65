"""The house style that no linter knows: sizes, names, docstrings, and tests that read as sentences."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path
    for folder in (ROOT / "elastic_refit", ROOT / "actors")
    for path in folder.rglob("*.py")
    if path.name != "_version.py" and not path.is_relative_to(ROOT / "elastic_refit" / "actors")
)
TESTS = sorted((ROOT / "tests").rglob("*.py"))

FUNCTION_CAP = 60
FILE_CAP, TEST_FILE_CAP, ACTOR_FILE_CAP = 500, 600, 200
ARGUMENT_CAP = 6
NESTING_CAP = 3
EMPTY_NAMES = re.compile(r"(^|_)(utils?|managers?|helpers?)(_|$)|^(handle|process)_|([a-z]|^)(Manager|Helper|Utils?)$")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Block = ast.If | ast.For | ast.AsyncFor | ast.While | ast.With | ast.AsyncWith | ast.Try | ast.Match


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def functions_of(path: Path) -> Iterator[Function]:
    return (node for node in ast.walk(tree_of(path)) if isinstance(node, Function))


def place(path: Path, node: Function | ast.ClassDef | ast.expr) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno} {getattr(node, 'name', '')}".rstrip()


def length(function: Function) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def nesting(node: ast.AST, depth: int = 0) -> int:
    """How deep blocks lie inside ``node``; an ``elif`` is no deeper than its ``if``, a nested function starts anew."""
    deepest = depth
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, Function):
                continue
            chained = isinstance(node, ast.If) and field == "orelse" and isinstance(child, ast.If)
            deepest = max(deepest, nesting(child, depth + (isinstance(child, Block) and not chained)))
    return deepest


def outside_loops(node: ast.AST) -> Iterator[ast.AST]:
    """Every node under ``node`` that is not inside a ``while``."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.While):
            yield child
            yield from outside_loops(child)


def arguments(function: Function) -> int:
    """How many arguments ``function`` takes, without ``self``."""
    names = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def test_no_function_is_longer_than_the_cap() -> None:
    long = [(length(f), place(path, f)) for path in SOURCES + TESTS for f in functions_of(path)]
    assert [item for item in long if item[0] > FUNCTION_CAP] == []


def test_half_of_all_functions_keep_the_aim_of_twenty_lines(record_property: Callable[[str, object], None]) -> None:
    lengths = sorted(length(function) for path in SOURCES for function in functions_of(path))
    record_property("median_function_lines", lengths[len(lengths) // 2])
    assert lengths[len(lengths) // 2] <= 20


def test_no_file_is_longer_than_its_cap() -> None:
    def cap(path: Path) -> int:
        if path in TESTS:
            return TEST_FILE_CAP
        return ACTOR_FILE_CAP if path.is_relative_to(ROOT / "actors") else FILE_CAP

    lines = {path: len(path.read_text().splitlines()) for path in SOURCES + TESTS}
    assert {str(path.relative_to(ROOT)): count for path, count in lines.items() if count > cap(path)} == {}


def test_no_function_takes_more_than_six_arguments() -> None:
    crowded = [(arguments(f), place(path, f)) for path in SOURCES + TESTS for f in functions_of(path)]
    assert [item for item in crowded if item[0] > ARGUMENT_CAP] == []


def test_blocks_are_nested_no_deeper_than_three() -> None:
    deep = [(nesting(f), place(path, f)) for path in SOURCES + TESTS for f in functions_of(path)]
    assert [item for item in deep if item[0] > NESTING_CAP] == []


def test_no_module_class_or_function_has_an_empty_name() -> None:
    names = [(path.stem, str(path.relative_to(ROOT))) for path in SOURCES]
    for path in SOURCES:
        nodes = (node for node in ast.walk(tree_of(path)) if isinstance(node, Function | ast.ClassDef))
        names += [(node.name, place(path, node)) for node in nodes]
    assert [where for name, where in names if EMPTY_NAMES.search(name)] == []


def test_every_module_says_what_it_owns() -> None:
    empty = [path for path in SOURCES if tree_of(path).body and not ast.get_docstring(tree_of(path))]
    assert [str(path.relative_to(ROOT)) for path in empty] == []


def test_every_test_name_is_a_sentence() -> None:
    short = [
        place(path, function)
        for path in TESTS
        for function in functions_of(path)
        if function.name.startswith("test_") and len(function.name.removeprefix("test_").split("_")) < 3
    ]
    assert short == []


def test_a_test_sleeps_only_between_two_looks_at_a_condition() -> None:
    sleeps = [
        place(path, node)
        for path in TESTS
        for node in outside_loops(tree_of(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("time.sleep", "sleep", "asyncio.sleep")
        if node.args and ast.unparse(node.args[0]) != "0"
    ]
    assert sleeps == []


def test_a_skip_names_the_missing_hardware() -> None:
    skips = [
        place(path, node)
        for path in TESTS
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and node.attr in ("skip", "skipif", "importorskip")
        if not path.is_relative_to(ROOT / "tests" / "gpu")
    ]
    assert skips == []
