"""Kafka's own loader opens every state after a stop of a replacement or of its recovery. It must find the same log as
the model in tests/reference/loader.py, which finds all sources or all outputs, and each record by its offset through
the indexes.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from keytail.log.replacement import replace
from keytail.log.replacement.recover import recover
from tests.chance import SEED
from tests.crash.driver import (
    EVERY_FAULT,
    SOAK,
    Counts,
    State,
    for_every_fault,
    for_every_stop,
    for_every_stop_and_fault,
)
from tests.crash.explorer import digest_of_rest
from tests.crash.partitions import PARTITION, Partition
from tests.crash.test_compaction import SHAPES
from tests.crash.test_replace import CASES
from tests.interop.conftest import fast_dir, kafka  # noqa: F401
from tests.interop.kafka import Kafka, KafkaError
from tests.log.replacement.test_swap_states import ROWS, Dir
from tests.reference.loader import Loaded, load

CONFIGS = {"cleanup.policy": "compact", "segment.index.bytes": "8192", "index.interval.bytes": "50"}
pytestmark = pytest.mark.interop


@pytest.mark.one_of()
@pytest.mark.parametrize("name", CASES)
def test_kafka_finds_all_sources_or_all_outputs_after_every_stop(
    name: str,
    kafka: Kafka,  # noqa: F811
    fast_dir: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    partition = CASES[name]
    counts, in_recovery = Counts("replacement, opened by Kafka"), Counts("recovery, opened by Kafka")

    def commit(fs, root: Path) -> None:
        for group in partition.outputs():
            replace.commit_group(fs, str(root / PARTITION), group)

    def check(state: State) -> None:
        _compare(kafka, partition, state.root)
        for_every_stop(
            state.tree,
            lambda fs, root: recover(fs, str(root / PARTITION)),
            lambda stopped: _compare(kafka, partition, stopped.root),
            work_dir=fast_dir / "recovery", counts=in_recovery, partial_cuts=int(EVERY_FAULT), seed=3,
        )  # fmt: skip

    for_every_stop(partition.make, commit, check, work_dir=fast_dir / "commit", counts=counts, seed=4)
    for_every_fault(
        partition.make, commit, lambda state: _compare(kafka, partition, state.root),
        work_dir=fast_dir / "faults", counts=counts, share=0.1, seed=SEED,
    )  # fmt: skip
    with capsys.disabled():
        print(f"\nopened by Kafka: {name} (seed {SEED}): {counts}; in the recovery of these {in_recovery}")


@pytest.mark.parametrize("name", SHAPES if SOAK else ["merges"])
def test_kafka_opens_all_states_after_stops_and_faults_of_a_compaction(
    name: str,
    kafka: Kafka,  # noqa: F811
    fast_dir: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Kafka finds the same offsets as the model, also through the indexes. Each state is checked once."""
    log_dir, counts = SHAPES[name], Counts("compaction, opened by Kafka")
    opened: set[str] = set()

    def check(state: State) -> None:
        digest = digest_of_rest(state.tree)
        if digest in opened:
            return
        opened.add(digest)
        for log in log_dir.logs:
            path = state.root / log.name
            model = load(path)
            loaded = kafka.load(path, configs=CONFIGS, fetch=True)
            assert loaded.segment_bases == sorted(model.segments)
            assert [record.offset for record in loaded.records] == [record.offset for record in model.records()]
            assert loaded.fetch_mismatches == ()

    for_every_stop_and_fault(
        log_dir.make, log_dir.run, check, work_dir=fast_dir / "work", counts=counts, share=0.02, seed=SEED
    )
    with capsys.disabled():
        print(f"\nopened by Kafka: {name} (seed {SEED}): {counts}, {len(opened)} differ in more than scratch files")


def _compare(kafka: Kafka, partition: Partition, root: Path) -> None:  # noqa: F811
    copy = root.with_name(root.name + "-for-kafka") / PARTITION
    shutil.copytree(root / PARTITION, copy)
    model = load(copy)
    partition.judge(model)
    try:
        _check_kafka_agrees(kafka, model, copy)
    finally:
        shutil.rmtree(copy.parent)


def _check_kafka_agrees(kafka: Kafka, model: Loaded, path: Path) -> None:  # noqa: F811
    loaded = kafka.load(path, configs=CONFIGS, fetch=True)
    assert loaded.segment_bases == sorted(model.segments)
    assert [record.offset for record in loaded.records] == [record.offset for record in model.records()]
    assert loaded.fetch_mismatches == ()
    for base, segment in model.segments.items():
        assert (path / f"{base:020d}.log").read_bytes() == segment.log
        if segment.index is not None and base != max(model.segments):
            assert (path / f"{base:020d}.index").read_bytes() == segment.index
            assert (path / f"{base:020d}.timeindex").read_bytes() == segment.time_index


@pytest.mark.parametrize("number", ROWS)
def test_kafka_loads_each_row_of_the_table_as_documented(
    number: int,
    kafka: Kafka,  # noqa: F811
    fast_dir: Path,  # noqa: F811
) -> None:
    row, d = ROWS[number], Dir(fast_dir, ROWS[number])
    row.build(d)
    if number == 23:
        with pytest.raises(KafkaError, match="foo"):
            kafka.load(d.path, configs=CONFIGS)
        return
    loaded = kafka.load(d.path, configs=CONFIGS)
    if number == 24:  # no source is deleted, because the index points at the truncated batch
        assert loaded.segment_bases == [0, 10, 20, 30]
        assert [record.offset for record in loaded.records][:6] == [1, 4, 8, 12, 15, 23]
        return
    assert isinstance(row.broker, dict)
    found = {base: (d.path / f"{base:020d}.log").read_bytes() for base in loaded.segment_bases}
    assert found == row.broker
