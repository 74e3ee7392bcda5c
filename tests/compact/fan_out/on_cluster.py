"""The driver of a test on a cluster: runs `keytail compact --execute --fan-out always` with failures in given stages.

    python -m tests.compact.fan_out.on_cluster MASTER LOG_DIR NOTES HOW SPECULATION

As in tests/run/on_cluster.py, but HOW names a stage: with `merge:executor`, the executor is killed after the second
task of that stage; with `scan:slow`, that task waits until its speculative copy has ended. Prints the rows as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from keytail.cli.configuration import read_configuration
from keytail.cli.selection import PartitionFilter
from keytail.compact import execution as compaction
from keytail.compact.fan_out import stages
from keytail.compact.fan_out.on_spark import fan_out_on_spark
from keytail.compact.fan_out.stages import Sizes
from keytail.compact.running import installing
from keytail.log.fs import FileSystem
from keytail.run.spark.settings import CORRECTNESS
from tests.import_.speculating import DUPLICATES
from tests.run.disturbed import executor, is_first, wait_for

SECOND = 1


def disturb(notes: str, stage: str, kind: str, number: int, attempt: str) -> None:
    """Record the attempt after its work; let the first attempt of a stage's second task wait, or kill its executor."""
    (Path(notes) / f"{stage}-{number}.{attempt}.{os.getppid()}").touch()
    if number == SECOND and is_first(Path(notes) / f"{stage}.first"):
        if kind == "slow":
            wait_for((Path(notes) / f"{stage}.done").exists)
        else:
            os.kill(executor(), signal.SIGKILL)
            time.sleep(60)  # its daemon ends this process
    if number == SECOND:
        (Path(notes) / f"{stage}.done").touch()


def scan_disturbed(notes: str, kind: str, real: Any, fs: FileSystem, part: Any, attempt: str) -> Iterator[Any]:
    yield from real(fs, part, attempt)
    disturb(notes, "scan", kind, part.number, attempt)


def merge_disturbed(
    notes: str, kind: str, real: Any, fs: FileSystem, context: Any, shard: int, cells: Any, attempt: str
) -> Any:
    answer = real(fs, context, shard, cells, attempt)
    disturb(notes, "merge", kind, shard, attempt)
    return answer


DISTURBED = {"scan": scan_disturbed, "merge": merge_disturbed}


def main() -> None:
    master, log_dir, notes, how, speculation = sys.argv[1:]
    if speculation == "forced":
        CORRECTNESS.update(DUPLICATES)
    for item in filter(None, how.split(",")):
        stage, _, kind = item.partition(":")
        setattr(stages, stage, partial(DISTURBED[stage], notes, kind, getattr(stages, stage)))
    sizes = Sizes(slice_bytes=4000, shards=3)
    installing.fan_out_on_spark = lambda *given, **more: fan_out_on_spark(*given, **more, sizes=sizes)  # type: ignore
    configuration = read_configuration(None, ["orders:cleanup.policy=compact"], topics_have_no_overrides=True)
    request = compaction.Request(
        PartitionFilter((log_dir,)), configuration, execute=True, master=master, grouping="kafka", fan_out="always",
        map_memory_bytes=1 << 20,
    )  # fmt: skip
    rows = [replace(row, problem=None) for row in compaction.compact(request)]
    print(json.dumps({"rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
