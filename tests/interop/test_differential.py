"""Promise 3: one round of keytail leaves what one round of Kafka's cleaner leaves, on random logs.

KEYTAIL_FUZZ_LOGS changes how many, KEYTAIL_SEED repeats a run (log n of a seed is always the same log).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from keytail.clean.cleaner import CleaningTask, clean_partition, install
from keytail.clean.plan import CompactionConfig, select
from keytail.clean.producers import first_unstable
from keytail.log.fs import LOCAL
from keytail.log.partition import survey_log_dirs, survey_partition
from tests.interop.kafka import Kafka
from tests.interop.rounds import CHOICE, Circumstances, Outcome, run_cases

pytestmark = pytest.mark.interop

LOGS = int(os.environ.get("KEYTAIL_FUZZ_LOGS", "300"))


@pytest.mark.parametrize(
    "transactional, legacy, share",
    [(False, False, 0.35), (True, False, 0.4), (False, True, 0.1), (True, True, 0.15)],
    ids=["plain", "transactional", "legacy", "both"],
)
def test_a_round_leaves_what_kafkas_cleaner_leaves(
    kafka: Kafka, fast_dir: Path, transactional: bool, legacy: bool, share: float
) -> None:
    logs = max(1, round(LOGS * share))
    seen = run_cases(kafka, fast_dir, keytail_round, logs=logs, transactional=transactional, legacy=legacy)
    if logs >= 100 and not transactional and not legacy:
        missing = [
            name
            for name in (
                "rounds that merged segments",
                "rounds with a full map",
                "rounds from inside a segment",
                "batches without records",
                "batches with a horizon",
                "compressed batches",
                "records without a key dropped",
                "segments that span 2^31 offsets",
            )
            if not seen[name]
        ]
        assert not missing, f"the random logs never came to: {missing}"


def keytail_round(log_dir: Path, now: Circumstances) -> Outcome:
    listing = survey_log_dirs(LOCAL, [str(log_dir)])[0]
    facts = survey_partition(LOCAL, listing, listing.partitions[0])
    assert facts.problems == ()
    assert facts.leftovers == ()
    assert facts.log_end_offset == now.log_end_offset
    config = compaction_config(now)
    unstable = first_unstable(
        LOCAL, facts, expiration_ms=config.producer_id_expiration_ms, now_ms=now.now_ms
    )
    selection = select(facts, config, now.now_ms, unstable=unstable)
    choice = {name: getattr(selection, name) for name in CHOICE}
    if not selection.cleanable_bytes:
        return Outcome(choice, None)
    task = CleaningTask(
        topic="t",
        partition=0,
        partition_path=facts.path,
        segments=facts.segments,
        snapshots=facts.snapshots,
        log_start_offset=facts.log_start_offset,
        log_end_offset=facts.log_end_offset,
        first_dirty_offset=selection.first_dirty_offset,
        first_uncleanable_offset=selection.first_uncleanable_offset,
        now_ms=now.now_ms,
        config=config,
        run_id="fuzz",
        grouping="kafka",
        map_memory_bytes=1 << 20,
        map_max_entries=now.map_max_entries,
        hash_seed=now.log_end_offset,
        drop_keyless=True,
    )
    result = clean_partition(LOCAL, task)
    install(LOCAL, task, result)
    return Outcome(choice, result.end_offset)


def compaction_config(now: Circumstances) -> CompactionConfig:
    values: dict[str, Any] = {}
    for name, value in now.configs.items():
        values[name] = value.split(",") if name == "cleanup.policy" else value
    return CompactionConfig.from_values(
        {**values, "producer.id.expiration.ms": now.producer_id_expiration_ms}
    )
