"""The reference model of the offset map: a dictionary with Kafka's rule of capacity."""

from __future__ import annotations


class DictMap:
    """Maps (low, high) to the last ordinal, and refuses every further item once it has `max_entries` keys."""

    def __init__(self, max_entries: int) -> None:
        self.max_entries = max_entries
        self.entries: dict[tuple[int, int], int] = {}

    def put_all(self, items: list[tuple[int, int, int]]) -> int:
        """Put items (low, high, ordinal), skipping ordinals below 0. Return the number of processed items."""
        for done, (low, high, ordinal) in enumerate(items):
            if ordinal < 0:
                continue
            if len(self.entries) >= self.max_entries:
                return done
            self.entries[low, high] = ordinal
        return len(items)

    def get(self, low: int, high: int) -> int:
        return self.entries.get((low, high), -1)
