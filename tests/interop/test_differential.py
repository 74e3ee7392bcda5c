"""Promise 3: a round of keytail has the same result as a round of Kafka's cleaner, on random logs.

KEYTAIL_FUZZ_LOGS sets the total number of logs, KEYTAIL_SEED repeats a run, and KEYTAIL_FUZZ_LOG runs only the log of
that number.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keytail.compact.cleaner import clean_partition, install, next_pass
from keytail.compact.plan import Selection, select
from keytail.compact.task import CleaningTask, Grouping
from keytail.config.compaction import CompactionConfig
from keytail.errors import KeytailError
from keytail.format.index import TXN_ENTRY
from keytail.log.checkpoint import write_offsets
from keytail.log.fs import LOCAL
from keytail.log.log_dirs import survey_log_dirs
from keytail.log.partition import PartitionFacts, survey_partition
from keytail.log.producers import first_unstable
from tests.chance import SEED
from tests.in_pieces import read_in_pieces
from tests.interop.fuzz import run_cases
from tests.interop.kafka import Kafka, Opened, step_batch, step_clock, step_marker, step_roll
from tests.interop.rounds import CHOICE, Case, Circumstances, Mode, Outcome, Round, doubled_offsets, newest_offsets
from tests.interop.traffic import DAY_MS, random_traffic

pytestmark = pytest.mark.interop

LOGS = int(os.environ.get("KEYTAIL_FUZZ_LOGS", "90"))
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
    "rounds that wrote groups in several passes",
)
IN_PASSES = 0.15  # the share of rounds with a scratch limit, which take much longer
PLAIN: dict[str, Any] = {}
TRANSACTIONS = {"transactional": True}
LEGACY = {"legacy": True}
BOTH = {"transactional": True, "legacy": True}


@pytest.mark.parametrize(
    "options, share",
    [(PLAIN, 0.2), (TRANSACTIONS, 0.25), (LEGACY, 0.05), (BOTH, 0.1)],
    ids=["plain", "transactional", "legacy", "both"],
)
def test_a_round_has_the_result_of_kafkas_cleaner(
    kafka: Kafka, fast_dir: Path, options: dict[str, Any], share: float
) -> None:
    logs = max(1, round(LOGS * share))
    seen = run_cases(kafka, fast_dir, keytail_round, logs=logs, again=run_again, **options)
    if logs >= 100 and not options.get("legacy"):
        missing = [name for name in NEVER_MISSED if not seen[name]]
        assert not missing, f"the random logs never had: {missing}"


def test_batches_read_in_pieces_have_the_result_of_kafkas_cleaner(
    kafka: Kafka, fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches that decompress to too many bytes are read in pieces; here, all batches with more than one record are."""
    read_in_pieces(monkeypatch)
    run_cases(kafka, fast_dir, keytail_round, logs=max(1, round(LOGS * 0.1)), again=run_again, **BOTH)


@pytest.mark.parametrize(
    "options, share", [(PLAIN, 0.05), (TRANSACTIONS, 0.1), (BOTH, 0.05)], ids=["plain", "transactional", "both"]
)
def test_results_remain_equal_if_each_side_continues_from_its_own(
    kafka: Kafka, fast_dir: Path, options: dict[str, Any], share: float
) -> None:
    """The logs are not compressed: otherwise sizes, and therefore groups, would differ."""
    logs = max(1, round(LOGS * share))
    run_cases(
        kafka, fast_dir, keytail_round, logs=logs, mode="drift", codecs=["none"], again=run_again, **options
    )


@pytest.mark.parametrize(
    "options, share", [(PLAIN, 0.05), (TRANSACTIONS, 0.1), (BOTH, 0.05)], ids=["plain", "transactional", "both"]
)
def test_with_measured_grouping_the_same_records_are_served(
    kafka: Kafka, fast_dir: Path, options: dict[str, Any], share: float
) -> None:
    """Segments may differ; records, batches and checkpoints are equal. Rounds begin and end at base offsets of segments
    on both sides.
    """
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


def test_a_wrong_transaction_index_changes_nothing_for_consumers(kafka: Kafka, fast_dir: Path) -> None:
    """The index is deleted, truncated or of another segment, or an entry is missing or wrong: keytail reads from the
    log what was aborted.
    """
    rng = random.Random(SEED)
    damages: Counter[str] = Counter()

    def round_with_damage(log_dir: Path, now: Circumstances) -> Outcome:
        right = log_dir.parent / "right"
        shutil.rmtree(right, ignore_errors=True)
        shutil.copytree(log_dir, right)
        outcome = keytail_round(right, now)
        if outcome.end_offset is not None:
            damages[damage_index(rng, log_dir / "t-0", outcome.end_offset)] += 1
        return keytail_round(log_dir, now)

    logs = max(1, round(LOGS * 0.14))
    run_cases(kafka, fast_dir, round_with_damage, logs=logs, mode="damaged", transactional=True)
    print(dict(damages))
    assert logs < 20 or len(damages) > 5 or os.environ.get("KEYTAIL_FUZZ_LOG")


def damage_index(rng: random.Random, partition: Path, end_offset: int) -> str:
    """Damage the transaction index of one segment that the round replaces, and return the kind of damage."""
    bases = [base for base in sorted(int(path.stem) for path in partition.glob("*.log")) if base < end_offset]
    indexes = {base: partition / f"{base:020d}.txnindex" for base in bases}
    full = [path for path in indexes.values() if path.exists() and path.stat().st_size]
    if not full:
        return "nothing to damage"
    path = rng.choice(full)
    data = path.read_bytes()
    kind = rng.choice(["deleted", "cut", "entry missing", "entry wrong", "entry wrong", "of another segment"])
    at = rng.randrange(len(data) // TXN_ENTRY.itemsize)
    if kind == "deleted":
        path.unlink()
    elif kind == "cut":
        path.write_bytes(data[: rng.randrange(len(data))])
    elif kind == "entry missing":
        path.write_bytes(data[: at * TXN_ENTRY.itemsize] + data[(at + 1) * TXN_ENTRY.itemsize :])
    elif kind == "entry wrong":
        entries = np.frombuffer(data, TXN_ENTRY).copy()
        name = rng.choice(["version", "producer_id", "first_offset", "last_offset", "last_stable_offset"])
        entries[name][at] += rng.choice([-7, -1, 1, 3, 40])
        path.write_bytes(entries.tobytes())
        kind += f", {name}"
    else:
        indexes[rng.choice(bases)].write_bytes(data)
    return kind


@pytest.mark.parametrize("mode", ["drift", "measured"])
def test_rounds_at_later_clocks_remove_tombstones_markers_and_emptied_batches(
    kafka: Kafka, fast_dir: Path, mode: Mode
) -> None:
    """keytail removes each of them when Kafka does, and all of them in the end."""
    removed = 0
    for number in range(max(1, round(LOGS * 0.02))):
        rng = random.Random(f"{SEED}-{number}")
        traffic = random_traffic(
            rng, transactional=True, delete_records=False, far_jumps=False, keyless=False, codecs=["none"]
        )
        traffic.configs |= {"segment.index.bytes": 65_536, "delete.retention.ms": 60_000, "min.compaction.lag.ms": 0}
        case = Case(kafka, fast_dir / f"log-{number}", Counter(), mode)
        ours = keytail_round if mode == "drift" else measured_round
        steps = traffic.steps()
        for producer in traffic.producers:
            if producer.in_transaction:
                steps.append(step_marker("ABORT", producer.producer_id, producer.epoch, traffic.clock_ms))
        steps.append(step_roll())
        boundary = 0
        for day in range(6):
            clock_ms = traffic.clock_ms + day * 2 * DAY_MS
            if day:
                records = [(clock_ms, b"key of the day %d" % day, b"value", ())]
                if day == 1:  # no record of the first day is retained, so that no marker is needed
                    records += [(clock_ms, key, None, ()) for key in traffic.keys]
                steps = [step_clock(clock_ms), step_batch(records), step_roll()]
            options = {**traffic.options, "clock_ms": clock_ms}
            round_ = Round(steps, options, None)
            assert case.play(ours, round_, partial(plain_circumstances, traffic.configs, clock_ms))
            boundary = boundary or case.now.log_end_offset
        served = case.loaded(case.ours, case.now)
        old = [batch for batch in served.batches if batch["last_offset"] < boundary]
        # If the timestamp of a record is years in the future, its producer does not expire.
        active = {producer[0] for producer in served.producers}
        idle = [batch for batch in old if batch["producer_id"] not in active]
        assert not [batch for batch in idle if batch["control"] or not batch["records"]], f"log {number}"
        assert not [record for record in served.records if record.value is None], f"log {number}"
        assert served.aborted == ()
        removed += boundary - len(old)
        shutil.rmtree(case.home)
    assert removed


def plain_circumstances(
    configs: dict[str, Any], now_ms: int, opened: Opened, checkpoint: int | None
) -> Circumstances:
    start, end = opened.log_start_offset, opened.log_end_offset
    return Circumstances(configs, now_ms, start, end, end, checkpoint, None, DAY_MS)


def keytail_round(
    log_dir: Path, now: Circumstances, *, grouping: Grouping = "kafka", force: bool = False, **fields: Any
) -> Outcome:
    """Run a round of keytail. `fields` are other fields of the task."""
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
        **{"message_format": "v2", **fields},  # the cleaner of 4.3.1 also writes this format
    )
    rng = random.Random(repr(now))
    if rng.random() >= IN_PASSES:
        return Outcome(choice, *clean(task))
    bound = rng.choice([1, 1, rng.randrange(1, 20_000), rng.randrange(1, 200_000)])
    return Outcome(choice, *in_passes(replace(task, max_scratch_bytes=bound), log_dir.parent, stops=rng.random() < 0.2))


def in_passes(task: CleaningTask, home: Path, *, stops: bool) -> tuple[int, int]:
    """Clean with a scratch limit, and compare the result with that of one pass. Check that consumers lose no record
    between passes. Return the end offset and the number of passes. With `stops`, also continue in another run after the
    first pass.
    """
    partition, whole, stopped = Path(task.partition_path), home / "whole" / "t-0", home / "stopped" / "t-0"
    for copy in (whole, stopped):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(partition, copy)
    before = newest_offsets(partition, task.log_start_offset)

    def nothing_lost(directory: Path, number: int) -> None:
        lost = (before ^ newest_offsets(directory, task.log_start_offset)) - doubled
        assert not lost or inside, (
            f"after pass {number}, latest records are missing or superseded ones visible again: {sorted(lost)}"
        )

    inside = task.first_dirty_offset not in [segment.base_offset for segment in task.segments]
    # If an earlier round began at a checkpoint beyond the cleaned section, this section may contain a value and its
    # tombstone. When the tombstone is removed, the value is visible again, as with Kafka's cleaner.
    doubled = doubled_offsets(partition, task.first_dirty_offset)
    try:
        clean(replace(task, partition_path=str(whole), max_scratch_bytes=None))
    except KeytailError as refusal:
        # If the last group fails, the groups before it have been replaced, as in Kafka.
        with pytest.raises(type(refusal)):
            clean(task, nothing_lost)
        shutil.rmtree(partition)
        shutil.copytree(stopped, partition)
        raise
    end_offset, rounds = clean(task, nothing_lost)
    found, expected = files_of(partition), files_of(whole)
    other = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
    assert not other, f"files differ between {rounds} passes and one pass: {other}"
    if stops and rounds > 1:
        first = replace(task, partition_path=str(stopped))
        clean(first, rounds=1)
        listing = survey_log_dirs(LOCAL, [str(stopped.parent)])[0]
        facts = survey_partition(LOCAL, listing, listing.partitions[0])
        assert (facts.problems, facts.leftovers) == ((), ())
        assert facts.log_end_offset == task.log_end_offset
        clean(replace(first, segments=facts.segments, max_scratch_bytes=1, run_id="another"))
        nothing_lost(stopped, 0)
    return end_offset, rounds


def clean(
    task: CleaningTask, on_round: Callable[[Path, int], None] | None = None, *, rounds: int | None = None
) -> tuple[int, int]:
    """Clean as the driver does, at most in `rounds` passes; return the end offset and the number of passes."""
    number = 0
    while True:
        number += 1
        result = clean_partition(LOCAL, replace(task, attempt=str(number)))
        install(LOCAL, task, result)
        more = result.rest is not None and number != rounds
        kept = {result.rest.survivors.name, result.rest.proof.name} if result.rest and more else set()
        for scratch in Path(task.partition_path).glob("*.clean"):
            if scratch.name not in kept:
                scratch.unlink()
        if on_round is not None:
            on_round(Path(task.partition_path), number)
        if not more:
            return result.end_offset, number
        task = next_pass(task, result)


def files_of(partition: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in partition.iterdir() if path.is_file()}


def keytail_choice(
    log_dir: Path, now: Circumstances, *, force: bool = False
) -> tuple[PartitionFacts, Selection]:
    listing = survey_log_dirs(LOCAL, [str(log_dir)])[0]
    facts = survey_partition(LOCAL, listing, listing.partitions[0])
    assert facts.problems == ()
    assert facts.leftovers == ()
    assert facts.log_end_offset == now.log_end_offset
    config = compaction_config(now)
    unstable = first_unstable(LOCAL, facts, now_ms=now.now_ms)
    return facts, select(facts, config, now.now_ms, unstable=unstable, force=force)


measured_round = partial(keytail_round, grouping="measured")


def run_again(log_dir: Path, now: Circumstances, *, grouping: Grouping = "kafka") -> bool:
    """Clean again at the same clock, from the checkpoint of the round. Return True if the map had limited the round."""
    if now.checkpoint is not None:
        write_offsets(LOCAL, str(log_dir / "cleaner-offset-checkpoint"), {("t", 0): now.checkpoint})
    _, choice = keytail_choice(log_dir, now, force=True)
    if choice.cleanable_bytes:
        assert now.map_max_entries is not None, f"there is still something to clean: {choice}"
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
