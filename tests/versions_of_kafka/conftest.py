"""The fixture `version`: each test runs with one version of Kafka, drawn by the seed, and is skipped if Java or Maven
is missing.

`kafka` and `fast_dir` are those of tests/interop.
"""

from __future__ import annotations

import os

import pytest

from tests.interop.conftest import fast_dir, kafka  # noqa: F401
from tests.interop.kafka import KafkaUnavailable, broker_class_path
from tests.versions_of_kafka import VERSIONS


@pytest.fixture(params=[pytest.param(v, marks=pytest.mark.one_of()) for v in VERSIONS], scope="module")
def version(request: pytest.FixtureRequest) -> str:
    """Return a version of Kafka whose jars are available."""
    try:
        broker_class_path(request.param)
    except KafkaUnavailable as reason:
        if os.environ.get("KEYTAIL_NO_SKIP") == "1":
            pytest.fail(f"KEYTAIL_NO_SKIP=1, but there is no Kafka {request.param}: {reason}")
        pytest.skip(f"no Kafka {request.param}: {reason}")
    return str(request.param)
