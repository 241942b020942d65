"""What every test run has: a printed hypothesis seed, and no process left behind.

The run marks its environment. Whatever it starts inherits the mark, and keeps it when it is re-parented, so at the end
every process of this run is found, and none of anybody else's.
"""

from __future__ import annotations

import os
import random
import uuid
from collections.abc import Iterator, Mapping

import hypothesis
import psutil
import pytest

from elastic_refit.processes import is_living

RUN_MARK = "ELASTIC_REFIT_TEST_RUN"
LONGEST_FIRST = ("vllm", "integration", "contract", "model", "property")
leftovers = pytest.StashKey[list[str]]()
run_id = pytest.StashKey[str]()

hypothesis.settings.register_profile("elastic_refit", deadline=None, print_blob=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("settle_s", "how long what the tests told to end may take, once the last test is over", default="15")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("elastic_refit")
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(random.getrandbits(32))
    config.stash[run_id] = uuid.uuid4().hex
    os.environ[RUN_MARK] = " ".join([*marks_in(os.environ), config.stash[run_id]])


def pytest_report_header(config: pytest.Config) -> str:
    return f"repeat the random tests with --hypothesis-seed={config.option.hypothesis_seed}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that of several workers none is left with them at the end."""
    items.sort(
        key=lambda item: LONGEST_FIRST.index(folder) if (folder := item.path.parent.name) in LONGEST_FIRST else 9
    )


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """End what the tests left running, and fail the run for it.

    One of several workers leaves this to the run that started it, whose mark its processes have too.
    """
    if hasattr(session.config, "workerinput"):
        return
    started = list(processes_of(session.config.stash[run_id]))
    _, alive = psutil.wait_procs(started, timeout=float(session.config.getini("settle_s")))
    alive = [process for process in alive if is_living(process)]
    session.config.stash[leftovers] = [describe(process) for process in alive]
    for process in alive:
        process.kill()
    if alive:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left := config.stash.get(leftovers, []):
        terminalreporter.section("processes left behind", red=True)
        for line in left:
            terminalreporter.line(line)


def marks_in(environment: Mapping[str, str]) -> list[str]:
    """The marks of the runs that started a process: a test may run pytest, which marks its own."""
    return environment.get(RUN_MARK, "").split()


def processes_of(mark: str) -> Iterator[psutil.Process]:
    """Every live process that was started with ``mark``; multiprocessing's own tracker ends with this process."""
    for process in psutil.process_iter():
        try:
            if mark not in marks_in(process.environ()) or not is_living(process):
                continue
            if "multiprocessing.resource_tracker" not in " ".join(process.cmdline()):
                yield process
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


def describe(process: psutil.Process) -> str:
    try:
        return f"pid {process.pid}, parent {process.ppid()}: {' '.join(process.cmdline())[:200]}"
    except psutil.NoSuchProcess:
        return f"pid {process.pid}"
