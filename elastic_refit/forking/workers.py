"""Has the Ray that a process starts fork its workers."""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from elastic_refit.forking import launch

__all__ = ["VLLM_MODULES", "WORKER_MODULES", "forked_workers"]

WORKER_MODULES = (
    *("torch", "filelock", "google.protobuf.descriptor_pb2", "jsonschema", "msgpack", "psutil", "requests", "uvloop"),
    *("yaml", "zmq", "elastic_refit.communicators.tcp", "elastic_refit.control", "elastic_refit.engines.plain_lm"),
    *("elastic_refit.participant", "elastic_refit.rank_seat", "elastic_refit.transports.packing"),
)
"""What a worker of a fleet imports, as far as it does not need Ray for it."""

VLLM_MODULES = ("vllm.engine.arg_utils",)
"""Most of what the actor of a vLLM shard imports besides; vLLM starts the processes of its engine itself."""

_ENDS_S = 10.0


@contextmanager
def forked_workers(*modules: str) -> Iterator[None]:
    """Every Ray that this process starts in the ``with`` body has workers that have imported ``modules`` already.

    Ray's own parameter for the script that sets up a worker is used, which ``ray.init`` does not pass on.

    Raises:
        OSError: the server could not import them; what it said is on standard error.
    """
    import ray

    parameters = importlib.import_module("ray._private.parameter").RayParams
    ordinary = Path(ray.__file__).parent / "_private" / "workers" / "setup_worker.py"
    with_launch = functools.partialmethod(parameters.__init__, setup_worker_path=launch.__file__)
    with tempfile.TemporaryDirectory(prefix="elastic-refit-fork-") as folder:
        address = f"{folder}/server"
        variables = {launch.ADDRESS_VARIABLE: address, launch.ORDINARY_VARIABLE: str(ordinary)}
        with _server(address, modules), patch.object(parameters, "__init__", with_launch), _environment(variables):
            yield


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set these, and nothing else: Ray sets some of its own meanwhile, which must stay."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _server(address: str, modules: tuple[str, ...]) -> Iterator[None]:
    command = [sys.executable, "-m", "elastic_refit.forking.server", address, *modules]
    # One thread: libraries start theirs when they are imported. A group of its own: Ctrl-C in a terminal is not for it.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, process_group=0
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            if server.stdout.readline() != launch.READY:
                raise OSError(f"the process that workers are forks of ended at once: {' '.join(command)}")
            yield
        finally:
            server.stdin.close()
            server.wait(_ENDS_S)
