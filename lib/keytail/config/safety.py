"""Of several values one of which holds, the one by which the least is removed.

The last records of a metadata log may not be committed, so a setting that they changed has more than one value
that may hold. Pure; which values these are is found in `log/metadata.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from keytail.config.keys import Value, version_numbers

# What survives longer, or is compacted later, the larger the value is.
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
# The same, but a negative number means without limit.
RETENTION = frozenset({"retention.ms", "retention.bytes"})


def safest(name: str, values: Sequence[Value]) -> Value:
    """The safest of `values`, the newest of which is last; the newest, of a setting that decides no removal."""
    newest = values[-1]
    if name == "cleanup.policy":
        # Only what each of them does to old data is certain to be wanted.
        allowed = set.intersection(*({*policy} for policy in values if isinstance(policy, tuple)))
        return tuple(item for item in newest if item in allowed) if isinstance(newest, tuple) else newest
    if name == "remote.storage.enable":  # tiered topics are left alone
        return any(values)
    if name == "message.format.version":  # what an older client reads, a newer one reads too
        return min((value for value in values if isinstance(value, str)), key=version_numbers, default=None)
    numbers = [value for value in values if isinstance(value, int | float)]
    if name in RETENTION:
        return min(numbers) if min(numbers) < 0 else max(numbers)
    return max(numbers) if name in LARGER_IS_SAFER else newest
