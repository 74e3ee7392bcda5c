"""`verify` on logs that Kafka writes and cleans: intact logs have no findings, and each damage is found at its
position.

KEYTAIL_SEED repeats a run, KEYTAIL_FUZZ_LOGS sets the number of logs.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from keytail.cli.configuration import Configuration
from keytail.cli.selection import PartitionFilter
from keytail.describe.command import Request as DescribeRequest
from keytail.describe.driver import describe
from keytail.log.fs import LOCAL
from keytail.log.log_dirs import survey_log_dirs
from keytail.verify.command import Request
from keytail.verify.driver import verify, verify_log_dir
from keytail.verify.findings import Finding
from keytail.verify.scope import claims_of
from keytail.verify.task import verify_partition
from tests.chance import SEED
from tests.interop import damages
from tests.interop.fuzz import run_cases
from tests.interop.kafka import Kafka, KafkaError
from tests.interop.rounds import NO_ROOM, OLD_EMPTIED, Circumstances, Difference, Mode, Outcome, Side
from tests.interop.test_differential import keytail_round, measured_round
from tests.interop.traffic import random_traffic

pytestmark = pytest.mark.interop

FAILURES_OF_ITS_CLEANER = (OLD_EMPTIED[1], NO_ROOM[1])
LOGS = int(os.environ.get("KEYTAIL_FUZZ_LOGS", "300"))


def findings(log_dir: Path) -> list[Finding]:
    facts = survey_log_dirs(LOCAL, [str(log_dir)])[0]
    found = list(verify_log_dir(LOCAL, str(log_dir)))
    for entry in facts.partitions:
        found += verify_partition(LOCAL, entry.path, claims_of(facts, entry.topic, entry.partition))
    return found


def expect_nothing(
    log_dir: Path, now: Circumstances, seen: Counter[str], *, has_gaps: bool, thrown: bool = False
) -> None:
    """Check that there are no findings.

    `thrown`: Kafka's cleaner failed, and left incomplete files. `has_gaps`: the log may lack offsets, because the
    traffic skips some, or because a cleaner that left no checkpoint removed batches at the end of one segment.
    """
    found = [finding for finding in findings(log_dir) if not (thrown and finding.kind == "leftover-cleaned")]
    if now.checkpoint is not None and now.checkpoint > now.log_end_offset:  # the draws include such checkpoints
        found = [finding for finding in found if finding.kind != "cleaner-checkpoint"]
    if has_gaps:
        found = [finding for finding in found if finding.kind != "offsets-missing"]
    lines = [f"{f.kind}: {f.what} ({f.path}, byte {f.byte_position}, offset {f.offset})" for f in found]
    if lines:
        raise Difference("\n".join(lines))
    seen["healthy logs"] += 1


def examined(log_dir: Path, now: Circumstances, *, ours: Side, seen: Counter[str], has_gaps: bool) -> Outcome:
    """Run a round of keytail. Check that neither its source nor its result, nor that of Kafka's cleaner, has findings.
    """
    expect_nothing(log_dir, now, seen, has_gaps=has_gaps)
    thrown = any(log_dir.parent.glob("kafka/t-0/*.cleaned"))
    expect_nothing(log_dir.parent / "kafka", now, seen, has_gaps=True, thrown=thrown)
    outcome = ours(log_dir, now)
    expect_nothing(log_dir, now, seen, has_gaps=True)
    return outcome


@pytest.mark.parametrize(
    "mode, options, share",
    [
        ("each", {"transactional": True}, 0.04),
        ("drift", {"transactional": True, "codecs": ["none"], "far_jumps": False}, 0.02),
        ("measured", {"legacy": True, "transactional": True, "far_jumps": False}, 0.02),
        ("each", {"far_jumps": False}, 0.02),
    ],
    ids=["transactional", "drift", "legacy", "plain"],
)
def test_healthy_logs_have_no_findings(
    kafka: Kafka, fast_dir: Path, mode: Mode, options: dict[str, Any], share: float
) -> None:
    seen: Counter[str] = Counter()
    has_gaps = options.get("far_jumps", True) or mode == "drift"  # several rounds, one after the other
    ours = measured_round if mode == "measured" else keytail_round
    side = partial(examined, ours=ours, seen=seen, has_gaps=has_gaps)
    logs = max(1, round(LOGS * share))
    run_cases(
        kafka, fast_dir, side, logs=logs, mode=mode, from_inside=mode != "measured",
        enough=lambda _: seen["healthy logs"] >= 3 * logs, **options,
    )  # fmt: skip


@pytest.mark.parametrize("cleaned", [False, True], ids=["as appended", "cleaned"])
def test_each_damage_is_found_at_its_position(kafka: Kafka, fast_dir: Path, cleaned: bool) -> None:
    """`witness` checks that Kafka's recovery, dump tool or loader also detects the damage."""
    logs = max(3, LOGS // 75)
    print(f"KEYTAIL_SEED={SEED} KEYTAIL_FUZZ_LOGS={LOGS} cleaned={cleaned}", flush=True)
    done: Counter[str] = Counter()
    agreed: Counter[str] = Counter()
    for number in range(logs):
        rng = random.Random(f"{SEED}-{number}")
        healthy = fast_dir / f"healthy-{number}"
        _write_log(kafka, healthy, rng, cleaned=cleaned)
        for damage in [*damages.ANYWHERE, *([] if cleaned else damages.NEVER_CLEANED)]:
            broken = fast_dir / "broken"
            shutil.copytree(healthy, broken)
            made = damage(rng, broken / "t-0")
            if made is not None:
                where = f"{damage.__name__} of log {number}: {made}"
                found = findings(broken)
                assert any(_is(finding, made) for finding in found), f"{where}; found {found}"
                done[damage.__name__] += 1
                if made.witness is not None:
                    assert made.witness(kafka, broken / "t-0"), f"Kafka finds no damage in {where}"
                    agreed[damage.__name__] += 1
            shutil.rmtree(broken)
    print(f"found {dict(done)}; Kafka agreed on {dict(agreed)}")
    if not cleaned and logs >= 12:
        never = [d.__name__ for d in [*damages.ANYWHERE, *damages.NEVER_CLEANED] if not done[d.__name__]]
        assert not never, f"these kinds of damage were impossible in all random logs: {never}"


def _is(finding: Finding, made: damages.Damage) -> bool:
    return (
        finding.kind in made.kinds
        and finding.path == str(made.path)
        and finding.byte_position == made.byte_position
        and bool(finding.broker and finding.remedy)
    )


def _write_log(kafka: Kafka, log_dir: Path, rng: random.Random, *, cleaned: bool) -> None:
    """Write a log dir with one partition of random traffic, without errors."""
    legacy = cleaned and rng.random() < 0.3
    traffic = random_traffic(rng, transactional=not legacy, legacy=legacy, delete_records=False, far_jumps=False)
    traffic.batches_a_round = (40, 80)
    log_dir.mkdir()
    for _ in range(2):
        options = dict(traffic.options)
        opened = kafka.append(log_dir / "t-0", traffic.steps(), **options)
    if cleaned:
        try:
            kafka.clean(log_dir / "t-0", only_if_cleanable=True, **traffic.options)
        except KafkaError as thrown:  # Kafka's cleaner fails on a few logs; write another log then
            if not any(known in str(thrown) for known in FAILURES_OF_ITS_CLEANER):
                raise
            shutil.rmtree(log_dir)
            _write_log(kafka, log_dir, rng, cleaned=cleaned)
            return
    for name in ("recovery-point-offset-checkpoint", "replication-offset-checkpoint"):
        kafka.write_checkpoint(log_dir / name, {"t-0": opened.log_end_offset})
    (log_dir / "meta.properties").write_text("version=1\nnode.id=1\n")
    (log_dir / ".kafka_cleanshutdown").write_text('{"version":0,"brokerEpoch":42}')
    assert findings(log_dir) == []


def test_beside_a_broker_the_row_is_live_and_the_tail_is_not_checked(kafka: Kafka, tmp_path: Path) -> None:
    log_dir = tmp_path / "logs"
    _write_log(kafka, log_dir, random.Random(1), cleaned=False)
    (log_dir / ".kafka_cleanshutdown").unlink()
    active = sorted((log_dir / "t-0").glob("*.log"))[-1]
    active.write_bytes(active.read_bytes() + b"half a batch")
    partition_filter = PartitionFilter(log_dirs=(str(log_dir),))
    [crashed] = verify(Request(partition_filter))
    assert (crashed.live, crashed.status) == (False, "suspect")
    assert [finding.kind for finding in crashed.findings] == ["cut-active"]
    assert kafka.lock(log_dir)
    try:
        [row] = verify(Request(partition_filter))
        [described] = describe(DescribeRequest(partition_filter, Configuration(), now_ms=0, count_records=True))
    finally:
        kafka.unlock(log_dir)
    assert (row.live, row.status, row.findings) == (True, "sound", ())
    assert (described.live, described.error) == (True, "")
    assert described.records == row.records
    assert not (log_dir / ".lock").exists()
