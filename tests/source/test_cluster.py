"""`kafka-log` on a standalone cluster: executors that are not children of the session find the source, and share its
slices.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.chance import SEED
from tests.growing_log import GrowingLog
from tests.run.cluster import Cluster
from tests.run.test_cluster import run_driver

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("cluster")]  # all tests share one cluster


@pytest.mark.one_of("two hosts")
def test_slices_are_shared_by_two_hosts(two_workers: Cluster, tmp_path: Path) -> None:
    rng, records = random.Random(SEED), 0
    for partition in range(2):
        log = GrowingLog(rng, tmp_path / "logs", partition=partition)
        log.grow(150)
        log.write()
        records += len(log._appended)
    found, tasks, distinct = run_driver(two_workers, "tests.source.on_cluster", str(tmp_path / "logs"))
    assert found == distinct == records
    assert tasks > 4
