"""The process that workers are forks of: imports, listens, forks, and ends with the process that started it.

What must never happen here: a fork of a process with several threads, in which a lock may be held by nobody for ever.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_refit.forking.launch import FORKED, READY

__all__ = ["main"]

_REQUEST_S = 10.0
_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class Wanted:
    """A worker: the arguments of Ray's setup script, and where it is to run. ``output``: two open descriptors."""

    argv: list[str]
    environment: dict[str, str]
    folder: str
    group: int
    output: tuple[int, int]


def main(address: str, modules: list[str]) -> None:
    """Import ``modules``, then serve at the socket ``address`` until standard input is closed.

    The socket is in a folder of its own, which is removed with it.

    Raises:
        ImportError: one of them cannot be imported, or imports Ray, which reads a worker's variables when imported.
    """
    for module in modules:
        importlib.import_module(module)
        if "ray" in sys.modules:
            raise ImportError(f"{module} imports ray, which a worker must do for itself")
    gc.freeze()
    wanted = _serve(address)
    if wanted is None:
        shutil.rmtree(Path(address).parent, ignore_errors=True)  # the one who made it may have been killed
        os._exit(0)  # some libraries list what they leak when an interpreter ends
    else:
        _become(wanted)


def _serve(address: str) -> Wanted | None:
    """Returns in every fork whom it is to be, and in the server itself None once its standard input is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a fork that has ended is no zombie
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, selectors.DefaultSelector() as selector:
        listener.bind(address)
        listener.listen()
        selector.register(listener, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        os.write(1, READY)
        while sys.stdin not in {key.fileobj for key, _ in selector.select()}:
            link, _ = listener.accept()
            with link:
                wanted = _answer(link)
            if wanted is not None:
                return wanted
    return None


def _answer(link: socket.socket) -> Wanted | None:
    """Fork for the one who asks; not None in the fork. Whoever gets no answer starts its worker otherwise."""
    link.settimeout(_REQUEST_S)
    output: list[int] = []
    try:
        _, output, _, _ = socket.recv_fds(link, 1, 2)
        wanted = Wanted(**json.loads(b"".join(iter(lambda: link.recv(_CHUNK), b""))), output=(output[0], output[1]))
        if _fork_into(wanted.group):
            return wanted
        link.sendall(FORKED)
    except (OSError, ValueError, IndexError) as error:
        sys.stderr.write(f"fork server: {error}\n")
    for descriptor in output:
        os.close(descriptor)
    return None


def _fork_into(group: int) -> bool:
    """True in the fork, which is in the process group ``group`` of this session.

    Raises:
        OSError: there is no fork.
    """
    threads = [(each / "comm").read_text().strip() for each in Path("/proc/self/task").iterdir()]
    if len(threads) != 1:
        raise OSError(f"it has other threads, and does not fork: {', '.join(threads)}")
    pid = os.fork()
    if pid != 0:
        try:
            os.setpgid(pid, group)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            raise
    return pid == 0


def _become(wanted: Wanted) -> None:
    """Be the worker: run the script that Ray's setup script would, under the same circumstances."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for target, source in enumerate(wanted.output, start=1):
        os.dup2(source, target)
        os.close(source)
    os.chdir(wanted.folder)
    os.environ.clear()
    os.environ.update(wanted.environment)
    script, *arguments = _command(wanted.argv)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


def _command(argv: list[str]) -> list[str]:
    """Of a worker that needs variables at most; one that needs another Python or a container is not forked."""
    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.workers import setup_worker

    known, command = setup_worker.parser.parse_known_args(argv)
    context: Any = RuntimeEnvContext.deserialize(known.serialized_runtime_env_context or "{}")
    plain = RuntimeEnvContext(env_vars=context.env_vars)
    if known.language != "PYTHON" or context.serialize() != plain.serialize():
        os.execv(sys.executable, [sys.executable, setup_worker.__file__, *argv])
    os.environ.update(context.env_vars)
    return list(command)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
