"""Counts the bytes of logs that this process has read, and records the phase of its work, to show progress."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Meter:
    """Updated by log/fs.py; concurrent reads of several threads may be missed."""

    read_bytes: int = 0
    phase: str = ""

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before


METER = Meter()
