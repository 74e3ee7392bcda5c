"""How much this process has read of logs so far, and in which phase of its work it is: for whoever shows progress."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Meter:
    """Counted by log/fs.py; what several threads read at the same instant may be missed."""

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
