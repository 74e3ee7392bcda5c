"""What shards of keys do, with dicts: which records survive, and what proofs of parts say together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

DROPPED, KEPT, EXPIRED, PRESENT = "dropped", "kept", "expired", "present"


def survivors(puts: Iterable[tuple[bytes, int]], probes: Iterable[tuple[bytes, int]]) -> set[int]:
    """Ordinals of those records (hash, ordinal) that survive: no newer one of their key was put."""
    newest: dict[bytes, int] = {}
    for key, ordinal in puts:
        newest[key] = max(newest.get(key, -1), ordinal)
    return set(newest.values()) | {ordinal for key, ordinal in probes if newest.get(key, -1) <= ordinal}


@dataclass
class Key:
    """The newest record of a key, what became of it, and whether an older one is kept."""

    offset: int
    fate: str
    older_kept: bool = False


def noted(records: Iterable[tuple[bytes, int, str]]) -> dict[bytes, Key]:
    """Of all records (hash, offset, fate) together; one that is PRESENT may come again, settled."""
    fates: dict[bytes, dict[int, str]] = {}
    for key, offset, fate in records:
        of_key = fates.setdefault(key, {})
        if of_key.get(offset, PRESENT) == PRESENT:
            of_key[offset] = fate
    return {
        key: Key(max(of_key), of_key[max(of_key)], any(f == KEPT for o, f in of_key.items() if o < max(of_key)))
        for key, of_key in fates.items()
    }
