"""The memory of a fan-out with many more keys than fit into its budget does not grow with the log.

The stages run one after the other in a separate process, which runs this file as a module.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keytail.compact.fan_out.stages import Sizes, fan_out
from keytail.compact.map_phase.offset_map import OffsetMap
from keytail.compact.task import CleaningTask
from keytail.kernels.native import HASH_NAME
from keytail.log.fs import LOCAL
from keytail.log.partition import SegmentFacts
from tests.bench.memory import peak_private
from tests.compact.fan_out.in_process import InProcess
from tests.compact.logs import RandomLog, task_for
from tests.compact.test_memory import KEY_BYTES, NOW, key_names, template_of, write_checksums
from tests.reference.cleaner import Segment

BUDGET_BYTES = 256 << 10
pytestmark = pytest.mark.long
SOAK = os.environ.get("KEYTAIL_SOAK") == "1"
BATCH_RECORDS = 100


def write_segments(
    path: Path, segments: int, batches: int, keys: int, *, hot: float = 0.0, value_bytes: int = 20
) -> tuple[RandomLog, tuple[SegmentFacts, ...]]:
    """Write `segments` closed segments of `batches` batches each, with random keys, and the active segment. `hot` is
    the share of records with the same key.
    """
    path.mkdir(parents=True)
    template, places = template_of(BATCH_RECORDS, value_bytes)
    rng = np.random.default_rng(7)
    facts = []
    for number in range(segments):
        base = number * batches * BATCH_RECORDS
        data = np.tile(np.frombuffer(template, np.uint8), batches)
        rows = data.reshape(batches, -1)
        rows[:, :8] = (base + np.arange(batches) * BATCH_RECORDS).astype(">i8").view(np.uint8).reshape(batches, 8)
        for place in places:
            chosen = rng.integers(0, keys, batches)
            chosen[rng.random(batches) < hot] = 0
            rows[:, place : place + KEY_BYTES] = key_names(chosen)
        write_checksums(data, len(template))
        data.tofile(path / f"{base:020d}.log")
        index = np.zeros((batches, 2), ">i4")
        index[:, 0] = np.arange(1, batches + 1) * BATCH_RECORDS - 1
        index[:, 1] = np.arange(batches) * len(template)
        index[39::40].tofile(path / f"{base:020d}.index")
        facts.append(base)
    end = segments * batches * BATCH_RECORDS
    (path / f"{end:020d}.log").touch()
    found = []
    for base in [*facts, end]:
        log, index_path = path / f"{base:020d}.log", path / f"{base:020d}.index"
        for file in (log, index_path):
            if file.exists():
                os.utime(file, ns=(NOW * 10**6, NOW * 10**6))
        size = index_path.stat().st_size if index_path.exists() else 0
        found.append(SegmentFacts(base, log.stat().st_size, log.stat().st_mtime_ns, size, 0, None, NOW, -1))
    return RandomLog([Segment(base, b"", 0, 0, NOW) for base in [*facts, end]], [], end, {}), tuple(found)


def task_of(path: Path, log: RandomLog, facts: tuple[SegmentFacts, ...], **fields: Any) -> CleaningTask:
    config = {"segment_bytes": 1 << 30, "index_interval_bytes": 4096, **fields.pop("config", {})}
    return task_for(str(path), log, facts, NOW, first_dirty=0, config=config, hash_name=HASH_NAME, **fields)


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="memory is read from Linux's /proc")
def test_four_times_as_many_keys_need_no_more_memory() -> None:
    """The log has more than 100 times as many keys as fit into the budget. The map and the table of one task would grow
    by 88 bytes per key.
    """
    room = OffsetMap(BUDGET_BYTES).max_entries
    small, large = (measured(segments) for segments in (4, 16))
    print(small, large)
    assert large["keys"] > (100 if SOAK else 50) * room
    assert large["keys"] > 3 * small["keys"]
    more_keys = large["keys"] - small["keys"]
    # Only the lists of cells of this engine, and the rows of slices and shards, grow.
    assert large["growth_bytes"] < small["growth_bytes"] + 44 * more_keys
    assert large["largest_cell"] <= 1 << 20


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="memory is read from Linux's /proc")
def test_one_key_with_almost_all_records_overloads_no_shard() -> None:
    answer = measured(4, hot=0.99)
    records = answer["records_before"]
    assert answer["shuffled_bytes"] < 24 * records / 5, "the hot key must be shuffled once per slice"


def measured(segments: int, hot: float = 0.0) -> dict[str, Any]:
    request = json.dumps({"segments": segments, "batches": 500 if not SOAK else 2000, "hot": hot})
    command = [sys.executable, "-m", "tests.compact.fan_out.test_memory", request]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def one_fan_out(segments: int, batches: int, hot: float) -> dict[str, Any]:
    """Run a fan-out to warm up, then a measured one; called in the separate process."""
    sizes = Sizes(slice_bytes=1 << 20)
    answers = []
    with tempfile.TemporaryDirectory() as directory:
        for name, count in (("warm", 1), ("t-0", segments)):
            path = Path(directory) / name
            log, facts = write_segments(path, count, batches, 10**9, hot=hot)
            task = replace(task_of(path, log, facts), map_memory_bytes=BUDGET_BYTES)
            engine = InProcess(Path(directory) / "cells")
            with peak_private() as peak:
                result = fan_out(LOCAL, task, engine, sizes)
            answers.append((peak, result, engine))
    peak, result, engine = answers[-1]
    return {
        "growth_bytes": peak.growth_bytes,
        "keys": result.keys,
        "records_before": result.records_before,
        "records_after": result.records_after,
        "shuffled_bytes": engine.shuffled_bytes,
        "largest_cell": engine.largest_cell,
        "stages": engine.stages,
    }


if __name__ == "__main__":
    print(json.dumps(one_fan_out(**json.loads(sys.argv[1]))))
