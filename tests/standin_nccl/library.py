"""A libnccl.so.2 for machines without a GPU: built from the C files here, loaded by the real nccl4py.

A process has it if it was started under ``environment``: preloaded, so that it is found before any that is installed.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.standin_nccl.host_memory import SONAME

__all__ = ["build_library", "environment"]

SOURCES = sorted(Path(__file__).parent.glob("*.c"))


def build_library(folder: Path) -> Path:
    """Compile it into ``folder``."""
    compiler = shutil.which("cc")
    assert compiler, "the tests of the nccl communicator need a C compiler called cc (on Debian: gcc and libc6-dev)"
    library = folder / SONAME
    flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-fPIC", "-shared", "-pthread", f"-Wl,-soname,{SONAME}"]
    command = [compiler, *flags, "-o", str(library), *map(str, SOURCES)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return library


@contextmanager
def environment(library: Path, **switches: str) -> Iterator[None]:
    """What processes started inside load; for the ``switches`` see nccl.c."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(library))
        for name, value in switches.items():
            patch.setenv(f"STANDIN_NCCL_{name}", value)
        yield
