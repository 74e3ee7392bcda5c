"""The metadata log of a log dir: its snapshot and segments, records that may be uncommitted, and unreadable records."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keytail.errors import CorruptLog, KeytailError, Refused
from keytail.log.cluster.metadata import ClusterMetadata, find_metadata_dir, read_metadata, read_topic_id
from keytail.log.fs import LOCAL, FileSystem
from tests import golden
from tests.chance import draws
from tests.reference import metadata as model
from tests.reference.metadata import MetadataLog

POLICY = "cleanup.policy"
NEW = (model.topic("t", 1), model.topic_config("t", POLICY, "compact"), model.partition(1, 0))


def read(path: Path | str, broker: int = 1, fs: FileSystem = LOCAL) -> ClusterMetadata:
    return read_metadata(fs, str(path), broker, {POLICY, "log.retention.ms"})


def policies(path: Path | str, topic: str = "t") -> tuple[str | None, ...]:
    return read(path).topic_configs[topic].get(POLICY, ())


def policy(value: str | None) -> bytes:
    return model.topic_config("t", POLICY, value)


@pytest.fixture
def log(tmp_path: Path) -> MetadataLog:
    return MetadataLog(tmp_path / "__cluster_metadata-0")


@pytest.fixture(scope="module")
def golden_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return golden.unpack(tmp_path_factory.mktemp("golden"))


def test_the_golden_log_has_the_topics_of_its_broker(golden_dir: Path) -> None:
    described = golden.manifest()["topics"]
    kept = {key for topic in golden.TOPICS.values() for key in topic.configs}
    found = read_metadata(LOCAL, str(golden_dir / "__cluster_metadata-0"), 1, kept)
    assert found.topics.keys() == described.keys()
    for name, topic in golden.TOPICS.items():
        newest = {key: values[-1] for key, values in found.topic_configs[name].items()}
        assert newest == topic.configs, name
        assert found.topics[name].topic_id == described[name]["id"]
        assert found.topics[name].replicas == dict.fromkeys(range(topic.partitions), (1,))
    assert 0 < golden.manifest()["generated_ms"] - found.as_of_ms < 60_000
    assert found.as_of_offset == 224
    # This is the only config that was changed after its topic was created.
    assert found.topic_configs["__consumer_offsets"]["internal.segment.bytes"] == (None, "8192")
    assert all(
        len(values) == 1
        for name, configs in found.topic_configs.items()
        for key, values in configs.items()
        if (name, key) != ("__consumer_offsets", "internal.segment.bytes")
    )


def test_golden_partitions_have_the_ids_of_their_topics(golden_dir: Path) -> None:
    for topic, number in golden.partitions():
        found = read_topic_id(LOCAL, str(golden_dir / f"{topic}-{number}"))
        assert found == golden.manifest()["topics"][topic]["id"]


def test_an_invalid_topic_id_is_refused_and_a_missing_one_accepted(tmp_path: Path) -> None:
    assert read_topic_id(LOCAL, str(tmp_path)) is None
    (tmp_path / "partition.metadata").write_text("nonsense")
    with pytest.raises(CorruptLog, match=r"cannot be read.*partition\.metadata"):
        read_topic_id(LOCAL, str(tmp_path))


def test_the_metadata_log_is_found(tmp_path: Path) -> None:
    dirs = [tmp_path / name for name in "abc"]
    for path in dirs:
        path.mkdir()
    paths = [str(path) for path in dirs]
    assert find_metadata_dir(LOCAL, paths) is None
    (dirs[1] / "__cluster_metadata-0").mkdir()
    assert find_metadata_dir(LOCAL, [*paths, paths[1]]) == f"{paths[1]}/__cluster_metadata-0"
    (dirs[2] / "__cluster_metadata-0").mkdir()
    with pytest.raises(Refused, match="several log dirs contain a metadata log"):
        find_metadata_dir(LOCAL, paths)


# The log


def test_records_of_several_segments_are_read_and_control_batches_ignored(log: MetadataLog) -> None:
    log.control().append(*NEW).roll().control().append(policy("delete")).roll()
    assert policies(log.path) == ("compact", "delete")
    assert (read(log.path).as_of_offset, read(log.path).as_of_ms) == (5, model.T0 + 5)


def test_a_log_without_records_has_no_topics(log: MetadataLog) -> None:
    found = read(log.path)
    assert (found.topics, found.as_of_offset, found.as_of_ms) == ({}, -1, -1)


def test_configs_of_all_brokers_and_of_this_one_are_read(log: MetadataLog) -> None:
    log.append(
        model.config(4, "", "log.retention.ms", "1"),
        model.config(4, "1", "log.retention.ms", "2"),
        model.config(4, "2", "log.retention.ms", "3"),
    )
    assert read(log.path, 1).cluster_configs == {"log.retention.ms": (None, "1")}
    assert read(log.path, 1).broker_configs == {"log.retention.ms": (None, "2")}
    assert read(log.path, 2).broker_configs == {"log.retention.ms": (None, "3")}
    assert read(log.path, 3).broker_configs == {}


@pytest.mark.parametrize(
    ("more", "values"), [(998, ("compact", "delete")), (999, ("compact", "delete")), (1000, ("delete",))]
)
def test_the_last_thousand_records_may_be_uncommitted(log: MetadataLog, more: int, values: tuple[str, ...]) -> None:
    log.append(*NEW).append(policy("delete")).no_ops(more)
    assert policies(log.path) == values


def test_a_batch_that_is_partly_older_may_be_uncommitted_as_a_whole(log: MetadataLog) -> None:
    log.append(*NEW).append(policy("delete"), model.NO_OP, model.NO_OP).no_ops(998)
    assert policies(log.path) == ("compact", "delete")
    log.no_ops(1)
    assert policies(log.path) == ("compact", "delete")
    log.no_ops(1)
    assert policies(log.path) == ("delete",)


def test_the_age_of_a_transaction_is_that_of_its_end(log: MetadataLog) -> None:
    log.append(*NEW).append(model.BEGIN, policy("delete")).no_ops(1100).append(model.END)
    assert policies(log.path) == ("compact", "delete")
    log.no_ops(1000)
    assert policies(log.path) == ("delete",)


def test_an_unfinished_transaction_is_ignored(log: MetadataLog) -> None:
    log.append(*NEW).append(model.BEGIN, policy("delete")).no_ops(2000)
    assert policies(log.path) == ("compact",)
    assert read(log.path).as_of_offset == 2004


# Snapshots


def test_the_newest_snapshot_and_the_log_after_it_are_read(log: MetadataLog) -> None:
    log.no_ops(10).roll().append(policy("delete"))
    log.snapshot(4, model.topic("old", 9))
    log.snapshot(10, *NEW)
    found = read(log.path)
    assert found.topics.keys() == {"t"}
    assert policies(log.path) == ("compact", "delete")
    assert found.as_of_offset == 10
    (log.path / f"{0:020d}.log").unlink()  # a broker deletes the segment after writing a snapshot
    assert read(log.path) == found


def test_the_snapshot_with_the_later_epoch_is_read_if_two_have_one_offset(log: MetadataLog) -> None:
    log.no_ops(10)
    log.snapshot(10, model.topic("old", 9), epoch=1)
    log.snapshot(10, *NEW, epoch=2)
    assert read(log.path).topics.keys() == {"t"}


def test_records_below_the_snapshot_are_not_applied_twice_and_are_committed(log: MetadataLog) -> None:
    log.append(*NEW).append(policy("delete"))
    log.snapshot(4, model.topic("t", 1), policy("delete"), model.partition(1, 0))
    assert policies(log.path) == ("delete",)
    log.append(policy("compact"))
    assert policies(log.path) == ("delete", "compact")


def test_unfinished_and_deleted_snapshots_are_ignored(log: MetadataLog) -> None:
    log.append(*NEW)
    path = log.snapshot(3, model.topic("other", 9))
    path.rename(f"{path}.deleted")
    path = log.snapshot(3, model.topic("other", 9))
    path.rename(path.parent / f"{path.name}-123.part")
    assert read(log.path).topics.keys() == {"t"}


@pytest.mark.parametrize("end", [50, 120])
def test_a_log_that_ends_at_or_below_the_snapshot_is_read_from_the_snapshot(log: MetadataLog, end: int) -> None:
    log.no_ops(end)
    log.snapshot(120, *NEW)
    found = read(log.path)
    assert (policies(log.path), found.as_of_offset, found.as_of_ms) == (("compact",), 119, model.T0 + 119)


def test_a_snapshot_with_an_empty_segment_at_its_end_is_read(log: MetadataLog, tmp_path: Path) -> None:
    fetched = MetadataLog(tmp_path / "fetched", base_offset=120)
    fetched.snapshot(120, *NEW)
    assert policies(fetched.path) == ("compact",)


# Unreadable logs


def _damage(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def _last_batch(log: MetadataLog) -> int:
    return len(log.log_path.read_bytes()) - 80


CASES: dict[str, tuple[Callable[[MetadataLog], object], str]] = {
    "truncated inside its last batch": (
        lambda log: log.log_path.write_bytes(log.log_path.read_bytes()[:-3]),
        r"a batch of \d+ bytes does not fit into the last \d+ bytes of the file.*byte position",
    ),
    "zeros at its end": (
        lambda log: log.log_path.write_bytes(log.log_path.read_bytes() + bytes(500)),
        "batch length is below the minimum",
    ),
    "a flipped bit": (
        lambda log: log.log_path.write_bytes(_damage(log.log_path.read_bytes(), _last_batch(log))),
        "invalid CRC.*byte position",
    ),
    "no segment": (lambda log: log.log_path.unlink(), "the metadata log has no segments"),
    "no directory": (lambda log: shutil.rmtree(log.path), "No such file or directory"),
    "segments without a snapshot": (
        lambda log: log.log_path.rename(log.path / f"{5:020d}.log"),
        "begins at offset 5, and no snapshot covers earlier offsets",
    ),
    "a missing segment": (
        lambda log: (log.path / f"{9:020d}.log").touch(),
        "no records from offset 4 up to the segment at offset 9",
    ),
    "a missing batch": (
        lambda log: (setattr(log, "end_offset", 9), log.append(policy("delete"))),
        "the log has no record of offset 4",
    ),
    "a record of a newer version with invalid fields": (
        lambda log: log.append(model.frame(4, 1, b"\x02" + model.text("") + model.text("k") + model.text("v"))),
        "a record of type 4 has unsupported version 1.*offset 4",
    ),
    "a record without a value": (lambda log: log.append(None), "the record has no value"),
    "a topic that is created twice": (lambda log: log.append(model.topic("t", 2)), "topic t is created twice"),
    "a snapshot without its footer": (
        lambda log: log.snapshot(4, *NEW, footer=False),
        "snapshot is incomplete: its footer is missing",
    ),
    "an empty snapshot": (
        lambda log: log.snapshot(4).write_bytes(b""),
        "snapshot is incomplete",
    ),
    "a snapshot without its header": (
        lambda log: log.snapshot(4, *NEW).write_bytes(log.log_path.read_bytes()),
        "the snapshot does not begin with its header",
    ),
    "a snapshot that ends inside a batch": (
        lambda log: log.snapshot(2, model.topic("t", 1)),
        "ends at offset 2, inside this batch",
    ),
    "a truncated snapshot": (
        lambda log: (path := log.snapshot(4, *NEW)).write_bytes(path.read_bytes()[:-7]),
        "does not fit",
    ),
    "a snapshot with bytes after its footer": (
        lambda log: (path := log.snapshot(4)).write_bytes(path.read_bytes() * 2),
        "batch begins at or below|continues after its footer",
    ),
    "a snapshot with an open transaction": (
        lambda log: log.snapshot(4, model.BEGIN),
        "the snapshot ends inside a transaction",
    ),
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_unreadable_records_are_refused_with_their_position(log: MetadataLog, case: str) -> None:
    change, reason = CASES[case]
    log.append(*NEW).no_ops(1)
    assert policies(log.path) == ("compact",)
    change(log)
    with pytest.raises(Refused, match=rf"the metadata log cannot be read: .*{reason}") as refused:
        read(log.path)
    assert refused.value.path is not None
    assert refused.value.path.startswith(str(log.path))
    assert refused.value.remedy


def test_a_log_truncated_at_any_byte_is_refused_or_has_an_older_state(log: MetadataLog) -> None:
    log.append(*NEW)
    whole = len(log.log_path.read_bytes())
    log.append(policy("delete"))
    data = log.log_path.read_bytes()
    for end in range(len(data)):
        log.log_path.write_bytes(data[:end])
        if end in (0, whole):
            assert read(log.path).as_of_offset == (2 if end else -1)
        else:
            with pytest.raises(Refused):
                read(log.path)


@settings(deadline=None, max_examples=draws(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_log_with_changed_bytes_is_read_or_refused(log: MetadataLog, data: st.DataObject) -> None:
    if not log.end_offset:
        log.append(*NEW).control().no_ops(3).roll().append(model.BEGIN, policy("delete"), model.END)
        log.snapshot(3, *NEW)
    path = data.draw(st.sampled_from(sorted(log.path.iterdir())))
    before = path.read_bytes()
    changed = bytearray(before)
    for _ in range(data.draw(st.integers(1, 3))):
        if changed:
            changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del changed[data.draw(st.integers(0, len(changed))) :]
    path.write_bytes(bytes(changed))
    try:
        read(log.path)
    except KeytailError as error:
        assert isinstance(error, Refused), error
    finally:
        path.write_bytes(before)


# Reading beside a live broker


class Growing(FileSystem):
    """A file system on which a broker appends a batch while the log is read for the first time."""

    def __init__(self, log: MetadataLog, torn: bytes, rest: bytes) -> None:
        super().__init__()
        self._log, self._torn, self._rest = log, torn, rest
        with log.log_path.open("ab") as file:
            file.write(torn)

    def close(self, fd: int) -> None:
        super().close(fd)
        if self._rest:
            with self._log.log_path.open("ab") as file:
                file.write(self._rest)
            self._rest = b""


def test_a_log_that_a_broker_is_appending_to_is_read_again(log: MetadataLog, tmp_path: Path) -> None:
    log.append(*NEW)
    before = log.log_path.read_bytes()
    log.append(policy("delete"))
    batch = log.log_path.read_bytes()[len(before) :]
    log.log_path.write_bytes(before)
    assert read(log.path, fs=Growing(log, batch[:20], batch[20:])).as_of_offset == 3
    log.log_path.write_bytes(before)
    with pytest.raises(Refused, match="cannot be read"):
        read(log.path, fs=Growing(log, batch[:20], b""))
