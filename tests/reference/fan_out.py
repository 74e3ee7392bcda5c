"""The reference model of shards of keys, with dictionaries: the surviving records, and the result of partial proofs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

DROPPED, KEPT, EXPIRED, PRESENT = "dropped", "kept", "expired", "present"


def survivors(puts: Iterable[tuple[bytes, int]], probes: Iterable[tuple[bytes, int]]) -> set[int]:
    """Return the ordinals of the records (hash, ordinal) that survive because no later record of their key was put."""
    newest: dict[bytes, int] = {}
    for key, ordinal in puts:
        newest[key] = max(newest.get(key, -1), ordinal)
    return set(newest.values()) | {ordinal for key, ordinal in probes if newest.get(key, -1) <= ordinal}


@dataclass
class Key:
    """The latest record of a key, what happened to it, and whether an older record is retained."""

    offset: int
    fate: str
    older_kept: bool = False


def states_of_keys(records: Iterable[tuple[bytes, int, str]]) -> dict[bytes, Key]:
    """Return a `Key` for each key of the records (hash, offset, fate). PRESENT records may recur with a final fate."""
    fates: dict[bytes, dict[int, str]] = {}
    for key, offset, fate in records:
        of_key = fates.setdefault(key, {})
        if of_key.get(offset, PRESENT) == PRESENT:
            of_key[offset] = fate
    return {
        key: Key(max(of_key), of_key[max(of_key)], any(f == KEPT for o, f in of_key.items() if o < max(of_key)))
        for key, of_key in fates.items()
    }
