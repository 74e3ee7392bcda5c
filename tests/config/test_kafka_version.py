"""The versions of Kafka that may have written a log dir, determined from each sign and from all signs."""

from __future__ import annotations

import pytest

from keytail.config.kafka_version import Inferred, Signs, infer


def text(inferred: Inferred) -> str:
    return "; ".join(f"{item.seen}: {item.means}" for item in inferred.evidence)


def test_without_signs_the_version_is_unknown() -> None:
    assert infer(Signs()).evidence == ()
    assert infer(Signs()).sentence == "unknown"


# Levels and names as in MetadataVersion of Kafka 4.3.1.
@pytest.mark.parametrize(
    ("level", "version"),
    [(7, "3.3"), (8, "3.4"), (11, "3.5"), (14, "3.6"), (19, "3.7"), (20, "3.8"), (21, "3.9"), (25, "4.0"), (27, "4.1"),
     (29, "4.2"), (30, "4.3"), (31, "4.4"), (99, "4.4")],
)  # fmt: skip
def test_the_level_of_metadata_version_gives_the_lowest_version(level: int, version: str) -> None:
    found = infer(Signs(features={"metadata.version": level, "kraft.version": 1}))
    assert found.sentence == f"{version} or later"
    assert (level >= 31) == ("newer than the versions that this keytail was tested with" in text(found))


def test_other_features_and_levels_below_all_versions_are_no_evidence() -> None:
    assert infer(Signs(features={"kraft.version": 1})).evidence == ()
    assert infer(Signs(features={"metadata.version": 0})).evidence == ()


def test_zookeeper_means_a_version_before_4_0_and_requires_topic_settings() -> None:
    found = infer(Signs(meta_versions=frozenset({0}), clean_shutdown_has_json=True))
    assert found.sentence == "3.7 or later, before 4.0"
    assert "give --topic-configs" in text(found)


def test_contradicting_signs_give_several_versions() -> None:
    found = infer(Signs(features={"metadata.version": 26}, clean_shutdown_has_json=False))
    assert found.sentence == "several versions: 4.1 or later, and one before 3.7"


def test_a_migration_to_kraft_keeps_version_0() -> None:
    """Observed with Kafka 4.3.1. A log dir that was added later has version 1."""
    found = infer(Signs(features={"metadata.version": 26}, has_metadata_log=True, meta_versions=frozenset({0, 1})))
    assert found.sentence == "4.1 or later"
    assert "before a migration to KRaft" in text(found)
    found = infer(Signs(has_metadata_log=True, meta_versions=frozenset({0})))
    assert found.sentence == "3.4 or later"
    assert "give the broker's properties file with --config" in text(found)


def test_formats_snapshots_and_topic_ids_are_evidence() -> None:
    found = infer(Signs(partitions=3, magics={0: "a-0", 1: "b-1", 2: "c-2"}, snapshots=frozenset({1})))
    assert "messages of format v0 (a-0) and v1 (b-1)" in text(found)
    assert "no partition.metadata in 3 partitions" in text(found)
    assert found.sentence == "unknown"
    assert "messages of format" not in text(infer(Signs(magics={2: "c-2"})))
    assert "update keytail" in text(infer(Signs(snapshots=frozenset({1, 2}))))
    assert infer(Signs(partitions=3, with_topic_id=1)).sentence == "2.8 or later"
