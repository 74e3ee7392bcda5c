"""Compaction by fan-out, with small slices and few keys per shard, compared with Kafka's own cleaner."""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keytail.compact.fan_out.stages import Sizes
from keytail.compact.task import CleaningTask
from keytail.errors import KeytailError
from tests.compact.fan_out.in_process import InProcess
from tests.compact.fan_out.test_stages import fan_out_passes, remove_scratch
from tests.interop import test_differential as one_task
from tests.interop.fuzz import run_cases
from tests.interop.kafka import Kafka
from tests.interop.rounds import Circumstances, Outcome

pytestmark = pytest.mark.interop

LOGS = int(os.environ.get("KEYTAIL_FUZZ_LOGS", "300"))


@pytest.mark.one_of()
@pytest.mark.parametrize(
    "options, share",
    [({}, 0.015), ({"transactional": True}, 0.03), ({"transactional": True, "legacy": True}, 0.015)],
    ids=["plain", "transactional", "both"],
)
def test_fan_out_has_the_result_of_kafkas_cleaner(
    kafka: Kafka, fast_dir: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], share: float
) -> None:
    """Some rounds start inside a segment. If Kafka's map is small, keytail uses one task instead."""
    cleaned = 0

    def clean(task: CleaningTask, *arguments: Any, **more: Any) -> tuple[int, int]:
        nonlocal cleaned
        if task.map_max_entries is not None or arguments or more:
            return real(task, *arguments, **more)
        cleaned += 1
        rng = random.Random(repr([(segment.base_offset, segment.log_bytes) for segment in task.segments]))
        sizes = Sizes(slice_bytes=rng.choice([1, 300, 2000, 10**6]), shards=rng.choice([1, 3, 20]))
        task = replace(task, max_scratch_bytes=rng.choice([None, None, 1, 5000]))
        partition, whole = Path(task.partition_path), fast_dir / "whole"
        shutil.rmtree(whole, ignore_errors=True)
        shutil.copytree(partition, whole)
        try:
            results = fan_out_passes(task, InProcess(fast_dir / "cells", rng=rng), sizes)
        except KeytailError:
            remove_scratch(partition)
            if task.max_scratch_bytes is not None:
                # If the last group fails, the groups before it have been replaced, as in Kafka.
                before = one_task.newest_offsets(whole, task.log_start_offset)
                assert before <= one_task.newest_offsets(partition, task.log_start_offset)
                shutil.rmtree(partition)
                shutil.copytree(whole, partition)
            raise
        remove_scratch(partition)
        return results[-1].end_offset, len(results)

    real = one_task.clean
    monkeypatch.setattr(one_task, "clean", clean)
    monkeypatch.setattr(one_task, "IN_PASSES", 0)
    logs = max(1, round(LOGS * share))
    run_cases(
        kafka, fast_dir, fan_out_round, logs=logs, again=one_task.run_again, enough=lambda seen: cleaned >= 3, **options
    )


def fan_out_round(log_dir: Path, now: Circumstances) -> Outcome:
    return one_task.keytail_round(log_dir, now)
