"""Computes a report's verdict, its reasons, and its sums by topic and by phase."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from keytail.cli.rows import alike, human_bytes
from keytail.report.facts import Kind, Partition, Report

Level = Literal["good", "left", "bad"]
_ORDER = {"corrupt": 0, "damaged": 0, "failed": 1, "differs": 1, "error": 1, "interrupted": 2, "refused": 2,
          "would-rebuild": 3, "suspect": 3, "warning": 3}  # fmt: skip


@dataclass(frozen=True)
class Reason:
    """A group of messages about the partitions `names`. `differ` is True if the messages differ in names or numbers.
    `count` is the number of messages, `example` the first message, and `where` the place of the first message."""

    status: str
    kind: Kind
    example: str
    where: str
    broker: str
    remedy: str
    names: tuple[str, ...]
    count: int
    differ: bool


@dataclass(frozen=True)
class TopicSums:
    topic: str
    partitions: int = 0
    not_done: int = 0
    bytes_before: int = 0
    bytes_after: int | None = None
    dirty_bytes: int | None = None
    records_before: int | None = None
    records_after: int | None = None

    @property
    def reclaimed_bytes(self) -> int | None:
        return None if self.bytes_after is None else self.bytes_before - self.bytes_after


def count(number: int, what: str) -> str:
    """Return a number with a noun, for example `1 partition` or `3 partitions`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def verdict(report: Report) -> tuple[Level, str]:
    """Return the level of the run's result, and one or more sentences about the result."""
    found = report.partitions
    bad = sum(item.kind == "bad" for item in found)
    message = (
        _SUMMARIES.get(report.command, _about_change)(report) if found else "There is no result for any partition."
    )
    if bad and report.command not in ("verify", "audit"):
        message += f" {count(bad, 'partition')} {'is' if bad == 1 else 'are'} not done."
    if report.ended_early:
        message = f"The run did not complete: {report.ended_early.rstrip('.')}. {message}"
    if bad or report.ended_early or (not found and report.exit_status):
        return "bad", message
    is_odd = any(item.status in ("suspect", "would-rebuild") for item in found)
    return ("left" if is_odd else "good"), message


def next_step(report: Report) -> str:
    """Return the next step of the run, a sentence about where the remedies are on the page, or, after an examination
    without findings, that no action is needed; "" in all other cases."""
    if report.next_step:
        return report.next_step
    if any(partition.kind == "bad" for partition in report.partitions):
        verify = "; `keytail verify` reports how a broker reacts to damaged files, and the remedies"
        more = "" if report.command == "verify" else verify
        return f"The remedy is given with each reason below{more}."
    examined = report.command in ("verify", "audit") and report.partitions and not report.ended_early
    return "No action is needed." if examined and verdict(report)[0] == "good" else ""


def _about_verify(report: Report) -> str:
    found = report.partitions
    statuses = Counter(item.status for item in found)
    everything, size = count(len(found), "partition"), human_bytes(_sum(found, "bytes_before"))
    wrong = len(found) - statuses["sound"]
    only_ends = any(item.row.get("only_ends") for item in found)
    where = " at the ends of segments (--only-ends)" if only_ends else ""
    if not wrong:
        return f"No problems were found in {everything}, {size}{where}."
    stopped = [item for item in found if not item.row.get("live")]
    losing = sum(any(finding.start_loses for finding in item.findings) for item in stopped)
    loses = f" A broker that starts now would lose or hide records of {count(losing, 'partition')}." if losing else ""
    has = "has" if wrong == 1 else "have"
    of_it = f"only the ends of segments of {size} were read" if only_ends else f"{size} were read"
    return f"{wrong:,} of {everything} {has} findings ({_statuses(statuses, 'sound')}); {of_it}.{loses}"


def _about_audit(report: Report) -> str:
    statuses = Counter(partition.status for partition in report.partitions)
    everything = count(len(report.partitions), "partition")
    if any("records_left" in replica for item in report.partitions for replica in item.row.get("replicas", ())):
        return f"No record with these keys is left in {statuses['absent']:,} of {everything}."
    if statuses["alike"] == len(report.partitions):
        return f"The replicas of {everything} are alike."
    return f"The replicas of {statuses['alike']:,} of {everything} are alike ({_statuses(statuses, 'alike')})."


def _about_rebuild(report: Report) -> str:
    statuses = Counter(partition.status for partition in report.partitions)
    everything = count(len(report.partitions), "partition")
    made = statuses["rebuilt"] if report.execute else statuses["would-rebuild"]
    if not made:
        return f"No index file of {everything} {'was rebuilt' if report.execute else 'is missing or wrong'}."
    return f"Index files of {made:,} of {everything} {'were rebuilt' if report.execute else 'are missing or wrong'}."


def _about_erase(report: Report) -> str:
    status = "erased" if report.execute else "would-erase"
    done = [partition for partition in report.partitions if partition.status == status]
    records = _sum(done, "records_before") - _sum(done, "records_after")
    text = f"{records:,} records in {len(done):,} of {count(len(report.partitions), 'partition')}."
    return f"Erased {text}" if report.execute else f"To erase: {text} Nothing was changed."


def _about_repack(report: Report) -> str:
    status = "repacked" if report.execute else "would-repack"
    done = [partition for partition in report.partitions if partition.status == status]
    before, after = (human_bytes(_sum(done, name)) for name in ("bytes_before", "bytes_after"))
    text = f"{len(done):,} of {count(len(report.partitions), 'partition')}"
    if report.execute:
        return f"Repacked {text}: {before} before, {after} now."
    return f"{text} would be repacked: up to {before} to read. Nothing was changed."


def _about_prepare(report: Report) -> str:
    done = [item for item in report.partitions if item.status == "prepared"]
    size = f" {human_bytes(_sum(done, 'reclaimed_bytes'))} will be reclaimed by compact --execute." if done else ""
    return f"{len(done):,} of {count(len(report.partitions), 'partition')} prepared.{size} No segment was changed."


def _about_change(report: Report) -> str:
    """Return the sentence about the result of `compact`, of a plan, or of any run without another summary."""
    found = report.partitions
    everything = count(len(found), "partition")
    due = [item for item in found if item.status == "would-compact"]
    if not report.execute and not due:
        return f"No compaction is due in {everything}. Nothing was changed."
    if not report.execute:
        dirty = sum(item.detail.dirty_bytes or 0 for item in due)
        of_it = f", of which {human_bytes(dirty)} are dirty" if dirty else ""
        size = human_bytes(_sum(due, "bytes_before"))
        return f"{len(due):,} of {everything} would be compacted: {size} to read{of_it}. Nothing was changed."
    changed = Counter(item.status for item in found if item.status in _CHANGED)
    if not changed and not any(item.reclaimed_bytes for item in found):
        return f"Nothing was changed in {everything}."
    reclaimed, before = _sum(found, "reclaimed_bytes"), _sum(found, "bytes_before")
    share = f" ({100 * reclaimed / before:.0f} %)" if before else ""
    [(status, number), *others] = changed.most_common() or [("completed", 0)]
    done = ", ".join([f"{number:,} of {everything} {status}", *(f"{n:,} {other}" for other, n in others)])
    return f"Reclaimed {human_bytes(reclaimed)} of {human_bytes(before)}{share}: {done}."


# The statuses of partitions that a command has changed. A report of several runs can have all of them.
_CHANGED = ("compacted", "repacked", "expired", "erased", "rebuilt")
_SUMMARIES: dict[str, Callable[[Report], str]] = {
    "verify": _about_verify,
    "audit": _about_audit,
    "rebuild-index": _about_rebuild,
    "erase": _about_erase,
    "compact --repack": _about_repack,
    "compact --prepare": _about_prepare,
}


def _statuses(statuses: Counter[str], without: str) -> str:
    return ", ".join(f"{number:,} {status}" for status, number in statuses.most_common() if status != without)


def _sum(found: Iterable[Partition], name: str) -> int:
    return sum(getattr(item, name) or 0 for item in found)


def reasons(found: Sequence[Partition]) -> list[Reason]:
    """Return all findings and all reasons of the partitions, grouped by status, message, reaction of a broker and
    remedy. The most serious come first."""
    groups: dict[tuple[str, str, str, str], list[tuple[Partition, str, str]]] = defaultdict(list)
    advice: dict[tuple[str, str, str, str], tuple[str, str]] = {}
    for item in found:
        for status, what, where, broker, remedy in _reasons_of(item):
            key = (status, _without_names(what, item), _without_names(broker, item), _without_names(remedy, item))
            groups[key].append((item, what, where))
            advice.setdefault(key, (broker, remedy))
    made = []
    for key, those in groups.items():
        names = tuple(dict.fromkeys(item.name for item, _, _ in those))
        broker, remedy = advice[key]
        _, what, where = those[0]
        kind: Kind = "bad" if key[0] == "error" else "left" if key[0] in ("warning", "note") else those[0][0].kind
        made.append(
            Reason(key[0], kind, what, where, broker, remedy, names, len(those), len({w for _, w, _ in those}) > 1)
        )
    return sorted(made, key=lambda reason: (_ORDER.get(reason.status, 9), -len(reason.names)))


def _reasons_of(partition: Partition) -> Iterable[tuple[str, str, str, str, str]]:
    for finding in partition.findings:
        yield finding.severity, finding.what, finding.where, finding.broker, finding.remedy
    wrong = any(finding.severity in ("error", "warning") for finding in partition.findings)
    if partition.why and not (
        wrong and partition.status in ("damaged", "suspect", "differs", "corrupt", "would-rebuild")
    ):
        yield partition.status, partition.why, "", "", partition.remedy
    if partition.held_by:
        yield "note", f"tombstones and markers are retained: {partition.held_by}", "", "", ""


def _without_names(text: str, partition: Partition) -> str:
    """Return the text with names and numbers replaced, so that it is equal for all partitions with the same message."""
    if partition.log_dir:
        text = text.replace(partition.log_dir, "DIR")
    return alike(text, partition.name if partition.topic else "")


def by_topic(found: Sequence[Partition]) -> list[TopicSums]:
    """Return the sums of each topic, in descending order of reclaimed bytes, then of dirty bytes, then of size."""
    groups: dict[str, list[Partition]] = defaultdict(list)
    for item in found:
        if item.topic:
            groups[item.topic].append(item)
    made = []
    for topic, those in groups.items():
        counted = [item for item in those if item.records_before is not None and item.records_after is not None]
        sizes_after = [item.bytes_after for item in those if item.bytes_after is not None]
        dirty = [item.detail.dirty_bytes for item in those if item.detail.dirty_bytes is not None]
        made.append(
            TopicSums(
                topic,
                len(those),
                sum(item.kind == "bad" for item in those),
                _sum(those, "bytes_before"),
                sum(sizes_after) if len(sizes_after) == len(those) else None,
                sum(dirty) if dirty else None,
                _sum(counted, "records_before") if counted else None,
                _sum(counted, "records_after") if counted else None,
            )
        )
    return sorted(made, key=lambda item: (-(item.reclaimed_bytes or 0), -(item.dirty_bytes or 0), -item.bytes_before,
                                         item.topic))  # fmt: skip


def dirty_ratio(partition: Partition) -> float | None:
    clean, dirty = partition.detail.clean_bytes, partition.detail.dirty_bytes
    if clean is None or dirty is None or clean + dirty == 0:
        return None
    return dirty / (clean + dirty)


def phases(found: Sequence[Partition]) -> list[tuple[str, float, int]]:
    """Return for each phase its name, the total seconds of all tasks, and the total log bytes of the partitions that
    have seconds for this phase."""
    seconds: dict[str, float] = {}
    size: Counter[str] = Counter()
    for item in found:
        for phase, took in item.detail.phases_s.items():
            seconds[phase] = seconds.get(phase, 0.0) + took
            size[phase] += item.bytes_before or 0
    return [(phase, took, size[phase]) for phase, took in seconds.items()]


def that_matter(found: Sequence[Partition], most: int) -> list[Partition]:
    """Return at most `most` partitions with known segments, in descending order of reclaimed bytes, dirty bytes and
    size."""
    drawn = [item for item in found if len(item.detail.parts) and sum(part.log_bytes for part in item.detail.parts)]
    return sorted(drawn, key=lambda item: (-(item.reclaimed_bytes or 0), -(item.detail.dirty_bytes or 0),
                                          -(item.bytes_before or 0)))[:most]  # fmt: skip
