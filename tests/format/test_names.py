"""File and directory names, composed and parsed (NAMES.md)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keytail.format import names
from keytail.format.names import FileName, PartitionDir, parse_file_name, parse_partition_dir

offsets = st.integers(0, names.MAX_OFFSET)
suffixes = st.sampled_from(names.CONTENT_SUFFIXES)
parts = st.from_regex(r"[0-9A-Za-z_-]{1,12}", fullmatch=True)
topics = st.from_regex(r"[A-Za-z0-9._-]{1,40}", fullmatch=True).filter(lambda topic: topic not in (".", ".."))


stages = st.sampled_from([("", "live"), (".cleaned", "cleaned"), (".swap", "swap"), (".deleted", "deleted")])


@given(offsets, suffixes, stages)
@settings(deadline=None)
def test_segment_files_round_trip(offset: int, suffix: str, stage: tuple[str, str]) -> None:
    name = names.segment_file(offset, suffix + stage[0])
    assert parse_file_name(name) == FileName(name, stage[1], offset, suffix)  # type: ignore[arg-type]
    assert len(name.partition(".")[0]) == 20


@given(offsets, suffixes, parts, parts)
@settings(deadline=None)
def test_scratch_files_round_trip(offset: int, suffix: str, run_id: str, attempt: str) -> None:
    name = names.scratch_file(offset, run_id, attempt, suffix)
    assert parse_file_name(name) == FileName(name, "scratch", offset, suffix, run_id, attempt)


def test_the_names_of_keytail_are_as_documented() -> None:
    assert names.scratch_file(84, "3f2a91c0", "7", names.LOG) == "00000000000000000084.log.r3f2a91c0.a7.clean"
    assert names.guard_file(84) == "00000000000000000084.log.cleaned"
    assert names.segment_file(84, names.TIME_INDEX + names.SWAP) == "00000000000000000084.timeindex.swap"


@pytest.mark.parametrize("bad", [("a.b", "1"), ("1", ""), ("1/2", "1"), ("1", "a b")])
def test_scratch_names_with_parts_that_would_not_parse_are_refused(bad: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="run and attempt"):
        names.scratch_file(0, *bad, names.LOG)


@pytest.mark.parametrize("offset", [-1, 2**63])
def test_an_invalid_offset_is_refused(offset: int) -> None:
    with pytest.raises(ValueError, match="invalid offset"):
        names.segment_file(offset, names.LOG)


@pytest.mark.parametrize(
    "name",
    [
        "foo.log", "foo.swap", "foo.cleaned", "foo.index", "foo.timeindex", "foo.txnindex", "foo.snapshot",
        "7.log", "7.log.swap", "+0000000000000000007.log", "-0000000000000000007.log", ".log",
        "99999999999999999999.log", "00000000000000000084.copy.log", "00000000000000000084.swap",
        "٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠٨٤.log", "00000000000000000084.log\n.log",
    ],
)  # fmt: skip
def test_names_that_stop_a_broker_are_fatal(name: str) -> None:
    assert parse_file_name(name).kind == "fatal"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("foo.deleted", "deleted"),
        ("00000000000000000000-0000000001.checkpoint.deleted", "other"),
        ("leader-epoch-checkpoint", "partition"),
        ("partition.metadata", "partition"),
        ("leader-epoch-checkpoint.tmp", "other"),
        ("notes.txt", "other"),
        ("00000000000000000084.log.clean", "other"),
        ("00000000000000000084.log.r1.a1.clean.bak", "other"),
        ("00000000000000000084.log\n", "other"),
        ("99999999999999999999.log.r1.a1.clean", "other"),
        ("", "other"),
    ],
)
def test_other_names_have_their_kind(name: str, kind: str) -> None:
    assert parse_file_name(name) == FileName(name, kind)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["leader-epoch-checkpoint", "00000000000000000007-0000000001.checkpoint"])
def test_scratch_names_of_files_without_an_offset_are_parsed(name: str) -> None:
    scratch = names.scratch_of(name, "3f2a91c0", "s1")
    assert scratch == f"{name}.r3f2a91c0.as1.clean"
    assert parse_file_name(scratch) == FileName(scratch, "scratch", None, "", "3f2a91c0", "s1")


@given(st.text(max_size=60))
@settings(deadline=None)
def test_every_name_has_a_kind(name: str) -> None:
    assert parse_file_name(name).name == name
    parse_partition_dir(name)


@given(topics, st.integers(0, 2**31 - 1))
@settings(deadline=None)
def test_partition_dirs_round_trip(topic: str, partition: int) -> None:
    name = names.partition_dir(topic, partition)
    assert parse_partition_dir(name) == PartitionDir(topic, partition, "normal")


@given(topics, st.integers(0, 2**31 - 1), st.sampled_from(["delete", "future", "stray"]))
@settings(deadline=None)
def test_partition_dirs_with_a_suffix_are_parsed(topic: str, partition: int, kind: str) -> None:
    name = f"{topic}-{partition}.0a1b2c3d4e5f60718293a4b5c6d7e8f9-{kind}"
    assert parse_partition_dir(name) == PartitionDir(topic, partition, kind)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("orders-12", PartitionDir("orders", 12, "normal")),
        ("a-delete-0", PartitionDir("a-delete", 0, "normal")),
        ("a.b-0", PartitionDir("a.b", 0, "normal")),
        ("-a-0", PartitionDir("-a", 0, "normal")),
        ("__cluster_metadata-0", PartitionDir("__cluster_metadata", 0, "normal")),
    ],
)
def test_partition_dirs_are_parsed(name: str, expected: PartitionDir) -> None:
    assert parse_partition_dir(name) == expected


@pytest.mark.parametrize(
    "name",
    [
        "orders", "-0", "orders-", "orders-+1", "orders-007", "orders-x", "orders-2147483648", "lost+found",
        "a-delete", "orders-1-future", "orders-1.x y-delete", "a b-0", "..-0", ".-0", "orders-1\n",
        "a" * 250 + "-0", "orders-٣", "remote-log-index-cache", "",
    ],
)  # fmt: skip
def test_other_directories_are_not_partitions(name: str) -> None:
    assert parse_partition_dir(name) is None
