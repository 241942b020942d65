"""What Ray runs instead of its own script to set up a worker: asks the server for a fork, and is gone.

Run by path, so that it imports next to nothing. Without a server's answer the worker starts as it would otherwise, and
says so in its log.
"""

import json
import os
import socket
import sys

ADDRESS_VARIABLE = "ELASTIC_REFIT_FORK_SERVER"
ORDINARY_VARIABLE = "ELASTIC_REFIT_FORK_ORDINARY"
FORKED = b"forked"
READY = b"ready\n"
_ANSWER_S = 30.0


def _ask() -> bool:
    """True if a fork of the server is the worker now: with the arguments, variables, folder and output of this one."""
    wanted = {"argv": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd(), "group": os.getpgrp()}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(_ANSWER_S)
        link.connect(os.environ[ADDRESS_VARIABLE])
        socket.send_fds(link, [b"-"], [1, 2])
        link.sendall(json.dumps(wanted).encode())
        link.shutdown(socket.SHUT_WR)
        return link.recv(len(FORKED)) == FORKED


if __name__ == "__main__":
    try:
        is_forked = _ask()
    except OSError as error:
        sys.stderr.write(f"no fork server, the worker starts as an interpreter of its own: {error}\n")
        is_forked = False
    if not is_forked:
        os.execv(sys.executable, [sys.executable, os.environ[ORDINARY_VARIABLE], *sys.argv[1:]])
