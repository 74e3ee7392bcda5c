"""Decides whether a preparation may be committed, and discards it if not, unless the partition is refused.

PREPARED.md in this directory explains why each condition for a commit suffices.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

from keytail.compact.plan import Decision, Selection
from keytail.compact.planning import NOW_TOLERANCE_MS, Planned
from keytail.compact.prepared.record import (
    Basis,
    Output,
    Record,
    Source,
    decode_record,
    see_outputs,
    see_sources,
)
from keytail.compact.prepared.scratch import is_prepared, is_record
from keytail.compact.removal_limit import removal_limit
from keytail.compact.rules import Rules
from keytail.compact.task import NO_REMOVAL_LIMIT
from keytail.config.compaction import CompactionConfig
from keytail.durations import duration_text
from keytail.errors import EXPLAINED, NO_ERROR, ErrorText, in_words, joined, refusal
from keytail.format import names
from keytail.log.checkpoint import read_epochs
from keytail.log.fs import FileSystem

# Maximum age of a preparation (one day) if delete.retention.ms is 0: then tombstones need not be retained.
_MAX_AGE_WITHOUT_RETENTION_MS = 86_400_000


def max_age_ms(delete_retention_ms: int) -> int:
    """Return the maximum age in ms at which a preparation is committed.

    The maximum age is half of delete.retention.ms, or a day if delete.retention.ms is 0.
    New delete horizons are delete.retention.ms after the preparation. So a consumer that reads a value just before the
    commit has at least half of delete.retention.ms left to read the tombstone of this key.
    """
    return delete_retention_ms // 2 if delete_retention_ms > 0 else _MAX_AGE_WITHOUT_RETENTION_MS


@dataclass(frozen=True)
class Now:
    """The present state of a partition. `sources` and `outputs` are those sources and outputs of the record that still
    exist."""

    now_ms: int
    basis: Basis
    selection: Selection | None
    sources: tuple[Source, ...]
    outputs: tuple[Output, ...]


def basis_of(fs: FileSystem, planned: Planned, rules: Rules) -> Basis:
    """Return the facts on which decisions about a planned partition depend. Raises KeytailError if a replica that
    --replica names cannot be read."""
    facts = planned.facts
    assert planned.config is not None
    limit = planned.removal_limit
    if limit is None and rules.replicas:
        limit = removal_limit(fs, rules.replicas, facts)
    return Basis(
        cleaner_checkpoint=facts.cleaner_checkpoint,
        log_start_offset=facts.log_start_offset,
        log_end_offset=facts.log_end_offset,
        leader_epochs=tuple(read_epochs(fs, os.path.join(facts.path, names.LEADER_EPOCHS))),
        config=planned.config,
        message_format=planned.message_format,
        by_file_time=rules.by_file_time,
        drop_keyless=rules.drop_keyless,
        removal_limit_offset=NO_REMOVAL_LIMIT if limit is None or limit.offset is None else limit.offset,
    )


def reason_against_commit(fs: FileSystem, record: Record, planned: Planned, rules: Rules) -> ErrorText:
    """Return why the preparation cannot be committed in the partition's present state (`planned`); NO_ERROR if it can.

    Reads names, sizes and times of files, checkpoints, the header of each source's first batch, and the replicas that
    --replica names.
    """
    facts = planned.facts
    if planned.decision.status == "refused" or not planned.is_compacted_topic:
        return planned.decision.error
    wanted = {source.base_offset for source in record.sources}
    segments = [segment for segment in facts.segments if segment.base_offset in wanted]
    try:
        now = Now(
            rules.now_ms,
            basis_of(fs, planned, rules),
            planned.decision.selection,
            see_sources(fs, facts.path, segments),
            see_outputs(fs, facts.path, record.files),
        )
    except EXPLAINED as problem:
        return in_words(problem)
    return reason_to_discard(record, now)


def commit_or_discard(fs: FileSystem, planned: Planned, record: Record, reason: ErrorText) -> Planned:
    """Return the plan that commits `record`. If there is a `reason`, discard the preparation instead, and return the
    plan with this reason. The preparation of a refused partition is kept, but not committed: perhaps only a flag is
    missing.
    """
    if planned.decision.status == "refused":
        text = joined([planned.decision.error, "the preparation is kept"])
        return replace(planned, decision=replace(planned.decision, error=text))
    if reason:
        try:
            discard(fs, planned.facts.path)
        except OSError as problem:
            text = "the preparation cannot be discarded: " + in_words(problem)
            return replace(planned, decision=Decision("refused", text, None))
        return replace(planned, discarded=reason)
    return replace(
        planned, prepared=record, decision=Decision("would-compact", NO_ERROR, planned.decision.selection)
    )


def without_compaction(fs: FileSystem, planned: Planned) -> Planned:
    """Return the plan. If the topic is known not to be compacted any more, discard its preparation first, and return
    the plan with this reason."""
    if not planned.settings_known or not any(is_prepared(name) for name in planned.facts.leftovers):
        return planned
    try:
        discard(fs, planned.facts.path)
    except OSError:  # the next run discards the preparation
        return planned
    return replace(planned, discarded=ErrorText("the topic is not compacted any more"))


def reason_to_discard(record: Record, now: Now) -> ErrorText:
    """Return the reason why a prepared compaction must not be committed; NO_ERROR if it may be committed."""
    for reason in (_of_sources, _of_basis, _of_end, _of_outputs, _of_age):
        if text := reason(record, now):
            return text
    return NO_ERROR


def _of_sources(record: Record, now: Now) -> ErrorText:
    seen = {source.base_offset: source for source in now.sources}
    for source in record.sources:
        found = seen.get(source.base_offset)
        if found is None:
            return refusal(
                f"the segment at offset {source.base_offset} does not exist any more", slug="prepared-sources-changed"
            )
        if found != source:
            return refusal(
                f"the segment at offset {source.base_offset} was replaced or changed after the preparation",
                slug="prepared-sources-changed",
            )
    return NO_ERROR


def _of_basis(record: Record, now: Now) -> ErrorText:
    then, basis = record.basis, now.basis
    if basis.cleaner_checkpoint != then.cleaner_checkpoint:
        text = (
            f"the cleaner's checkpoint is {basis.cleaner_checkpoint}; when prepared, it was "
            f"{then.cleaner_checkpoint}"
        )
    elif basis.log_start_offset != then.log_start_offset:
        text = f"the log start offset is {basis.log_start_offset}; when prepared, it was {then.log_start_offset}"
    elif basis.log_end_offset < then.log_end_offset:
        text = f"the log was truncated from offset {then.log_end_offset} to {basis.log_end_offset}"
    elif (differs := _of_epochs(then, basis)) is not None:
        text = differs
    elif changed := _changed_settings(then.config, basis.config):
        text = f"settings were changed after the preparation: {', '.join(changed)}"
    elif (basis.message_format, basis.by_file_time) != (then.message_format, then.by_file_time):
        text = "the partition was prepared with another --message-format or --broker-version"
    elif then.drop_keyless and not basis.drop_keyless:  # without the flag then, no record was keyless
        text = "the partition was prepared with --drop-keyless, which is not given now"
    elif basis.removal_limit_offset < then.removal_limit_offset:
        text = (
            f"tombstones and markers must be retained from offset {basis.removal_limit_offset} on (--replica), but the "
            "partition was prepared with a higher limit, or without a limit"
        )
    else:
        return NO_ERROR
    return refusal(text, slug="prepared-basis-changed")


def _of_epochs(then: Basis, basis: Basis) -> str | None:
    """Return a sentence about the leader epochs if they show that the log was truncated and then appended to, or None.

    Epochs that begin at or above the log end of the preparation do not matter: a broker removes an epoch without
    records when it stops or starts, or when another leader is elected.
    """
    end = then.log_end_offset
    known = {epoch: start for epoch, start in then.leader_epochs if start < end}
    found = dict(basis.leader_epochs)
    for epoch, start in found.items():
        if epoch not in known and start < end:
            return f"the log was truncated: it ended at offset {end}, and leader epoch {epoch} begins at {start}"
        if epoch in known and known[epoch] != start:
            return f"leader epoch {epoch} begins at offset {start}; when prepared, it began at {known[epoch]}"
    gone = [epoch for epoch in known if epoch not in found]
    return f"leader epoch {gone[0]} does not exist any more" if gone else None


def _changed_settings(then: CompactionConfig, now: CompactionConfig) -> list[str]:
    # A shorter or newly known expiration of producers is no reason: more of their last batches were retained than
    # necessary.
    if then.producer_id_expiration_ms > now.producer_id_expiration_ms:
        now = replace(now, producer_id_expiration_ms=then.producer_id_expiration_ms)
    return [
        field.name.replace("_", ".")
        for field in fields(CompactionConfig)
        if getattr(then, field.name) != getattr(now, field.name)
    ]


def _of_end(record: Record, now: Now) -> ErrorText:
    """Return the reason why a round can no longer end at the prepared end offset, such as a lower high watermark or an
    open transaction; NO_ERROR if a round can still end there.
    """
    end = record.result.end_offset
    if now.selection is None or end > now.selection.first_uncleanable_offset:
        limit = "nothing can be cleaned" if now.selection is None else (
            f"cleaning is limited to offset {now.selection.first_uncleanable_offset} ({now.selection.limit})"
        )  # fmt: skip
        return refusal(
            f"the partition was prepared up to offset {end}, but now {limit}", slug="prepared-end-not-reached"
        )
    return NO_ERROR


def _of_outputs(record: Record, now: Now) -> ErrorText:
    seen = {output.name: output for output in now.outputs}
    for output in record.outputs:
        if seen.get(output.name) != output:
            return refusal(
                f"the prepared file {output.name} {'was changed' if output.name in seen else 'does not exist'}",
                slug="prepared-output-changed",
            )
    return NO_ERROR


def _of_age(record: Record, now: Now) -> ErrorText:
    age_ms, limit_ms = now.now_ms - record.prepared_ms, max_age_ms(record.basis.config.delete_retention_ms)
    if age_ms < -NOW_TOLERANCE_MS:
        return refusal(
            f"the preparation is dated {duration_text(-age_ms)} in the future: the clock was wrong, or another --now "
            "was given, so records may have been removed too early",
            slug="prepared-in-the-future",
        )
    if age_ms > limit_ms:
        return refusal(
            f"the partition was prepared {duration_text(age_ms)} ago; the limit is {duration_text(limit_ms)}, half of "
            "delete.retention.ms (a day if that is 0)",
            slug="prepared-too-long-ago",
        )
    return NO_ERROR


def read_record(fs: FileSystem, path: str, leftovers: Iterable[str]) -> tuple[Record | None, ErrorText]:
    """Return the record of a preparation in the partition directory `path` (of several, the last by name), or None and
    the reason if it is not usable. `leftovers` are the names of scratch files; if none is a record, the result is None
    and NO_ERROR.
    """
    found = sorted(name for name in leftovers if is_record(name))
    if not found:
        return None, NO_ERROR
    where = os.path.join(path, found[-1])
    try:
        record = decode_record(fs.read_bytes(where, whole=True), where)
    except EXPLAINED as problem:
        return None, in_words(problem)
    if names.partition_dir(record.topic, record.partition) != os.path.basename(path):
        return None, refusal("the record belongs to another partition", slug="invalid-prepared-record")
    return record, NO_ERROR


def discard(fs: FileSystem, path: str, keep: Sequence[str] | frozenset[str] = ()) -> int:
    """Remove all prepared files in a partition directory, except those named in `keep`; records are removed first.
    Return the total bytes of the removed outputs.
    """
    found = [entry for entry in fs.scan(path) if is_prepared(entry.name) and entry.name not in keep]
    for entry in sorted(found, key=lambda entry: (not is_record(entry.name), entry.name)):
        fs.unlink(os.path.join(path, entry.name))
    if found:
        fs.fsync_dir(path)
    return sum(entry.size_bytes for entry in found if not is_record(entry.name))
