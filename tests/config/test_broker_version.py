"""The accepted values of --broker-version, and the versions whose cleaner uses file times."""

from __future__ import annotations

import pytest

from keytail.config.broker_version import parse_broker_version


@pytest.mark.parametrize(
    ("text", "by_file_time"),
    [
        ("0.11", True), ("0.11.0.3", True), ("1.0", True), ("2.8.2", True), ("3.0.2", True), ("3.1.0", False),
        ("3.10", False), ("4.3.1", False), ("10.0", False),
    ],
)  # fmt: skip
def test_versions_below_3_1_clean_by_file_time(text: str, by_file_time: bool) -> None:
    version = parse_broker_version(text)
    assert version.cleans_by_file_time == by_file_time
    assert str(version) == text


@pytest.mark.parametrize(
    "text", ["", "2", "0.10.2", "0.9", "2.8.", "2.8.x", "v2.8", "-2.8", "2.8-IV0", "2.8.1.1.1", "٢.٨"]
)
def test_invalid_versions_are_refused_with_the_accepted_ones(text: str) -> None:
    with pytest.raises(ValueError, match=r"invalid Kafka version .*: use a version from 0\.11 on, such as 2\.8"):
        parse_broker_version(text)
