"""Chooses, of several possible values of a setting, the one by which the fewest records are removed.

The last records of a metadata log may not be committed, so a setting that they changed has more than one possible
value. Pure; `log/cluster/metadata.py` finds these values.
"""

from __future__ import annotations

from collections.abc import Sequence

from keytail.config.keys import Value, version_numbers

# The larger the value, the longer data is retained or the later it is compacted.
LARGER_IS_SAFER = frozenset(
    {
        "delete.retention.ms",
        "min.compaction.lag.ms",
        "max.compaction.lag.ms",
        "min.cleanable.dirty.ratio",
        "producer.id.expiration.ms",
        "transactional.id.expiration.ms",
    }
)
# The same, but a negative number means "without limit".
RETENTION = frozenset({"retention.ms", "retention.bytes"})


def safest(name: str, values: Sequence[Value]) -> Value:
    """Return the safest of `values`, the latest of which is last; the latest if the setting does not affect removal."""
    newest = values[-1]
    if name == "cleanup.policy":
        # Only the policies that are in all of the values are certain to be intended.
        allowed = set.intersection(*({*policy} for policy in values if isinstance(policy, tuple)))
        return tuple(item for item in newest if item in allowed) if isinstance(newest, tuple) else newest
    if name == "remote.storage.enable":  # tiered topics are not processed
        return any(values)
    if name == "message.format.version":  # newer clients can read the formats of older ones
        return min((value for value in values if isinstance(value, str)), key=version_numbers, default=None)
    numbers = [value for value in values if isinstance(value, int | float)]
    if name in RETENTION:
        return min(numbers) if min(numbers) < 0 else max(numbers)
    return max(numbers) if name in LARGER_IS_SAFER else newest
