"""Dumps the small files of a partition and of a log dir: producer snapshots, checkpoints, partition.metadata."""

from __future__ import annotations

from keytail.dump.report import Report
from keytail.errors import CorruptLog
from keytail.format import names
from keytail.format.producers import parse_snapshot
from keytail.log.checkpoint import read_epochs, read_offsets
from keytail.log.fs import FileSystem

OFFSET_CHECKPOINTS = (
    names.CLEANER_CHECKPOINT,
    names.RECOVERY_POINT_CHECKPOINT,
    names.LOG_START_CHECKPOINT,
    names.HIGH_WATERMARK_CHECKPOINT,
)
_SEQUENCES = 1 << 31


def dump_snapshot(fs: FileSystem, path: str, report: Report) -> None:
    try:
        entries = parse_snapshot(fs.read_bytes(path))
    except ValueError as reason:
        report.problem(f"{reason}; a broker deletes such a snapshot when it starts, and tries an older snapshot", path)
        return
    for entry in entries:
        in_transaction = entry.current_txn_first_offset >= 0
        shown = f"OptionalLong[{entry.current_txn_first_offset}]" if in_transaction else "OptionalLong.empty"
        text = f"producerId: {entry.producer_id} producerEpoch: {entry.epoch}"
        text += f" coordinatorEpoch: {entry.coordinator_epoch} currentTxnFirstOffset: {shown}"
        text += f" lastTimestamp: {entry.timestamp_ms}"
        fields: dict[str, int | str | None] = {
            "producerId": entry.producer_id,
            "producerEpoch": entry.epoch,
            "coordinatorEpoch": entry.coordinator_epoch,
            "currentTxnFirstOffset": entry.current_txn_first_offset if in_transaction else None,
            "lastTimestamp": entry.timestamp_ms,
        }
        if entry.last_offset >= 0:
            batch: dict[str, int | str | None] = {
                "firstSequence": _first_sequence(entry.last_sequence, entry.offset_delta),
                "lastSequence": entry.last_sequence,
                "lastOffset": entry.last_offset,
                "offsetDelta": entry.offset_delta,
                "timestamp": entry.timestamp_ms,
            }
            text += "".join(f" {name}: {value}" for name, value in batch.items())
            fields |= batch
        report.line(text, type="producer", **fields)


def _first_sequence(last: int, delta: int) -> int:
    """Return last - delta, where 2^31 - 1 precedes 0."""
    return last - delta if last >= delta else _SEQUENCES - (delta - last)


def dump_epochs(fs: FileSystem, path: str, report: Report) -> None:
    try:
        entries = read_epochs(fs, path)
    except CorruptLog as problem:
        report.problem(problem.what, path)
        return
    for number, (epoch, start) in enumerate(entries):
        report.line(f"epoch: {epoch} startOffset: {start}", type="leaderEpoch", epoch=epoch, startOffset=start)
        if number and (epoch <= entries[number - 1][0] or start < entries[number - 1][1]):
            report.problem("leader epochs or their start offsets are not in ascending order", path, None, start)


def dump_offsets(fs: FileSystem, path: str, report: Report) -> None:
    try:
        entries = read_offsets(fs, path)
    except CorruptLog as problem:
        report.problem(problem.what, path)
        return
    for (topic, partition), offset in entries.items():
        text = f"topic: {topic} partition: {partition} offset: {offset}"
        report.line(text, type="checkpoint", topic=topic, partition=partition, offset=offset)


def dump_partition_metadata(fs: FileSystem, path: str, report: Report) -> None:
    """Dump partition.metadata, which has the two lines `version: 0` and `topic_id: <id>`."""
    fields = {}
    for line in fs.read_bytes(path).decode("utf-8", "replace").splitlines():
        name, colon, value = line.partition(":")
        fields[name] = value.strip() if colon else None
    version, topic_id = fields.get("version"), fields.get("topic_id")
    if version is None or not version.isdecimal() or len(version) > 10 or not topic_id:
        report.problem("the file has no valid lines for version and topic_id", path)
        return
    report.line(
        f"version: {version} topicId: {topic_id}", type="partitionMetadata", version=int(version), topicId=topic_id
    )
