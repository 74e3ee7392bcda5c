"""The counts of a rewrite."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counts:
    """What a rewrite read and removed. `large_batches`: the number of batches rebuilt to more than `max.message.bytes`.
    """

    records_read: int = 0
    tombstones_removed: int = 0
    markers_removed: int = 0
    keyless: int = 0
    first_keyless_offset: int = -1
    large_batches: int = 0

    def and_more(self, later: Counts) -> Counts:
        """Return the sum of these counts and `later`."""
        first_keyless = self.first_keyless_offset if self.keyless else later.first_keyless_offset
        return Counts(
            self.records_read + later.records_read,
            self.tombstones_removed + later.tombstones_removed,
            self.markers_removed + later.markers_removed,
            self.keyless + later.keyless,
            first_keyless,
            self.large_batches + later.large_batches,
        )
