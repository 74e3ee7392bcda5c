"""Defines the facts about a run that a report shows, in a form that all commands share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from keytail.cli import statuses
from keytail.compact.detail import Detail

Kind = Literal["good", "left", "bad"]


def kind_of(status: str) -> Kind:
    """Return the kind of a status: `bad` for an error, `left` if it may need attention, otherwise `good`."""
    if statuses.is_failure(status):
        return "bad"
    return "left" if statuses.kind_of(status) in ("skipped", "notable") else "good"


@dataclass(frozen=True)
class Finding:
    """One defect of a partition and its remedy, or a note (`severity` is "note").

    `broker` describes the reaction of a broker that starts with the defect. `start_loses` is True if a broker that
    starts with the defect loses or hides acknowledged records.
    """

    severity: str
    what: str
    where: str = ""
    broker: str = ""
    remedy: str = ""
    start_loses: bool = False


@dataclass(frozen=True)
class Partition:
    """The facts of one row of a command. Numbers that were not counted are None. `row` has the fields of the row in
    `--output json`."""

    name: str
    topic: str
    log_dir: str
    status: str
    why: str = ""
    remedy: str = ""
    bytes_before: int | None = None
    bytes_after: int | None = None
    records_before: int | None = None
    records_after: int | None = None
    segments_before: int | None = None
    segments_after: int | None = None
    tombstones_removed: int | None = None
    markers_removed: int | None = None
    start_ms: int | None = None
    end_ms: int | None = None
    expected_s: float | None = None
    held_by: str = ""  # why tombstones and markers are retained
    findings: tuple[Finding, ...] = ()
    detail: Detail = field(default_factory=Detail)
    row: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> Kind:
        return kind_of(self.status)

    @property
    def reclaimed_bytes(self) -> int | None:
        if self.bytes_before is None or self.bytes_after is None:
            return None
        return self.bytes_before - self.bytes_after

    @property
    def seconds(self) -> float | None:
        if self.start_ms is None or self.end_ms is None:
            return None
        return max(self.end_ms - self.start_ms, 0) / 1000


@dataclass(frozen=True)
class Downtime:
    """The downtime of a broker: the beginning of its stop, its first answer, and when all replicas were in sync again.
    Unknown times are None."""

    broker: str
    down_at_ms: int | None
    reachable_at_ms: int | None
    in_sync_at_ms: int | None

    @property
    def seconds(self) -> float | None:
        if self.down_at_ms is None or self.reachable_at_ms is None:
            return None
        return max(self.reachable_at_ms - self.down_at_ms, 0) / 1000


@dataclass(frozen=True)
class Report:
    """The content of a report: one run, or several runs of a ledger.

    `ended_early` is the reason why the run did not complete, or "". `arguments` is the original command line: code that
    shows it must mask secrets (masking.py). `settings` are the given settings that keytail knows. `notes` are sentences
    about the whole run.
    """

    title: str
    command: str
    execute: bool
    partitions: tuple[Partition, ...]
    start_ms: int
    end_ms: int | None
    now_ms: int
    arguments: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    host: str = ""
    user: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    exit_status: int | None = None
    ended_early: str = ""
    next_step: str = ""
    notes: tuple[str, ...] = ()
    runs: tuple[Mapping[str, str], ...] = ()  # empty except in a report of several runs from a ledger
    downtimes: tuple[Downtime, ...] = ()  # empty except in a report from a ledger
