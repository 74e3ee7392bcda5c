"""The offset map's dull twin: a dictionary with Kafka's capacity rule."""

from __future__ import annotations


class DictMap:
    """From (low, high) to the last ordinal; stops in front of any item once `max_entries` keys are in."""

    def __init__(self, max_entries: int) -> None:
        self.max_entries = max_entries
        self.entries: dict[tuple[int, int], int] = {}

    def put_all(self, items: list[tuple[int, int, int]]) -> int:
        """Items are (low, high, ordinal); an ordinal below 0 is passed over. How many were done."""
        for done, (low, high, ordinal) in enumerate(items):
            if ordinal < 0:
                continue
            if len(self.entries) >= self.max_entries:
                return done
            self.entries[low, high] = ordinal
        return len(items)

    def get(self, low: int, high: int) -> int:
        return self.entries.get((low, high), -1)
