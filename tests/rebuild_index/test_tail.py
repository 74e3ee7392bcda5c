"""The position of a torn tail, the data that its truncation removes, and the logs that are not truncated."""

from __future__ import annotations

import dataclasses
import random
import struct
import subprocess
from pathlib import Path

import pytest

from keytail.errors import CorruptLog, Refused
from keytail.log.fs import LOCAL
from keytail.rebuild_index.tail import truncate_tail
from tests.chance import SEED
from tests.crash.partitions import PARTITION, log_of
from tests.rebuild_index.torn import (
    AFTER,
    CHECKPOINTS,
    HOSTED,
    Torn,
    checkpoints_of,
    facts_of,
    find,
    flipped,
    logs_of,
    plan,
    torn_logs,
    truncate,
)
from tests.reference.batches import Rec, decode_log, encode_batch

WHOLE = log_of(range(10, 15))
BATCH = log_of(range(15, 17))
TEARS = {
    "a truncated batch": BATCH[:-1],
    "a truncated header": BATCH[:40],
    "too few bytes for a magic": BATCH[:16],
    "zeros": bytes(5000),
    "seventeen zeros": bytes(17),
    "a length below the minimum": BATCH[:8] + struct.pack(">i", 13) + BATCH[12:],
    "a negative length": BATCH[:8] + struct.pack(">i", -5) + BATCH[12:],
    "the magic of an old message": BATCH[:16] + b"\1" + BATCH[17:],
    "a negative magic": BATCH[:16] + b"\x82" + BATCH[17:],
    "shorter than a header": BATCH[:8] + struct.pack(">i", 48) + BATCH[12:61],
    "a wrong checksum": flipped(BATCH, len(BATCH) - 1),
    "an old magic and a wrong checksum": BATCH[:8] + struct.pack(">i", 30) + bytes(4) + b"\1" + bytes(25),
}


@pytest.mark.parametrize("tear", TEARS)
@pytest.mark.parametrize("last", [True, False], ids=["in the last segment", "with later segments"])
def test_a_torn_tail_is_found_at_its_byte_and_truncated_there(tear: str, last: bool, tmp_path: Path) -> None:
    logs = {**torn_logs(), 10: WHOLE + TEARS[tear]}
    if last:
        logs = {base: log for base, log in logs.items() if base <= 10}
    torn = Torn(logs)
    torn.make(tmp_path / "d")
    expected = torn.recovered(tmp_path / "d")
    found = find(tmp_path / "d")
    assert found is not None and found.broker_truncates
    assert (found.base_offset, found.byte_position, found.next_offset) == (10, len(WHOLE), 15)
    done = truncate(LOCAL, tmp_path / "d")
    assert done is not None and done.truncated_bytes == len(TEARS[tear])
    assert logs_of(tmp_path / "d") == expected == {0: log_of(range(10)), 10: WHOLE}
    assert checkpoints_of(tmp_path / "d") == AFTER
    left = {path.name for path in (tmp_path / "d" / PARTITION).iterdir() if not path.name.startswith(f"{0:020d}")}
    assert left == {
        f"{10:020d}.log",
        f"{10:020d}.snapshot",
        f"{15:020d}.snapshot",
        "leader-epoch-checkpoint",
    }
    assert find(tmp_path / "d") is None


def test_losses_are_reported(tmp_path: Path) -> None:
    Torn().make(tmp_path / "d")
    reported = plan(tmp_path / "d")
    assert (reported.next_offset, reported.lost_end, reported.acknowledged_until) == (15, 34, 33)
    assert reported.removed_segments == (20, 30)
    assert (reported.cleaner_checkpoint, reported.high_watermark) == (10, 15)
    assert reported.tail.what == "batch has an invalid CRC"
    low = {**CHECKPOINTS, "cleaner-offset-checkpoint": 10, "replication-offset-checkpoint": 15}
    Torn(checkpoints=low).make(tmp_path / "low")
    reported = plan(tmp_path / "low")
    assert (reported.cleaner_checkpoint, reported.high_watermark, reported.acknowledged_until) == (None, None, None)
    item = Torn({0: log_of(range(10)), 10: WHOLE + TEARS["zeros"]})
    item.make(tmp_path / "one")
    reported = plan(tmp_path / "one")  # zeros do not show how many offsets they replaced, but the high watermark does
    assert (reported.lost_end, reported.acknowledged_until) == (33, 33)
    Torn({0: log_of(range(10)), 10: WHOLE + TEARS["zeros"]}, checkpoints=low).make(tmp_path / "unknown")
    assert (plan(tmp_path / "unknown").lost_end, plan(tmp_path / "unknown").acknowledged_until) == (15, None)


def test_a_segment_without_a_valid_batch_remains_empty(tmp_path: Path) -> None:
    logs = {**torn_logs(), 20: bytes(300), 10: log_of(range(10, 19))}
    Torn(logs).make(tmp_path / "d")
    done = truncate(LOCAL, tmp_path / "d")
    assert done is not None and done.next_offset == 20
    assert logs_of(tmp_path / "d") == {0: logs[0], 10: logs[10], 20: b""}
    assert facts_of(tmp_path / "d").log_end_offset == 20


def with_recovery_point(offset: int) -> dict[str, int]:
    return {**CHECKPOINTS, "recovery-point-offset-checkpoint": offset}


BACK = log_of(range(13, 15))  # offsets of earlier batches
REFUSED = {
    "stopped cleanly": (Torn(clean_shutdown=True), "stopped cleanly"),
    "below the recovery point": (Torn(checkpoints=with_recovery_point(16)), "below the recovery point 16"),
    "in a segment below the recovery point": (
        Torn({**torn_logs(), 10: log_of(range(10, 20)) + bytes(9)}, checkpoints=with_recovery_point(20)),
        "below the recovery point 20",
    ),
    "a valid batch with earlier offsets": (Torn({**torn_logs(), 10: WHOLE + BACK}), "would not truncate it here"),
    "an unknown magic": (Torn({**torn_logs(), 10: WHOLE + flipped(BATCH, 16)}), "would not truncate it here"),
    "below the log start": (
        Torn(checkpoints={**CHECKPOINTS, "log-start-offset-checkpoint": 16}),
        "below the log start offset 16",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_damage_is_not_truncated(case: str, tmp_path: Path) -> None:
    torn, why = REFUSED[case]
    torn.make(tmp_path / "d")
    tail = find(tmp_path / "d", anywhere=True)
    assert tail is not None and tail.base_offset == 10
    with pytest.raises(CorruptLog, match=why) as corrupt:
        plan(tmp_path / "d", tail)
    assert corrupt.value.byte_position == tail.byte_position
    assert logs_of(tmp_path / "d") == dict(torn.logs)


def test_the_recovery_point_itself_may_be_the_new_end(tmp_path: Path) -> None:
    Torn(checkpoints=with_recovery_point(15)).make(tmp_path / "d")
    assert plan(tmp_path / "d").next_offset == 15


def test_a_file_that_changed_is_not_truncated(tmp_path: Path) -> None:
    Torn().make(tmp_path / "d")
    reported = plan(tmp_path / "d")
    grown = dataclasses.replace(
        reported, tail=dataclasses.replace(reported.tail, log_bytes=reported.tail.log_bytes - 1)
    )
    with pytest.raises(Refused, match="nothing was changed"):
        truncate_tail(LOCAL, facts_of(tmp_path / "d"), grown, hosted=HOSTED)
    assert logs_of(tmp_path / "d") == torn_logs() and checkpoints_of(tmp_path / "d") == CHECKPOINTS


def test_a_log_with_another_hard_link_is_not_truncated(tmp_path: Path) -> None:
    Torn().make(tmp_path / "d")
    reported = plan(tmp_path / "d")
    log = tmp_path / "d" / "orders-0" / f"{reported.tail.base_offset:020d}.log"
    (tmp_path / "backup").hardlink_to(log)
    with pytest.raises(Refused, match="2 hard links") as refused:
        truncate_tail(LOCAL, facts_of(tmp_path / "d"), reported, hosted=HOSTED)
    assert refused.value.path == str(log)
    assert logs_of(tmp_path / "d") == torn_logs() and checkpoints_of(tmp_path / "d") == CHECKPOINTS


def test_the_remedy_for_a_hard_link_does_not_change_the_backup(tmp_path: Path) -> None:
    Torn().make(tmp_path / "d")
    reported = plan(tmp_path / "d")
    log = tmp_path / "d" / "orders-0" / f"{reported.tail.base_offset:020d}.log"
    (tmp_path / "backup").hardlink_to(log)
    with pytest.raises(Refused) as refused:
        truncate_tail(LOCAL, facts_of(tmp_path / "d"), reported, hosted=HOSTED)
    assert "`cp -p X.log X.log.copy`, then `mv X.log.copy X.log`" in str(refused.value)
    subprocess.run(["cp", "-p", log, f"{log}.copy"], check=True)
    subprocess.run(["mv", f"{log}.copy", log], check=True)
    truncate_tail(LOCAL, facts_of(tmp_path / "d"), reported, hosted=HOSTED)
    assert log.read_bytes() == WHOLE
    assert (tmp_path / "backup").read_bytes() == torn_logs()[reported.tail.base_offset]


def test_random_damage_is_truncated_at_the_same_byte_as_by_a_broker(tmp_path: Path) -> None:
    rng = random.Random(f"torn {SEED}")
    for number in range(60):
        logs, offset = {}, 0
        for base in (0, 40, 80):
            parts = []
            offset = max(offset, base)
            for _ in range(rng.randint(0, 6)):
                count = rng.randint(1, 4)
                parts.append(encode_batch([Rec(offset + i, 5, b"k", b"v" * rng.randint(0, 90)) for i in range(count)]))
                offset += count
            logs[base] = b"".join(parts)
        victim = rng.choice([base for base in logs if logs[base]] or [80])
        log = logs[victim]
        if log and rng.random() < 0.5:
            batch = rng.choice(decode_log(log))  # the byte is after the base offset, which no checksum covers
            logs[victim] = flipped(log, batch.position + rng.randrange(8, batch.size))
        else:
            logs[victim] = log[: rng.randint(0, len(log))] + rng.randbytes(rng.randint(0, 90))
        recovery_point = rng.choice([0, 0, victim, 80])
        torn = Torn(logs, (40, 80), with_recovery_point(recovery_point))
        root = tmp_path / str(number)
        torn.make(root)
        expected, was = torn.recovered(root), dict(logs)
        try:
            truncate(LOCAL, root)
        except CorruptLog as corrupt:
            assert logs_of(root) == was, corrupt
            assert expected == was or "recovery point" in str(corrupt), f"log {number}"
        else:
            assert logs_of(root) == expected, f"log {number}, recovery point {recovery_point}"
