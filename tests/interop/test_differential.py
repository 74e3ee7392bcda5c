"""Promise 3: one round of keytail leaves what one round of Kafka's cleaner leaves, on random logs.

KEYTAIL_FUZZ_LOGS changes how many in all, KEYTAIL_SEED repeats a run (log n of a seed and a test is always the
same log), KEYTAIL_FUZZ_LOG plays that log alone.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from keytail.clean.cleaner import CleaningTask, Grouping, clean_partition, install
from keytail.clean.plan import CompactionConfig, Selection, select
from keytail.clean.producers import first_unstable
from keytail.log.checkpoint import write_offsets
from keytail.log.fs import LOCAL
from keytail.log.partition import PartitionFacts, survey_log_dirs, survey_partition
from tests.interop.fuzz import run_cases
from tests.interop.kafka import Kafka
from tests.interop.rounds import CHOICE, Circumstances, Outcome

pytestmark = pytest.mark.interop

LOGS = int(os.environ.get("KEYTAIL_FUZZ_LOGS", "300"))
NEVER_MISSED = (
    "rounds that merged segments",
    "rounds with a full map",
    "rounds from inside a segment",
    "batches without records",
    "batches with a horizon",
    "compressed batches",
    "records without a key dropped",
    "segments that span 2^31 offsets",
    "second runs that changed nothing",
)
PLAIN: dict[str, Any] = {}
TRANSACTIONS = {"transactional": True}
LEGACY = {"legacy": True}
BOTH = {"transactional": True, "legacy": True}


@pytest.mark.parametrize(
    "options, share",
    [(PLAIN, 0.2), (TRANSACTIONS, 0.25), (LEGACY, 0.05), (BOTH, 0.1)],
    ids=["plain", "transactional", "legacy", "both"],
)
def test_a_round_leaves_what_kafkas_cleaner_leaves(
    kafka: Kafka, fast_dir: Path, options: dict[str, Any], share: float
) -> None:
    logs = max(1, round(LOGS * share))
    seen = run_cases(kafka, fast_dir, keytail_round, logs=logs, again=run_again, **options)
    if logs >= 100 and not options.get("legacy"):
        missing = [name for name in NEVER_MISSED if not seen[name]]
        assert not missing, f"the random logs never came to: {missing}"


@pytest.mark.parametrize(
    "options, share", [(PLAIN, 0.05), (TRANSACTIONS, 0.1), (BOTH, 0.05)], ids=["plain", "transactional", "both"]
)
def test_results_that_go_their_own_ways_stay_the_same(
    kafka: Kafka, fast_dir: Path, options: dict[str, Any], share: float
) -> None:
    """Each side goes on from its own result. Not compressed: else sizes differ, and with them the grouping."""
    logs = max(1, round(LOGS * share))
    run_cases(
        kafka, fast_dir, keytail_round, logs=logs, mode="drift", codecs=["none"], again=run_again, **options
    )


@pytest.mark.parametrize(
    "options, share", [(PLAIN, 0.05), (TRANSACTIONS, 0.1), (BOTH, 0.05)], ids=["plain", "transactional", "both"]
)
def test_measured_grouping_serves_the_same_for_ever(
    kafka: Kafka, fast_dir: Path, options: dict[str, Any], share: float
) -> None:
    """Segments differ, records, batches and checkpoints do not: rounds begin and end at segments of both."""
    logs = max(1, round(LOGS * share))
    run_cases(
        kafka,
        fast_dir,
        measured_round,
        logs=logs,
        mode="measured",
        from_inside=False,
        again=partial(run_again, grouping="measured"),
        **options,
    )


def keytail_round(
    log_dir: Path, now: Circumstances, *, grouping: Grouping = "kafka", force: bool = False
) -> Outcome:
    facts, selection = keytail_choice(log_dir, now, force=force)
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
        config=compaction_config(now),
        run_id="fuzz",
        grouping=grouping,
        map_memory_bytes=1 << 20,
        map_max_entries=now.map_max_entries,
        hash_seed=now.log_end_offset,
        drop_keyless=True,
    )
    result = clean_partition(LOCAL, task)
    install(LOCAL, task, result)
    return Outcome(choice, result.end_offset)


def keytail_choice(
    log_dir: Path, now: Circumstances, *, force: bool = False
) -> tuple[PartitionFacts, Selection]:
    listing = survey_log_dirs(LOCAL, [str(log_dir)])[0]
    facts = survey_partition(LOCAL, listing, listing.partitions[0])
    assert facts.problems == ()
    assert facts.leftovers == ()
    assert facts.log_end_offset == now.log_end_offset
    config = compaction_config(now)
    unstable = first_unstable(LOCAL, facts, expiration_ms=config.producer_id_expiration_ms, now_ms=now.now_ms)
    return facts, select(facts, config, now.now_ms, unstable=unstable, force=force)


measured_round = partial(keytail_round, grouping="measured")


def run_again(log_dir: Path, now: Circumstances, *, grouping: Grouping = "kafka") -> bool:
    """Once more at the same clock, with the checkpoint that the round left. True when its map had been too small."""
    if now.checkpoint is not None:
        write_offsets(LOCAL, str(log_dir / "cleaner-offset-checkpoint"), {("t", 0): now.checkpoint})
    _, choice = keytail_choice(log_dir, now, force=True)
    if choice.cleanable_bytes:
        assert now.map_max_entries is not None, f"still something to clean: {choice}"
        return True
    assert keytail_round(log_dir, now, grouping=grouping, force=True).end_offset is None
    return False


def compaction_config(now: Circumstances) -> CompactionConfig:
    values: dict[str, Any] = {}
    for name, value in now.configs.items():
        values[name] = value.split(",") if name == "cleanup.policy" else value
    return CompactionConfig.from_values(
        {**values, "producer.id.expiration.ms": now.producer_id_expiration_ms}
    )
