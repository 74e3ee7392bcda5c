"""Decides which partitions may be repacked, and up to which offset. Changes no file. Of the logs, only batch headers at
the start of segments and at the log end are read, and the batches after the latest producer snapshot, for the states of
transactions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from keytail.cli.cluster import Cluster
from keytail.cli.configuration import Configuration
from keytail.compact.expectation import Expected
from keytail.compact.plan import Decision, refusals, select
from keytail.compact.planning import Planned, refuse_incomplete, refused
from keytail.compact.repack.options import RepackFlags
from keytail.compact.rules import Rules
from keytail.config.compaction import CompactionConfig
from keytail.config.producer_expiration import uncertain
from keytail.errors import EXPLAINED, NO_ERROR, ErrorText, joined, refusal
from keytail.log.fs import FileSystem
from keytail.log.partition import LogDirFacts, PartitionEntry, PartitionFacts, SegmentFacts, survey_partition
from keytail.log.producers import Unstable, first_unstable

_MAX_MESSAGE_BYTES, _UNCLEAN = "max.message.bytes", "unclean.leader.election.enable"
_NEEDED = (_MAX_MESSAGE_BYTES, "remote.storage.enable")
# Rough estimates, as in run/rates.py: bytes per second and core that a repack reads, merges, writes and proves, and
# seconds that each partition takes in addition.
_BYTES_PER_S = 60e6
_PARTITION_S = 0.1
_MARGIN_BYTES = 1 << 20


def plan_repack(
    fs: FileSystem,
    log_dir: LogDirFacts,
    entry: PartitionEntry,
    configuration: Configuration,
    rules: Rules,
    flags: RepackFlags,
) -> Planned:
    """Survey a partition and return its plan. After an error of the partition or its settings, the plan is a refusal.
    """
    facts = None
    try:
        config = configuration.for_compaction(entry.topic)[1]
        facts = survey_partition(fs, log_dir, entry)
        if configuration.cluster is not None:
            configuration.cluster.refuse_stray(fs, entry)
        unknown = [why_settings_unknown(configuration, entry.topic, *_NEEDED)]
        if flags.forget_producers:
            unknown.append(why_expiration_unknown(configuration, entry.topic))
        if flags.batch_bytes and replicas_of(configuration.cluster, entry.topic, entry.partition) != 1:
            unknown.append(why_not_mergeable(configuration, entry.topic))
            if facts.high_watermark is None:
                unknown.append(_NO_HIGH_WATERMARK)
            if not flags.replicas_in_sync:
                unknown.append(why_not_in_sync(configuration.cluster, entry.topic, entry.partition))
        unstable = None
        if not facts.problems:
            unstable = first_unstable(fs, facts, now_ms=rules.now_ms)
        decision = decide(facts, config, unknown, rules, unstable)
        if decision.status == "would-compact":
            refuse_incomplete(fs, facts, rules)
    except EXPLAINED as problem:
        return refused(facts or survey_partition(fs, log_dir, entry), problem)
    return Planned(facts, config, decision)


_NO_HIGH_WATERMARK = refusal(
    "the high watermark is unknown, and --high-watermark log-end does not show which records other replicas have: a "
    "follower whose log ends inside a merged batch fails",
    slug="replicas-unknown",
    remedy="Start the broker and stop it cleanly; or give --batch-bytes 0, which disables merging",
)


def why_settings_unknown(configuration: Configuration, topic: str, *names: str) -> ErrorText:
    """Return why one of the settings `names` is unknown, with a remedy; NO_ERROR if all are known. A setting that could
    take its value from the broker's file is unknown if the file was not read."""
    if unknown := configuration.unknown(topic, names):
        return unknown
    cluster = configuration.cluster
    unread = cluster.mode if cluster is not None and cluster.metadata is None else None
    of_brokers = [name for name in names if name in (_MAX_MESSAGE_BYTES, _UNCLEAN)]
    # A dynamic max.message.bytes does not matter: a broker reads and replicates larger batches, too.
    found = uncertain(configuration.of(topic), of_brokers, (_UNCLEAN,), unread)
    if found is None:
        return NO_ERROR
    return refusal(
        f"topic config unknown: {found.name} of {topic} {found.why}",
        slug="unknown-topic-settings",
        remedy=f"{found.remedy} --topic-config {topic}:{found.name}=VALUE",
    )


def why_expiration_unknown(configuration: Configuration, topic: str) -> ErrorText:
    """Return why it is unknown which producers have expired, with a remedy; NO_ERROR if it is known."""
    found = configuration.producer_expiration(topic).uncertain
    if found is None:
        return NO_ERROR
    return refusal(
        f"it is unknown which producers have expired: {found.name} {found.why}",
        slug="unknown-topic-settings",
        remedy=f"{found.remedy} --topic-config {found.name}=VALUE; or run without --forget-producers",
    )


def why_not_mergeable(configuration: Configuration, topic: str) -> ErrorText:
    """Return why batches of a replicated topic must not be merged, with a remedy; NO_ERROR if they may be merged.

    A broker that truncates its log to an offset inside a batch removes the whole batch, but keeps this offset as its
    log end: the batch's records before this offset are lost on the replica, without any message. A broker truncates
    below the high watermark only after an unclean leader election.
    """
    if unknown := why_settings_unknown(configuration, topic, _UNCLEAN):
        return unknown
    if not configuration.of(topic).value(_UNCLEAN):
        return NO_ERROR
    return refusal(
        f"unclean.leader.election.enable is true for {topic}: after an unclean election, this broker could truncate "
        "its log inside a merged batch, and would lose the first records of that batch without any message",
        slug="unclean-leader-election",
        remedy="Set unclean.leader.election.enable to false, or give --batch-bytes 0, which disables merging",
    )


def replicas_of(cluster: Cluster | None, topic: str, partition: int) -> int | None:
    """Return the largest possible number of replicas of a partition according to the metadata log; None if it is
    unknown."""
    if cluster is None or cluster.metadata is None or topic in cluster.metadata.uncertain_topics:
        return None
    found = cluster.metadata.topics.get(topic)
    return len(found.possible_replicas[partition]) if found is not None and partition in found.replicas else None


def why_not_in_sync(cluster: Cluster | None, topic: str, partition: int) -> ErrorText:
    """Return why followers may lack records below the high watermark, with a remedy; NO_ERROR if the metadata log shows
    that no follower lacks any.

    An in-sync replica has all records below the high watermark of its leader, and still has them after it has fallen
    out of sync. The broker of these log dirs is stopped, so it need not be in sync.
    """
    remedy = (
        "Let all followers catch up, and stop the broker ten minutes later; or assert with --replicas-in-sync that all "
        "followers have every record below the high watermark; or give --batch-bytes 0, which disables merging"
    )
    if cluster is None or cluster.metadata is None or replicas_of(cluster, topic, partition) is None:
        why = cluster.why_unknown(topic) if cluster is not None else "no metadata log was read"
        return refusal(f"it is unknown whether followers are in sync: {why}", slug="replicas-unknown", remedy=remedy)
    found = cluster.metadata.topics[topic]
    in_sync = found.in_sync.get(partition, ())
    others = set(found.possible_replicas[partition]) - {cluster.broker}
    behind = sorted(others.difference(in_sync))
    if not behind:
        return NO_ERROR
    named = ", ".join(map(str, behind))
    return refusal(
        f"the replicas on these brokers are not certainly in sync: {named} ({cluster.origin}); a follower whose log "
        "ends inside a merged batch of its leader fails",
        slug="replicas-not-in-sync",
        remedy=remedy,
    )


def decide(
    facts: PartitionFacts,
    config: CompactionConfig,
    unknown: Sequence[ErrorText],
    rules: Rules,
    unstable: Unstable | None,
) -> Decision:
    """Return the decision about a partition of any cleanup.policy. The section to repack ends where the section of a
    forced compaction would end without a minimum compaction lag.
    """
    reasons = refusals(
        facts, config, joined(unknown), rules.now_ms, high_watermark=rules.high_watermark,
        unsafe_clock=rules.unsafe_clock,
    )  # fmt: skip
    if reasons:
        return Decision("refused", joined(reasons), None)
    any_policy = replace(config, cleanup_policy=frozenset({"compact"}), min_compaction_lag_ms=0)
    selection = select(
        facts, any_policy, rules.now_ms, force=True, from_log_start=True, high_watermark=rules.high_watermark,
        unstable=unstable,
    )  # fmt: skip
    if any(segment.log_bytes for segment in to_repack(facts, selection.first_uncleanable_offset)):
        return Decision("would-compact", NO_ERROR, selection)
    blocker = ErrorText(f"there is nothing to repack: {selection.why}" if selection.why else selection.blocker)
    return Decision("clean" if selection.limit == "active segment" else "skipped", blocker, selection, selection.remedy)


def to_repack(facts: PartitionFacts, end_offset: int) -> list[SegmentFacts]:
    """Return the segments below `end_offset`, the end of the section to repack."""
    return [segment for segment in facts.segments if segment.base_offset < end_offset]


def expected(planned: Planned) -> Expected | None:
    """Return the estimated cost of repacking a partition; None if it is not to be repacked."""
    selection = planned.decision.selection
    if selection is None or not planned.wanted:
        return None
    log_bytes = sum(segment.log_bytes for segment in to_repack(planned.facts, selection.first_uncleanable_offset))
    return Expected("one task", _PARTITION_S + log_bytes / _BYTES_PER_S, log_bytes + _MARGIN_BYTES)
