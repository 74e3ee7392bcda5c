"""Tests with several versions of Kafka, and which versions these are; see README.md in this folder."""

from __future__ import annotations

import os

IN_CI = ("2.8.2", "3.6.2", "3.9.1", "4.3.1")
IN_SOAK = ("2.4.1", "3.0.2", "4.0.0", "4.1.1")
VERSIONS = IN_SOAK if os.environ.get("KEYTAIL_KAFKA_VERSIONS") == "soak" else IN_CI


def has_zookeeper(version: str) -> bool:
    """Return whether the tests run this version with ZooKeeper: KRaft is ready for production from 3.3 on."""
    major, minor = map(int, version.split(".")[:2])
    return (major, minor) < (3, 7)
