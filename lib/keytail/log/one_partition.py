"""Surveys one partition from its directory alone; the caller supplies the values of the log dir's checkpoints."""

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
    """Return the facts of the partition in the directory `path`, with the given checkpoint values.

    The log dir is not read: it is treated as not cleanly shut down and without a cleaner checkpoint. Raises Refused
    if the directory's name is not a partition name.
    """
    log_dir, name = os.path.split(os.path.abspath(path))
    parsed = names.parse_partition_dir(name)
    if parsed is None or parsed.kind != "normal":
        raise Refused(
            "not a partition directory: its name must be <topic>-<partition>",
            path=path,
            remedy="Nothing was changed",
            slug="not-a-partition-directory",
        )
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
