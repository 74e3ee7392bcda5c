"""One real Spark session of two cores for all Spark tests, and one cluster for those of what only a cluster does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from keytail.spark import delta
from keytail.spark.session import local_session
from tests.spark.cluster import Cluster, cluster


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    session = local_session("local[2]", "keytail tests", delta.session_settings(None))
    yield session
    session.stop()


@pytest.fixture(scope="session")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made
