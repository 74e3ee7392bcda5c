"""Loopback ports for test servers, reserved for the calling process until it ends, even while its server restarts."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
from pathlib import Path

# Below the range from which Linux assigns ports automatically.
FIRST, LAST = 20_000, 32_000
_held: list[int] = []


def free_ports(count: int) -> list[int]:
    """Return distinct ports without a listener, reserved for this process until it ends."""
    folder = Path(f"/tmp/keytail-ports-{os.geteuid()}")  # for all runs, also those with another TMPDIR
    folder.mkdir(exist_ok=True)
    found: list[int] = []
    for port in random.SystemRandom().sample(range(FIRST, LAST), LAST - FIRST):
        if len(found) == count:
            return found
        lock = os.open(folder / str(port), os.O_CREAT | os.O_RDWR)
        with contextlib.suppress(OSError), socket.socket() as item:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            item.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
            item.bind(("127.0.0.1", port))
            found.append(port)
            _held.append(lock)
            continue
        os.close(lock)
    raise AssertionError("no port is free")
