"""Holds the state of one inspection of a partition directory: listing, checkpoints, and the findings so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from keytail.format import names
from keytail.log.fs import DirEntry, FileSystem
from keytail.log.partition import LogDirFacts
from keytail.verify.findings import Findings


@dataclass(frozen=True)
class Claims:
    """The offsets that the log dir's checkpoints have for a partition. None: no entry, or the checkpoint was not read.

    `clean_shutdown`: .kafka_cleanshutdown exists, so a starting broker recovers only segments without an offset index.
    """

    clean_shutdown: bool = True
    log_start: int | None = None
    recovery_point: int | None = None
    high_watermark: int | None = None
    cleaner: int | None = None


NO_CLAIMS = Claims()


def claims_of(log_dir: LogDirFacts, topic: str, partition: int) -> Claims:
    """Return what the checkpoint files and the clean-shutdown file of `log_dir` state about one partition."""
    key = (topic, partition)
    return Claims(
        clean_shutdown=log_dir.clean_shutdown,
        log_start=log_dir.log_starts.get(key),
        recovery_point=log_dir.recovery_points.get(key),
        high_watermark=log_dir.high_watermarks.get(key),
        cleaner=log_dir.cleaner_checkpoint.get(key),
    )


@dataclass
class Scope:
    """One inspection of one partition directory. `live`: a broker may be writing to the directory meanwhile."""

    fs: FileSystem
    path: str
    live: bool
    claims: Claims
    listing: Sequence[DirEntry]
    findings: Findings
    files: dict[str, DirEntry] = field(init=False)  # files by name, without directories
    bases: list[int] = field(init=False)  # base offsets of the segments, ascending

    def __post_init__(self) -> None:
        self.files = {entry.name: entry for entry in self.listing if not entry.is_dir}
        self.bases = self.offsets_of(names.LOG)
        if not self.bases:
            return
        self.findings.last = names.segment_file(self.bases[-1], "")
        self.findings.unindexed = frozenset(
            names.segment_file(base, "") for base in self.bases
            if names.segment_file(base, names.INDEX) not in self.files
        )  # fmt: skip

    def offsets_of(self, suffix: str) -> list[int]:
        """Return the offsets in the names of the live files with this suffix, ascending."""
        offsets = (names.base_of_live(file) for file in self.files if file.endswith(suffix))
        return sorted(offset for offset in offsets if offset is not None)

    def is_active(self, base: int) -> bool:
        return base == self.bases[-1]

    def is_recovered(self, base: int) -> bool:
        """Return whether a starting broker recovers the segment after an unclean shutdown, that is, checks its batches
        and rebuilds its indexes; False if a broker may be running."""
        if self.claims.clean_shutdown or self.live:
            return False
        behind = next((other for other in self.bases if other > base), None)
        return behind is None or behind > (self.claims.recovery_point or 0)

    @property
    def log_start(self) -> int:
        return max(self.claims.log_start or 0, self.bases[0] if self.bases else 0)

    def read(self, file: str) -> bytes | None:
        """Return the contents of a small file. If the file cannot be read, return None and add a finding, unless a
        running broker may have removed it."""
        try:
            return self.fs.read_bytes(f"{self.path}/{file}")
        except OSError as problem:
            self.unreadable(file, problem)
            return None

    def unreadable(self, file: str, problem: OSError) -> None:
        if not (self.live and isinstance(problem, FileNotFoundError)):
            self.findings.add("unreadable", file, reason=problem.strerror or str(problem))
