"""Decides whether the retention settings of a topic are known well enough to remove segments. Pure functions."""

from __future__ import annotations

from keytail.cli.configuration import SETTINGS_COMMAND, Configuration
from keytail.config.internal import INTERNAL_TOPICS
from keytail.config.resolve import CLEANUP_POLICY, Resolved
from keytail.errors import NO_ERROR, ErrorText, refusal
from keytail.expire.partition import settings_of_retention

# The settings whose default values in Kafka remove data; the default value of retention.bytes does not.
_REMOVE_BY_DEFAULT = (CLEANUP_POLICY, "retention.ms")


def unknown_retention(configuration: Configuration, resolved: Resolved) -> ErrorText:
    """Return the reason why the retention settings of the topic are not certain, with the remedy; empty if they are
    certain."""
    policy = None if resolved.unknown([CLEANUP_POLICY]) else resolved.value(CLEANUP_POLICY)
    wanted = settings_of_retention(policy)  # type: ignore[arg-type]  # a list
    return (
        _internal(configuration, resolved, wanted)
        or configuration.unknown(resolved.topic, wanted)
        or _assumed(resolved, wanted)
    )


def _internal(configuration: Configuration, resolved: Resolved, wanted: tuple[str, ...]) -> ErrorText:
    """Return the reason why the settings of an internal topic are not certain; empty if they are certain, or for
    another topic. Settings of internal topics are taken from the metadata log, not from flags."""
    given = [name for name in wanted if name in resolved.given]
    if resolved.topic not in INTERNAL_TOPICS or (resolved.in_metadata and not given):
        return NO_ERROR
    why = f"the given {', '.join(given)} cannot replace that log"
    if not resolved.in_metadata:
        why = configuration.why_unknown(resolved.topic)
    text = (
        f"{resolved.topic} is an internal topic of Kafka, whose retention is taken from the metadata log only (" + why +
        "); leave the topic to the broker: --topic '(?!__).*' selects all topics except Kafka's internal ones"
    )
    return refusal(text, slug="internal-topic")


def _assumed(resolved: Resolved, wanted: tuple[str, ...]) -> ErrorText:
    """Return the reason if settings that the topic does not override are unknown; empty if they are known. Kafka's
    defaults are no evidence for the broker's values; nor is the broker's file evidence for the policy, which may be
    changed while the broker runs.
    """
    assumed = [*resolved.assumed(name for name in wanted if name in _REMOVE_BY_DEFAULT)]
    if not resolved.in_metadata and CLEANUP_POLICY not in {*resolved.given, *assumed}:
        assumed.insert(0, CLEANUP_POLICY)
    if not assumed:
        return NO_ERROR
    text = (
        f"topic config unknown: {', '.join(assumed)} of {resolved.topic} is set by the broker's own configuration, "
        "which was not read"
    )
    remedy = (
        f"Give --topic-configs FILE with the output of `{SETTINGS_COMMAND}`, or each setting as --topic-config "
        f"{resolved.topic}:key=value; for settings other than cleanup.policy, --config FILE with the broker's "
        "server.properties is enough"
    )
    return refusal(text, slug="unknown-topic-settings", remedy=remedy)
