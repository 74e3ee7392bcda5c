"""Rounds of keytail compared with the cleaner classes of older versions, on the random logs of tests/interop.

KEYTAIL_FUZZ_LOGS sets the number of logs per version, KEYTAIL_SEED repeats a run, and KEYTAIL_FUZZ_LOG runs only the
log of that number.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from keytail.config.broker_version import parse_broker_version
from tests.interop.fuzz import run_cases
from tests.interop.kafka import CLOCK_MS, Kafka, Opened, step_batch, step_marker, step_roll
from tests.interop.rounds import Circumstances, Difference, Outcome, Round
from tests.interop.test_differential import keytail_round
from tests.versions_of_kafka import VERSIONS
from tests.versions_of_kafka.cleaner import EMPTIED, CaseOfVersion, OldCleaner, Rule

pytestmark = [pytest.mark.interop]

LOGS = int(os.environ.get("KEYTAIL_FUZZ_LOGS", "24"))
OLDER = [version for version in VERSIONS if version < "4"]
BY_FILE_TIME = [version for version in OLDER if parse_broker_version(version).cleans_by_file_time]
NEVER_MISSED = (
    "newest tombstones removed",
    "markers removed",
    "batches without records",
    "compressed batches",
    "rounds with a full map",
    "rounds from inside a segment",
    "logs ending in an open transaction",
    "aborted transactions",
)


@pytest.fixture(scope="module")
def cleaner(version: str) -> Iterator[OldCleaner]:
    item = OldCleaner(version)
    yield item
    item.close()


def run_rounds(
    kafka: Kafka,
    cleaner: OldCleaner,
    directory: Path,
    share: float,
    *,
    by_file_time: bool,
    rule: Rule,
    configs: dict[str, Any] | None = None,
    **traffic: Any,
) -> Counter[str]:
    def ours(log_dir: Path, now: Circumstances) -> Outcome:
        message_format = "keep" if traffic.get("legacy") else "v2"
        return keytail_round(log_dir, now, by_file_time=by_file_time, message_format=message_format)

    case_of = partial(CaseOfVersion, cleaner, rule=rule)
    # If the map is full, 2.4.1 reads aborted transactions only up to its end, and retains aborted data after it.
    from_inside = cleaner.version >= "2.8"
    return run_cases(
        kafka, directory, ours, logs=max(1, round(LOGS * share)), case_of=case_of, configs=configs,
        **{"transactional": True, "from_inside": from_inside, **traffic},
    )  # fmt: skip


@pytest.mark.parametrize("version", OLDER, indirect=True)
@pytest.mark.parametrize(
    ("traffic", "share"),
    [({}, 0.5), ({"transactional": False}, 0.2), ({"legacy": True}, 0.3)],
    ids=["transactional", "plain", "legacy"],
)
def test_a_round_has_the_result_of_the_cleaner_of_the_version(
    version: str, cleaner: OldCleaner, kafka: Kafka, fast_dir: Path, traffic: dict[str, Any], share: float
) -> None:
    """Each round starts from Kafka's previous result. From 3.1 on, delete horizons are also compared."""
    by_file_time = parse_broker_version(version).cleans_by_file_time
    rule: Rule = "equal" if by_file_time else "may keep the last"
    seen = run_rounds(kafka, cleaner, fast_dir, share, by_file_time=by_file_time, rule=rule, **traffic)
    assert by_file_time or not seen["horizons dropped by a rewrite"]
    if seen["logs"] >= 100 and not traffic:
        wanted = (*NEVER_MISSED, *(("horizons kept", "horizons dropped by a rewrite") if by_file_time else (EMPTIED,)))
        missing = [name for name in wanted if not seen[name]]
        assert not missing, f"the random logs never had: {missing}"


@pytest.mark.parametrize("version", BY_FILE_TIME, indirect=True)
@pytest.mark.parametrize("retention_ms", [0, 2**40])
def test_without_broker_version_only_tombstones_and_markers_are_retained_longer(
    version: str, cleaner: OldCleaner, kafka: Kafka, fast_dir: Path, retention_ms: int
) -> None:
    """Before keytail's round, no batch has a delete horizon. With a long delete.retention.ms, neither side removes a
    tombstone or marker.
    """
    seen = run_rounds(
        kafka, cleaner, fast_dir, 0.3, by_file_time=False, rule="keeps longer", replicated=False, far_jumps=False,
        configs={"delete.retention.ms": retention_ms},
    )  # fmt: skip
    longer = seen["tombstones that only keytail keeps"], seen["markers that only keytail keeps"]
    print(f"{version}, delete.retention.ms {retention_ms}: (tombstones, markers) that only keytail retains: {longer}")
    if retention_ms:
        assert longer == (0, 0)
    elif seen["logs"] >= 20:
        assert all(longer)


CONFIGS = {"internal.segment.bytes": 300, "delete.retention.ms": 60_000, "index.interval.bytes": 4096}
EXPIRATION_MS = 10_000


def play(case: CaseOfVersion, steps: list[dict[str, Any]], ages_ms: dict[int, int]) -> set[int]:
    """Run one round by file time over all closed segments, and return the offsets that Kafka retains.

    `ages_ms` are the ages of segment files by base offset. All producers have expired.
    """
    clock_ms = CLOCK_MS + 2 * EXPIRATION_MS

    def draw(opened: Opened, checkpoint: int | None) -> Circumstances:
        for base, age_ms in ages_ms.items():
            os.utime(case.source / "t-0" / f"{base:020d}.log", ns=(0, (CLOCK_MS - age_ms) * 10**6))
        end = opened.log_end_offset
        return Circumstances(CONFIGS, clock_ms, 0, end, end, checkpoint, None, EXPIRATION_MS)

    options = {"configs": CONFIGS, "clock_ms": clock_ms, "producer_id_expiration_ms": EXPIRATION_MS}
    ours = partial(keytail_round, by_file_time=True)
    assert case.play(ours, Round(steps, options, None), draw)
    return {record.offset for record in case.loaded(case.kafka, case.now).records}


@pytest.mark.parametrize("version", BY_FILE_TIME, indirect=True)
def test_a_second_round_removes_expired_tombstones_and_markers(
    version: str, cleaner: OldCleaner, kafka: Kafka, fast_dir: Path
) -> None:
    """The second round removes the tombstones of a file that is now old enough, and the marker of a transaction whose
    data the first round removed.
    """
    case = CaseOfVersion(cleaner, kafka, fast_dir / "log", Counter())
    steps = [
        step_batch([(CLOCK_MS, b"k", b"1")], producer=(4000, 0, 0), transactional=True),
        step_marker("COMMIT", 4000, 0, CLOCK_MS),
        step_batch([(CLOCK_MS, b"k", b"2"), (CLOCK_MS, b"of the old file", None)]),
        step_roll(),
        step_batch([(CLOCK_MS, b"of the newer file", None)]),
        step_roll(),
    ]
    ages_ms = {0: 60_000, 4: 0}
    assert play(case, steps, ages_ms) == {1, 2, 3, 4}
    steps = [step_batch([(CLOCK_MS, b"dirty", b"1")]), step_roll()]
    assert play(case, steps, ages_ms) == {2, 4, 5}
    steps = [step_batch([(CLOCK_MS, b"dirty", b"2")]), step_roll()]
    assert play(case, steps, {5: -60_000}) == {2, 6}


@pytest.mark.parametrize("version", [v for v in BY_FILE_TIME if v < "3"], indirect=True)
def test_a_record_with_the_key_of_a_marker_does_not_supersede_it(
    version: str, cleaner: OldCleaner, kafka: Kafka, fast_dir: Path
) -> None:
    """A departure (CLEANING.md 16): before 3.0, Kafka removes the marker although its data is retained."""
    case = CaseOfVersion(cleaner, kafka, fast_dir / "log", Counter())
    steps = [
        step_batch([(CLOCK_MS, b"k", b"1")], producer=(4000, 0, 0), transactional=True),
        step_marker("COMMIT", 4000, 0, CLOCK_MS),
        step_batch([(CLOCK_MS, (1).to_bytes(4), b"as a number of 32 bits")]),
        step_roll(),
    ]
    with pytest.raises(Difference, match="batch 1 of 2 and 3"):
        play(case, steps, {})
    assert {record.offset for record in case.loaded(case.kafka, case.now).records} == {0, 2}
    assert {record.offset for record in case.loaded(case.ours, case.now).records} == {0, 1, 2}
