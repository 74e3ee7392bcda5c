"""Payload functions for tests of workers, at module level like the real ones."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from keytail.errors import CorruptLog


def double(payload: int, attempt: str) -> tuple[int, str]:
    return payload * 2, attempt


def interpreter(payload: int, attempt: str) -> tuple[str, int]:
    return sys.executable, os.getpid()


def fail_on_odd(payload: int, attempt: str) -> int:
    if payload == 1:
        raise CorruptLog("a byte is wrong", path="/x", byte_position=7, offset=3)
    if payload == 3:
        raise FileNotFoundError(2, "No such file or directory", "/y")
    if payload == 5:
        raise ZeroDivisionError("an oversight")
    return payload


def kill_worker_if_requested(payload: tuple[int, bool, str], attempt: str) -> int:
    """Leave a file for this attempt, and then kill this worker process if the payload requests it."""
    number, dies, folder = payload
    Path(folder, f"{number}.{attempt}").touch()
    if dies:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def kill_worker_once(payload: tuple[int, str], attempt: str) -> int:
    number, folder = payload
    mark = Path(folder, f"{number}.died")
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number


class OpensWhereUnpickled:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


def attack(path: str, attempt: str) -> OpensWhereUnpickled:
    return OpensWhereUnpickled(path)


def sleep_for(seconds: float, attempt: str) -> int:
    """Sleep, and return the process id."""
    time.sleep(seconds)
    return os.getpid()
