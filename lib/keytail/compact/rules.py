"""The command-line options of a compaction, as values that decisions and tasks use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keytail.cli.options import HighWatermark
    from keytail.cli.replicas import Replica
    from keytail.compact.task import FanOut, Grouping


@dataclass(frozen=True)
class Rules:
    """The command-line options that affect decisions."""

    now_ms: int
    force: bool = False
    from_log_start: bool = False
    high_watermark: HighWatermark = "checkpoint"
    unsafe_clock: bool = False
    replicas: tuple[Replica, ...] = ()  # other replicas, which limit the removal of tombstones and markers
    roll_active: bool = False
    running: frozenset[str] = frozenset()  # log dirs whose broker still runs; only in a plan with `roll_active`
    drop_keyless: bool = False
    by_file_time: bool = False  # tombstones and markers are removed by file time (CLEANING.md 16)


@dataclass(frozen=True)
class TaskSettings:
    """The command-line options for a task, the same for every partition of a run (see CleaningTask)."""

    map_memory_bytes: int = 0  # 0: a share of each host's memory
    drop_keyless: bool = False
    grouping: Grouping = "measured"
    fan_out: FanOut = "auto"
    throttle_bytes_per_s: int | None = None  # limit per host
    hottest_keys: int = 0
    show_keys: bool = False
    by_file_time: bool = False
