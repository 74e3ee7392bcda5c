"""The request for an `import`."""

from __future__ import annotations

from dataclasses import dataclass, field

from keytail.cli.configuration import Configuration
from keytail.errors import UsageProblem
from keytail.import_.source import Source

# Larger than a producer's 16 KiB: bulk-loaded records are read in bulk, and larger batches compress better.
BATCH_BYTES = 128 << 10


@dataclass(frozen=True)
class Request:
    """All parameters of `import`, with the defaults of its flags."""

    source: Source
    topic: str
    log_dirs: tuple[str, ...]
    replica_log_dirs: tuple[tuple[str, ...], ...] = ()
    configuration: Configuration = field(default_factory=Configuration)
    codec: str | None = None
    batch_bytes: int = BATCH_BYTES
    segment_bytes: int | None = None
    append: bool = False
    single_replica: bool = False
    topic_id: str | None = None
    partition_count: int | None = None
    import_id: str | None = None
    execute: bool = False
    master: str | None = None
    shared_storage: bool = False
    submitted: bool = False  # under spark-submit, which has chosen the master

    def __post_init__(self) -> None:
        if self.single_replica and self.replica_log_dirs:
            raise UsageProblem(
                "--single-replica and --replica-log-dirs exclude each other",
                remedy="Give --single-replica only if no partition of the topic has another replica",
                slug="conflicting-flags",
            )

    @property
    def all_log_dirs(self) -> tuple[str, ...]:
        return (*self.log_dirs, *(path for dirs in self.replica_log_dirs for path in dirs))
