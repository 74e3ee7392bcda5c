"""`--roll-active` compared with Kafka's classes: UnifiedLog rolls a copy of a random log, and Cleaner cleans it;
keytail rolls and cleans another copy. KEYTAIL_FUZZ_LOGS and KEYTAIL_SEED are used as in test_differential.py.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from keytail.compact.roll import after_roll, reason_against
from keytail.log.append.roll_closed import roll, why_not_closed
from keytail.log.fs import LOCAL
from keytail.log.log_dirs import survey_log_dirs
from keytail.log.partition import PartitionFacts, survey_partition
from tests.interop.fuzz import run_cases
from tests.interop.kafka import Cleaned, Kafka, KafkaError, step_roll
from tests.interop.rounds import Case, Circumstances, Outcome, Side
from tests.interop.test_differential import BOTH, LOGS, PLAIN, keytail_round, run_again

pytestmark = pytest.mark.interop


def facts_of(log_dir: Path) -> PartitionFacts:
    [listing] = survey_log_dirs(LOCAL, [str(log_dir)])
    [entry] = listing.partitions
    return survey_partition(LOCAL, listing, entry)


def roll_here(log_dir: Path) -> bool:
    """Roll as a run does, and return whether there was something to roll. Check that the facts are those that
    `after_roll` predicts."""
    facts = facts_of(log_dir)
    if reason_against(facts):
        return False
    assert why_not_closed(LOCAL, facts) == ""
    new = roll(LOCAL, facts.path, facts.segments[-1], facts.log_end_offset)
    after, planned = facts_of(log_dir), after_roll(facts)
    assert after.segments[-1] == new
    times = {"log_mtime_ns": 0, "largest_timestamp_ms": 0}
    assert after.segments[:-1] == planned.segments[:-1]
    assert after.segments[-1]._replace(**times) == planned.segments[-1]._replace(**times)
    return True


def bytes_of(directory: Path) -> Mapping[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def set_time_of_new_segment(log_dir: Path, now: Circumstances) -> None:
    path = log_dir / "t-0" / f"{now.log_end_offset:020d}.log"
    os.utime(path, ns=(0, now.now_ms * 10**6))


class RolledCase(Case):
    """Before the round, Kafka rolls its copy and stops cleanly; keytail's roll of another copy must have the same
    bytes.
    """

    def _kafka_round(self, now: Circumstances) -> Cleaned:
        rolled = self.home / "rolled"
        shutil.rmtree(rolled, ignore_errors=True)
        shutil.copytree(self.source, rolled)
        self.seen["rolled"] += roll_here(rolled)
        self.harness.append(self.kafka / "t-0", [step_roll()], **self._opening(now))
        assert bytes_of(self.kafka / "t-0") == bytes_of(rolled / "t-0")
        self._set_times(rolled / "t-0", now)
        self.seen["with an open transaction"] += any(
            producer[-1] >= 0 for producer in self.loaded(self.kafka, now).producers
        )
        return super()._kafka_round(now)

    def _check_after_exception(self, ours: Side, now: Circumstances, error: KafkaError) -> None:
        roll_here(self.source)  # the result is compared with the rolled source
        super()._check_after_exception(ours, now, error)

    def _set_times(self, rolled: Path, now: Circumstances) -> None:
        """Give the files of both copies the same times. Only those of logs matter; Kafka changed those of indexes when
        it opened its copy."""
        for file in (self.kafka / "t-0").iterdir():
            ours = (rolled / file.name).stat().st_mtime_ns
            if file.suffix == ".log" and file.name != f"{now.log_end_offset:020d}.log":
                assert file.stat().st_mtime_ns == ours
            os.utime(file, ns=(0, ours))
        set_time_of_new_segment(self.kafka, now)


def rolled_round(log_dir: Path, now: Circumstances) -> Outcome:
    roll_here(log_dir)
    set_time_of_new_segment(log_dir, now)
    return keytail_round(log_dir, now)


@pytest.mark.parametrize(("options", "share"), [(PLAIN, 0.05), (BOTH, 0.1)], ids=["plain", "both"])
def test_a_rolled_and_cleaned_log_equals_the_one_of_kafka(
    kafka: Kafka, fast_dir: Path, options: dict[str, Any], share: float
) -> None:
    logs = max(1, round(LOGS * share))
    run_cases(
        kafka, fast_dir, rolled_round, logs=logs, again=run_again, case_of=RolledCase,
        enough=lambda seen: seen["rolled"] >= logs, **options,
    )  # fmt: skip
