"""One real Spark session of two cores for all Spark tests, and one cluster for those of what only a cluster does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.spark.cluster import Cluster, cluster
from tests.spark.shared import shared_session


@pytest.fixture(scope="module")
def spark() -> Any:
    return shared_session()


@pytest.fixture(scope="session")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made
