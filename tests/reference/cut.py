"""The highest consistent cut by trying all cuts of a small cluster; written from CUT.md, "Constraints"."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

Key = tuple[str, int]
# Of a transaction: for each part its partition, first offset and marker offset.
Parts = Sequence[tuple[Key, int | None, int | None]]
# Of a commit: offset of its record, group, partition, committed offset.
Commit = tuple[int, str, Key, int]


def is_consistent(
    cuts: Mapping[Key, int],
    transactions: Sequence[Parts],
    commits: Mapping[Key, Sequence[Commit]],
    blocks: Mapping[Key, Sequence[tuple[int, int]]],
) -> bool:
    for key, cut in cuts.items():
        if any(start < cut < end for start, end in blocks.get(key, ())):
            return False
    for parts in transactions:
        known = [part for part in parts if part[0] in cuts]
        decided = all(marker is not None and marker < cuts[key] for key, _, marker in known)
        absent = all(first is None or first >= cuts[key] for key, first, _ in known)
        if not (decided or absent):
            return False
    for home, of_home in commits.items():
        if home in cuts:
            latest = {(group, key): offset for at, group, key, offset in sorted(of_home) if at < cuts[home]}
            if any(key in cuts and offset > cuts[key] for (_, key), offset in latest.items()):
                return False
    return True


def all_consistent(
    limits: Mapping[Key, int],
    transactions: Sequence[Parts],
    commits: Mapping[Key, Sequence[Commit]],
    blocks: Mapping[Key, Sequence[tuple[int, int]]],
) -> list[dict[Key, int]]:
    """Return every consistent cut at or below the limits."""
    keys = list(limits)
    every = itertools.product(*(range(limits[key] + 1) for key in keys))
    cuts = (dict(zip(keys, values, strict=True)) for values in every)
    return [cut for cut in cuts if is_consistent(cut, transactions, commits, blocks)]
