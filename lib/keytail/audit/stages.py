"""Runs the stages of one audit: scan the segments, compare and explain shards of keys, combine the findings.

The stages run in one task (`Alone`) or as Spark jobs (`audit/driver.py`). AUDIT.md defines what counts as a difference,
and what explains a missing record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from keytail.audit.compare import epoch_spans
from keytail.audit.scan import AuditTask, FromAllShards, Gap, pieces_of, scan
from keytail.audit.shard import Examples, ShardFindings, compare, of_lost
from keytail.log.fs import FileSystem
from keytail.run.shuffle import Cell


class Stages(Protocol):
    """Runs a stage: shuffles the cells to shards, and processes the cells of each shard in their order."""

    def shuffle(
        self,
        name: str,
        emit: Callable[[FileSystem, Any, str], Iterator[Any]],
        payloads: Sequence[Any],
        shards: int,
        take: Callable[[FileSystem, Any, int, Iterable[tuple[int, Any]], str], Any],
        context: Any,
    ) -> list[Any]:
        """Return the result of `take(fs, context, shard, cells, attempt)` for each shard, in order of the shards."""


@dataclass
class Alone:
    """Runs the stages of a partition that is small enough for one task: the cells are kept in memory."""

    fs: FileSystem

    def shuffle(
        self, name: str, emit: Any, payloads: Sequence[Any], shards: int, take: Any, context: Any
    ) -> list[Any]:
        cells: list[list[Cell]] = [[] for _ in range(shards)]
        for payload in payloads:
            for cell in emit(self.fs, payload, "alone"):
                cells[cell.shard].append(cell)
        for of_shard in cells:
            of_shard.sort(key=lambda cell: cell.order)
        return [
            take(self.fs, context, shard, ((cell.order, cell.data) for cell in cells[shard]), "alone")
            for shard in range(shards)
        ]


@dataclass
class Audit:
    """The findings about one partition. `records`: the number of records of each replica; `common`: the number of
    records that two or more replicas have; `shown`: the offset up to which the log of each replica shows that it was
    cleaned."""

    first_offset: int
    end_offset: int
    common: int = 0
    records: list[int] = field(default_factory=list)
    divergences: Counter[str] = field(default_factory=Counter)
    explained: Counter[str] = field(default_factory=Counter)
    early: Counter[str] = field(default_factory=Counter)
    examples: list[dict[str, Any]] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    shown: list[int] = field(default_factory=list)


def audit(task: AuditTask, first_offset: int, stages: Stages) -> Audit:
    """Compare the replicas of `task`. Raises OSError or Refused if files cannot be read or have changed; damage is
    reported in the result."""
    spans = epoch_spans(task.replicas, first_offset, task.end_offset)
    task = replace(task, spans=tuple((start, end) for _, start, end in spans))
    findings = _run(task, stages)
    if any(finding.needs_all_shards for finding in findings):
        markers = np.concatenate([finding.markers for finding in findings])
        order = np.lexsort((markers[:, 1], markers[:, 0]))
        removable = np.min([finding.first_removable for finding in findings], axis=0)
        from_all = FromAllShards(np.ascontiguousarray(markers[order]), tuple(removable.tolist()))
        again = _run(replace(task, from_all=from_all), stages)
        findings = [
            replace(second, transactions=first.transactions, transaction_examples=first.transaction_examples)
            for first, second in zip(findings, again, strict=True)
        ]
    return _together(task, first_offset, findings, spans)


def _run(task: AuditTask, stages: Stages) -> list[ShardFindings]:
    name = f"audit {task.topic}-{task.partition}"
    found: list[ShardFindings] = stages.shuffle(name, scan, pieces_of(task), task.shards, compare, task)
    return found


def _together(
    task: AuditTask, first_offset: int, findings: Sequence[ShardFindings], spans: Sequence[tuple[int, int, int]]
) -> Audit:
    result = Audit(first_offset, task.end_offset)
    result.gaps = list(findings[0].gaps)
    result.records = list(findings[0].records)
    result.shown = list(findings[0].shown)
    examples = Examples(task)
    for finding in findings:
        result.common += finding.common
        result.divergences.update(finding.divergences)
        result.explained.update(finding.explained)
        result.divergences.update(finding.transactions)
        result.early.update(finding.early)
        examples.add(finding.examples)
        examples.add(finding.transaction_examples)
    result.early["marker"] = result.divergences.pop("marker-early", 0)
    _add_lost(task, findings, result, examples)
    for number, (epoch, start, end) in enumerate(spans):
        if any(finding.in_span[number] for finding in findings):
            result.divergences["epoch-start"] += 1
            begins = {r.name: dict(r.epochs).get(epoch) for r in task.replicas}
            examples.note("epoch-start", start, {"leader_epoch": epoch, "end_offset": end, "starts": begins})
    result.divergences += Counter()  # removes the kinds with count 0
    result.explained += Counter()
    result.early += Counter()
    result.examples = examples.found()
    return result


def _add_lost(task: AuditTask, findings: Sequence[ShardFindings], result: Audit, examples: Examples) -> None:
    """Add examples of lost records. At an offset where replicas have different records, that difference is reported
    instead."""
    elsewhere: set[int] = set()
    for finding in findings:
        elsewhere.update(found["offset"] for found in finding.elsewhere)
        examples.add(finding.elsewhere)
    for finding in findings:
        for record in finding.lost:
            if record[0] in elsewhere:
                result.divergences["lost"] -= 1
            else:
                examples.note("lost", record[0], of_lost(task, record))
