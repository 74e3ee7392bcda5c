"""Counts the bytes that a task has read with `read_into`, and records the phase of its work, to show progress."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Meter:
    """The bytes that one task has read, and its phase. If several of its threads read at the same time, some bytes may
    not be counted."""

    read_bytes: int = 0
    phase: str = ""


# A context variable (threads.py): the code that reads does not know its task, and other tasks read at the same time.
_meter: contextvars.ContextVar[Meter | None] = contextvars.ContextVar("meter", default=None)


@contextmanager
def metered() -> Iterator[Meter]:
    """Yield a meter of the bytes that this thread, and threads that it starts, read within the block."""
    before, meter = _meter.get(), Meter()
    _meter.set(meter)
    try:
        yield meter
    finally:
        _meter.set(before)


@contextmanager
def during(phase: str) -> Iterator[None]:
    """Record that the task is in `phase` during the block, if its progress is shown."""
    meter = _meter.get()
    if meter is None:
        yield
        return
    before, meter.phase = meter.phase, phase
    try:
        yield
    finally:
        meter.phase = before


def count(read_bytes: int) -> None:
    """Count bytes that were read; called by log/fs.py."""
    meter = _meter.get()
    if meter is not None:
        meter.read_bytes += read_bytes
