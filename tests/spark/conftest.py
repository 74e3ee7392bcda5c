"""One real Spark session of two cores for all Spark tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from keytail.spark.session import local_session


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    session = local_session("local[2]", "keytail tests")
    yield session
    session.stop()
