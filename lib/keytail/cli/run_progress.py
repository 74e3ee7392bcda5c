"""Computes the progress of a run from reports of its tasks: the bytes done, and the partition with the most bytes
left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from keytail.run.watching import TaskProgress

# Upper limit for the share of a partition in progress: the bytes to read are only estimated.
_MAX_SHARE = 0.99
# An attempt without a report for this many seconds is considered dead: the next attempt reads its bytes again.
_SILENT_S = 30.0
# The phase of a partition whose tasks have ended, while other tasks of its job are running.
WAITING = "waiting for other tasks of its job"
# The attempt under which the driver reports its own phase for a partition.
DRIVER = "driver"


@dataclass
class InFlight:
    """A partition in progress, as reported by its tasks."""

    name: str
    started_s: float
    phase: str = ""
    read_bytes: dict[str, int] = field(default_factory=dict)  # by attempt; a fan-out has several attempts
    # Attempts in progress, with the time of their last report.
    open_attempts: dict[str, float] = field(default_factory=dict)

    def forget_silent(self, now_s: float) -> None:
        for attempt in [name for name, last_s in self.open_attempts.items() if now_s - last_s > _SILENT_S]:
            del self.open_attempts[attempt], self.read_bytes[attempt]


@dataclass(frozen=True)
class Slowest:
    """The partition in progress that has the most bytes left to read. `share` is the part of the partition's bytes that
    has been read."""

    name: str
    phase: str
    share: float
    seconds: float


class RunProgress:
    """The progress of a run, from reports of its tasks; not thread-safe. `reads`: how often each byte is read on
    average."""

    def __init__(self, sizes: Sequence[tuple[str, int]], reads: float) -> None:
        self.partitions = len(sizes)
        self.size_bytes = sum(size for _, size in sizes)
        self.ended = 0
        self.ended_bytes = 0
        self._sizes = dict(sizes)
        self._reads = reads
        self._in_flight: dict[str, InFlight] = {}
        self._ended: set[str] = set()

    def on_progress(self, report: TaskProgress, now_s: float) -> bool:
        """Process a report; return whether the partition has entered another phase."""
        if report.name in self._ended or report.name not in self._sizes:
            return False
        item = self._in_flight.setdefault(report.name, InFlight(report.name, now_s))
        item.read_bytes[report.attempt] = report.read_bytes
        item.open_attempts[report.attempt] = now_s
        if report.is_over:
            del item.open_attempts[report.attempt]
        item.forget_silent(now_s)
        phase = report.phase if item.open_attempts else WAITING
        if report.attempt != DRIVER and DRIVER in item.open_attempts:  # a late report: the tasks have ended
            phase = item.phase
        is_new = bool(phase) and phase != item.phase
        item.phase = phase or item.phase
        return is_new and item.phase != WAITING

    def done(self, name: str, size_bytes: int) -> None:
        """Record that a partition has ended."""
        self.ended += 1
        self.ended_bytes += size_bytes
        self._ended.add(name)
        self._in_flight.pop(name, None)

    @property
    def done_bytes(self) -> int:
        """The bytes of ended partitions, and the read share of the bytes of partitions in progress."""
        in_flight = sum(self._share(item) * self._sizes[item.name] for item in self._in_flight.values())
        return min(self.ended_bytes + int(in_flight), max(self.size_bytes, self.ended_bytes))

    def slowest(self, now_s: float) -> Slowest | None:
        if not self._in_flight:
            return None
        item = max(self._in_flight.values(), key=lambda item: (1 - self._share(item)) * self._sizes[item.name])
        return Slowest(item.name, item.phase, self._share(item), now_s - item.started_s)

    def _share(self, item: InFlight) -> float:
        expected = self._sizes[item.name] * self._reads
        return min(sum(item.read_bytes.values()) / expected, _MAX_SHARE) if expected else 0.0
