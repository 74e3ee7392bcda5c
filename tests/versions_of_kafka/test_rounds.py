"""Rounds beside the cleaner classes of older versions, on the random logs of tests/interop.

KEYTAIL_FUZZ_LOGS changes how many logs a version gets, KEYTAIL_SEED repeats a run, KEYTAIL_FUZZ_LOG plays one log.
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
from tests.interop.conftest import fast_dir, kafka  # noqa: F401
from tests.interop.fuzz import run_cases
from tests.interop.kafka import Kafka
from tests.interop.rounds import Circumstances, Outcome
from tests.interop.test_differential import keytail_round
from tests.versions_of_kafka import VERSIONS
from tests.versions_of_kafka.cleaner import EMPTIED, CaseOfVersion, OldCleaner, Rule

pytestmark = [pytest.mark.interop]

LOGS = int(os.environ.get("KEYTAIL_FUZZ_LOGS", "24"))
OLDER = [version for version in VERSIONS if version < "4"]
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
    one = OldCleaner(version)
    yield one
    one.close()


def run_rounds(
    kafka: Kafka,  # noqa: F811
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
    return run_cases(
        kafka, directory, ours, logs=max(1, round(LOGS * share)), case_of=case_of, configs=configs,
        **{"transactional": True, **traffic},
    )  # fmt: skip


@pytest.mark.parametrize("version", OLDER, indirect=True)
@pytest.mark.parametrize(
    ("traffic", "share"),
    [({}, 0.5), ({"transactional": False}, 0.2), ({"legacy": True}, 0.3)],
    ids=["transactional", "plain", "legacy"],
)
def test_rounds_leave_what_the_cleaner_of_the_version_leaves(
    version: str, cleaner: OldCleaner, kafka: Kafka, fast_dir: Path, traffic: dict[str, Any], share: float  # noqa: F811
) -> None:
    """Each round from Kafka's result of the one before. From 3.1 on horizons are compared too."""
    by_file_time = parse_broker_version(version).cleans_by_file_time
    rule: Rule = "equal" if by_file_time else "may keep the last"
    seen = run_rounds(kafka, cleaner, fast_dir, share, by_file_time=by_file_time, rule=rule, **traffic)
    assert by_file_time or not seen["horizons dropped by a rewrite"]
    if seen["logs"] >= 100 and not traffic:
        wanted = (*NEVER_MISSED, *(("horizons kept", "horizons dropped by a rewrite") if by_file_time else (EMPTIED,)))
        missing = [name for name in wanted if not seen[name]]
        assert not missing, f"the random logs never came to: {missing}"


@pytest.mark.parametrize("version", [v for v in OLDER if parse_broker_version(v).cleans_by_file_time], indirect=True)
@pytest.mark.parametrize("retention_ms", [0, 2**40])
def test_without_the_version_tombstones_and_markers_stay_longer_and_nothing_else_differs(
    version: str, cleaner: OldCleaner, kafka: Kafka, fast_dir: Path, retention_ms: int  # noqa: F811
) -> None:
    """No log has a horizon before keytail writes one. With a long retention neither removes any tombstone or marker."""
    seen = run_rounds(
        kafka, cleaner, fast_dir, 0.3, by_file_time=False, rule="keeps longer", replicated=False,
        configs={"delete.retention.ms": retention_ms},
    )  # fmt: skip
    longer = seen["tombstones that only keytail keeps"], seen["markers that only keytail keeps"]
    print(f"{version}, delete.retention.ms {retention_ms}: (tombstones, markers) that only keytail keeps: {longer}")
    if retention_ms:
        assert longer == (0, 0)
    elif seen["logs"] >= 20:
        assert all(longer)
