"""Batches that are retained because the state of an active producer depends on them."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from keytail.compact.producers import ActiveProducers
from keytail.format.batch import BATCH_TABLE
from keytail.format.producers import ProducerEntry, encode_snapshot
from tests.command_line import Run, rows_of
from tests.log.test_producers import batch
from tests.log_dirs import write_log_dir
from tests.no_spark import without_spark
from tests.reference.batches import Rec, decode_log, encode_batch


def table_of(*batches: bytes) -> np.ndarray:
    table = np.zeros(len(batches), BATCH_TABLE)
    for row, raw in zip(table, batches, strict=True):
        (found,) = decode_log(raw)
        row["base_offset"], row["last_offset"] = found.base_offset, found.last_offset
        row["producer_id"], row["producer_epoch"] = found.producer_id, found.producer_epoch
        row["attributes"], row["record_count"] = found.attributes, found.record_count
    return table


def test_batches_that_an_active_producer_needs_are_found() -> None:
    known = ActiveProducers(np.array([1, 5, 9]), np.array([20, -1, -1]), np.array([0, 3, -1]))
    table = table_of(
        batch("data", 19, 1, count=2),  # it is the last data batch of its producer
        batch("data", 21, 1),
        batch("COMMIT", 20, 1),  # it has the same last offset, and Kafka compares only offsets
        batch("COMMIT", 22, 1),
        batch("COMMIT", 23, 5, epoch=3),  # without known data, every control batch of the epoch is needed
        batch("emptied marker", 24, 5, epoch=3),
        batch("COMMIT", 25, 5, epoch=2),
        batch("data", 26, 5, epoch=3),
        batch("data", 20, 2),
        batch("none", 20),
    )
    assert known.ends_a_producer(table).tolist() == [True, False, True, False, True, True] + [False] * 4
    nobody = ActiveProducers(*(np.empty(0, np.int64) for _ in range(3)))
    assert not nobody.ends_a_producer(table).any()


KNOWN = ("--topics-have-no-overrides", "--topic-config", "orders:cleanup.policy=compact", "--force")


@pytest.fixture
def idle(tmp_path: Path) -> Path:
    """A log dir with a producer that has been idle for two days, and whose last record is superseded."""
    log_dir, at_ms = tmp_path / "logs", time.time_ns() // 10**6 - 2 * 86_400_000
    write_log_dir(log_dir, {"orders-0": [Rec(2, at_ms, b"k", b"v")]}, segments=1)
    shutil.rmtree(log_dir / "orders-0")
    (log_dir / "orders-0").mkdir()
    own = encode_batch([Rec(0, at_ms, b"k", b"1")], producer_id=5, producer_epoch=0, base_sequence=0)
    log = own + encode_batch([Rec(1, at_ms, b"k", b"2")])
    for base, data in ((0, log), (2, encode_batch([Rec(2, at_ms, b"x", b"3")]))):
        for suffix, content in ((".log", data), (".index", b""), (".timeindex", b"")):
            (log_dir / "orders-0" / f"{base:020d}{suffix}").write_bytes(content)
    entry = ProducerEntry(5, 0, 0, 0, 0, at_ms, -1, -1)
    (log_dir / "orders-0" / f"{3:020d}.snapshot").write_bytes(encode_snapshot([entry]))
    return log_dir


@pytest.mark.parametrize(
    ("expiration", "kept"),
    [
        ((), [(0, 0), (1, 1)]),  # unknown
        (("--topic-config", "producer.id.expiration.ms=86400000"), [(1, 1)]),
        (("--topic-config", "producer.id.expiration.ms=259200000"), [(0, 0), (1, 1)]),
    ],
)
@pytest.mark.parametrize("how", ["one task", "out of place", "prepared"])
def test_the_last_batch_of_a_producer_is_removed_only_if_it_is_known_to_have_expired(
    run: Run, idle: Path, tmp_path: Path, how: str, expiration: tuple[str, ...], kept: list[tuple[int, int]]
) -> None:
    given, target = ("compact", "--log-dirs", idle, *KNOWN, *expiration, "--output", "json"), idle
    with without_spark():
        if how == "prepared":
            assert rows_of(run(*given, "--prepare"))["orders-0"]["status"] == "prepared"
            given = (*given, "--prepared-only")
        elif how == "out of place":
            target = tmp_path / "out"
            given = (*given, "--output-dir", target)
        done = run(*given, "--execute")
    assert rows_of(done)["orders-0"]["status"] == "compacted", done.output
    found = decode_log((target / "orders-0" / f"{0:020d}.log").read_bytes())
    assert [(item.base_offset, item.record_count) for item in found] == kept
