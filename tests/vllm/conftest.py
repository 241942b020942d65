"""Engines in the test process: their environment must be set before anything imports torch."""

from __future__ import annotations

import os

import pytest

from elastic_refit.engines.vllm_terms import vllm_environment

for name, value in vllm_environment(is_inline=True).items():
    os.environ.setdefault(name, value)

pytest.register_assert_rewrite("tests.engine_suite")
