"""`verify` on what real Kafka writes and cleans: nothing to find on healthy logs, each damage found at its place.

KEYTAIL_SEED repeats a run, KEYTAIL_FUZZ_LOGS makes it longer.
"""

from __future__ import annotations

import os
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from keytail.inspection.findings import Finding
from keytail.inspection.verify import verify_partition
from keytail.inspection.verify_log_dir import verify_log_dir
from keytail.inspection.verify_scope import claims_of
from keytail.log.fs import LOCAL
from keytail.log.partition import survey_log_dirs
from tests.interop.fuzz import run_cases
from tests.interop.kafka import Kafka
from tests.interop.rounds import Circumstances, Difference, Mode, Outcome, Side
from tests.interop.test_differential import keytail_round, measured_round

pytestmark = pytest.mark.interop

LOGS = int(os.environ.get("KEYTAIL_FUZZ_LOGS", "300"))


def findings(log_dir: Path) -> list[Finding]:
    facts = survey_log_dirs(LOCAL, [str(log_dir)])[0]
    found = list(verify_log_dir(LOCAL, str(log_dir)))
    for entry in facts.partitions:
        found += verify_partition(LOCAL, entry.path, claims_of(facts, entry.topic, entry.partition))
    return found


def expect_nothing(log_dir: Path, now: Circumstances, seen: Counter[str], *, thrown: bool = False) -> None:
    """`thrown`: Kafka's cleaner gave up here, and left what it had begun."""
    found = [finding for finding in findings(log_dir) if not (thrown and finding.kind == "leftover-cleaned")]
    if now.checkpoint is not None and now.checkpoint > now.log_end_offset:  # drawn so
        found = [finding for finding in found if finding.kind != "cleaner-checkpoint"]
    lines = [f"{f.kind}: {f.what} ({f.path}, byte {f.byte_position}, offset {f.offset})" for f in found]
    if lines:
        raise Difference("\n".join(lines))
    seen["healthy logs"] += 1


def looked_at(log_dir: Path, now: Circumstances, *, ours: Side, seen: Counter[str]) -> Outcome:
    """One of our rounds, with a look at what Kafka appended, at what its cleaner left, and at what ours leaves."""
    expect_nothing(log_dir, now, seen)
    expect_nothing(log_dir.parent / "kafka", now, seen, thrown=any(log_dir.parent.glob("kafka/t-0/*.cleaned")))
    outcome = ours(log_dir, now)
    expect_nothing(log_dir, now, seen)
    return outcome


@pytest.mark.parametrize(
    "mode, options, share",
    [
        ("each", {"transactional": True}, 0.04),
        ("drift", {"transactional": True, "codecs": ["none"]}, 0.02),
        ("measured", {"legacy": True, "transactional": True}, 0.02),
        ("each", {}, 0.02),
    ],
    ids=["transactional", "drift", "legacy", "plain"],
)
def test_nothing_is_found_on_healthy_logs(
    kafka: Kafka, fast_dir: Path, mode: Mode, options: dict[str, Any], share: float
) -> None:
    seen: Counter[str] = Counter()
    side = partial(looked_at, ours=measured_round if mode == "measured" else keytail_round, seen=seen)
    logs = max(1, round(LOGS * share))
    run_cases(kafka, fast_dir, side, logs=logs, mode=mode, from_inside=mode != "measured", **options)
    assert seen["healthy logs"] >= 3 * logs
