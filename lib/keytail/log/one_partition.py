"""The facts of one partition from its directory alone: what else a survey takes from the log dir, the caller says."""

from __future__ import annotations

import os

from keytail.errors import Refused
from keytail.format import names
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.partition import LogDirFacts, PartitionEntry, PartitionFacts, survey_partition


def survey(
    path: str,
    *,
    high_watermark: int | None = None,
    recovery_point: int = 0,
    log_start_offset: int = 0,
    fs: FileSystem = LOCAL,
) -> PartitionFacts:
    """Facts of the partition in the directory `path`, with what the log dir's checkpoints would say of it.

    The log dir is not looked at: it counts as one that was not shut down cleanly, without a cleaner checkpoint.
    Refused where the directory's name is no partition's.
    """
    log_dir, name = os.path.split(os.path.abspath(path))
    parsed = names.parse_partition_dir(name)
    if parsed is None or parsed.kind != "normal":
        raise Refused("a partition's directory is named <topic>-<partition>", path=path, remedy="Nothing was changed")
    key = parsed.topic, parsed.partition
    claims = LogDirFacts(
        log_dir,
        partitions=(),
        skipped=(),
        clean_shutdown=False,
        cleaner_checkpoint={},
        recovery_points={key: recovery_point},
        log_starts={key: log_start_offset},
        high_watermarks={} if high_watermark is None else {key: high_watermark},
    )
    return survey_partition(fs, claims, PartitionEntry(*key, log_dir, path))
