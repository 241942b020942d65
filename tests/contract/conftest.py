"""Engines in the test process: their environment must be set before anything imports torch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_refit.engines.vllm_terms import vllm_environment
from tests.standin_nccl.library import build_library

for name, value in vllm_environment(is_inline=True).items():
    os.environ.setdefault(name, value)


pytest.register_assert_rewrite("tests.engine_suite")


@pytest.fixture(scope="session")
def libnccl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in for NCCL."""
    return build_library(tmp_path_factory.mktemp("libnccl"))
