"""One small Ray cluster per module: no dashboard, short socket paths, no token."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

os.environ["RAY_AUTH_MODE"] = "disabled"
if "RAY_TMPDIR" not in os.environ:
    os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="er", dir="/tmp")
    atexit.register(shutil.rmtree, os.environ["RAY_TMPDIR"], ignore_errors=True)


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()
