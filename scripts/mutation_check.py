"""Break the policy in one place at a time and see that some unit test fails for every break.

    python scripts/mutation_check.py --target ledger         each cell of the ledger's transition table
    python scripts/mutation_check.py --target ledger-rules   each comparison in the ledger's rules
    python scripts/mutation_check.py --target attribution    each comparison in attribution

Every mutant lives in a forked child, so that nothing is written and the interpreter starts once. Exits 1 and names the
mutants that no test noticed, 2 if the tests fail without any.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import os
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
CORE = "elastic_refit.core"
MUTANT_TIMEOUT_S = 120
PYTEST = (
    *("-x", "-q", "--import-mode=importlib", "-p", "no:cacheprovider", "-p", "_hypothesis_pytestplugin"),
    *("-c", os.devnull, f"--rootdir={ROOT}"),
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One break. ``install`` is called in the child, before any test is imported."""

    name: str
    install: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Target:
    """What is broken, and the tests that have to notice: glob patterns under ``tests/unit/core``."""

    mutants: Callable[[], Iterator[Mutant]]
    tests: tuple[str, ...]


def table_mutants() -> Iterator[Mutant]:
    """Every cell of the transition table, turned into what would hurt."""
    from elastic_refit.core.ledger_table import TABLE, Input, ShardState

    for each, row in TABLE.items():
        is_landing = each in (Input.LANDED, Input.LANDED_IN_DOUBT, Input.LEFT_OUT)
        for state in ShardState:
            for wrong in _wrong_cells(row[state], state.name, is_landing=is_landing):
                cells: list[Any] = list(row)
                cells[state] = ShardState.__members__.get(wrong, wrong)
                name = f"{each.name} in {state.name}: {row[state]} -> {wrong}"
                yield Mutant(name, partial(TABLE.__setitem__, each, tuple(cells)))


def _wrong_cells(cell: object, state: str, *, is_landing: bool) -> Iterator[str]:
    """``keep`` and ``skip`` are the same to a landing, which notes nothing; ``never`` cannot be reached."""
    if cell == "never":
        return
    wrong_state = "DEAD" if state == "HEALTHY" else "HEALTHY"
    if str(cell) != wrong_state:
        yield wrong_state
    if cell == "keep" and not is_landing:
        yield "skip"
    elif cell != "keep" and not (cell == "skip" and is_landing):
        yield "keep"


FLIPS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}


def comparison_mutants(*modules: str) -> Callable[[], Iterator[Mutant]]:
    """Every comparison operator in ``modules``, moved by one and turned round."""

    def mutants() -> Iterator[Mutant]:
        for module in modules:
            path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
            source = path.read_text()
            for number, node in enumerate(_comparisons(ast.parse(source))):
                for at, operator in enumerate(node.ops):
                    for flipped in FLIPS[type(operator)]:
                        name = (
                            f"{path.name}:{node.lineno}: {ast.unparse(node)}: {_word(operator)} -> {_word(flipped())}"
                        )
                        yield Mutant(name, _Replacement(module, source, number, at, flipped).install)

    return mutants


@dataclass(frozen=True, slots=True)
class _Replacement:
    """A module with the ``at``-th operator of its ``number``-th comparison exchanged."""

    module: str
    source: str
    number: int
    at: int
    flipped: type[ast.cmpop]

    def install(self) -> None:
        tree = ast.parse(self.source)
        _comparisons(tree)[self.number].ops[self.at] = self.flipped()
        module = types.ModuleType(self.module)
        module.__package__, _, name = self.module.rpartition(".")
        package = importlib.import_module(module.__package__)
        sys.modules[self.module] = module
        setattr(package, name, module)
        exec(compile(tree, f"<mutant of {self.module}>", "exec"), module.__dict__)


def _comparisons(tree: ast.AST) -> list[ast.Compare]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Compare)]


def _word(operator: ast.cmpop) -> str:
    return type(operator).__name__


TARGETS = {
    "ledger": Target(table_mutants, ("test_ledger_table.py", "test_ledger_[!t]*.py")),
    "ledger-rules": Target(
        comparison_mutants(*(f"{CORE}.ledger_{part}" for part in ("shards", "refits", "draft", "queries", "parts"))),
        ("test_ledger*.py",),
    ),
    "attribution": Target(comparison_mutants(f"{CORE}.attribution"), ("test_attribution*.py",)),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=sorted(TARGETS), required=True)
    target = TARGETS[parser.parse_args().target]
    sys.path[:0] = [str(ROOT)]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    folder = ROOT / "tests" / "unit" / "core"
    tests = [str(path) for pattern in target.tests for path in sorted(folder.glob(pattern))]
    if not tests or not _passes(lambda: None, tests):
        _say(f"the tests fail without a mutant: {' '.join(tests) or target.tests}")
        return 2
    began_s = time.monotonic()
    survivors, num_mutants = [], 0
    for mutant in target.mutants():
        num_mutants += 1
        if _passes(mutant.install, tests):
            survivors.append(mutant.name)
            _say(f"survived: {mutant.name}")
    took_s = time.monotonic() - began_s
    _say(f"{num_mutants - len(survivors)} of {num_mutants} mutants were noticed, in {took_s:.0f} s")
    return 1 if survivors or not num_mutants else 0


def _passes(install: Callable[[], None], tests: list[str]) -> bool:
    """Whether all tests pass in a child that ran ``install``; a child that hangs is ended and does not."""
    pid = os.fork()
    if pid == 0:
        os._exit(_child(install, tests))
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) == 0


def _child(install: Callable[[], None], tests: list[str]) -> int:
    signal.alarm(MUTANT_TIMEOUT_S)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    try:
        install()
        return int(pytest.main([*PYTEST, *tests]))
    except BaseException:  # noqa: BLE001 - a mutant that cannot even be imported is noticed; the fork must end here either way
        return 1


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
