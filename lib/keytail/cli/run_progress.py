"""The progress of a run, as reported by its tasks: what is done, and which partition has most left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from keytail.run.watching import Sign

# The share done of a partition in progress is limited: how much a task reads is known only roughly.
_MOST_OF_ONE = 0.99
# The phase of a partition whose tasks have ended, while others of its job are running.
WAITING = "waiting for others of its job"


@dataclass
class InFlight:
    """A partition in progress, as reported by its tasks."""

    name: str
    started_s: float
    phase: str = ""
    read_bytes: dict[str, int] = field(default_factory=dict)  # by attempt: a fan-out has several
    open: set[str] = field(default_factory=set)  # attempts


@dataclass(frozen=True)
class Slowest:
    """The partition in progress that has most left."""

    name: str
    phase: str
    share: float
    seconds: float


class RunProgress:
    """The progress of a run, by reports of its tasks. `passes`: how often a partition is read. Not thread-safe."""

    def __init__(self, sizes: Sequence[tuple[str, int]], passes: float) -> None:
        self.partitions = len(sizes)
        self.size_bytes = sum(size for _, size in sizes)
        self.ended = 0
        self.ended_bytes = 0
        self._sizes = dict(sizes)
        self._passes = passes
        self._in_flight: dict[str, InFlight] = {}
        self._over: set[str] = set()

    def on_sign(self, sign: Sign, now_s: float) -> bool:
        """Process a report. Returns whether the partition has entered another phase."""
        if sign.name in self._over or sign.name not in self._sizes:
            return False
        item = self._in_flight.setdefault(sign.name, InFlight(sign.name, now_s))
        item.read_bytes[sign.attempt] = sign.read_bytes
        (item.open.discard if sign.is_over else item.open.add)(sign.attempt)
        phase = sign.phase if item.open else WAITING
        is_new = bool(phase) and phase != item.phase
        item.phase = phase or item.phase
        return is_new and item.phase != WAITING

    def done(self, name: str, size_bytes: int) -> None:
        self.ended += 1
        self.ended_bytes += size_bytes
        self._over.add(name)
        self._in_flight.pop(name, None)

    @property
    def done_bytes(self) -> int:
        """Return the bytes of the logs that are done, including the done share of partitions in progress."""
        in_flight = sum(self._share(item) * self._sizes[item.name] for item in self._in_flight.values())
        return min(self.ended_bytes + int(in_flight), max(self.size_bytes, self.ended_bytes))

    def slowest(self, now_s: float) -> Slowest | None:
        if not self._in_flight:
            return None
        item = max(self._in_flight.values(), key=lambda item: (1 - self._share(item)) * self._sizes[item.name])
        return Slowest(item.name, item.phase, self._share(item), now_s - item.started_s)

    def _share(self, item: InFlight) -> float:
        expected = self._sizes[item.name] * self._passes
        return min(sum(item.read_bytes.values()) / expected, _MOST_OF_ONE) if expected else 0.0
