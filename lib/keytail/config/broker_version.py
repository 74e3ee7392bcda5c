"""Parses a Kafka version, and states how its cleaner and its expiration of producers differ from those of 4.3.1. Pure
functions."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FIRST = (0, 11)
_FIRST_WITH_HORIZONS = (3, 1)
_FIRST_WITH_PRODUCER_EXPIRATION = (3, 4)


@dataclass(frozen=True)
class BrokerVersion:
    """A version such as 2.8.2. `patch` has no effect and is only printed."""

    major: int
    minor: int
    patch: str = ""

    @property
    def cleans_by_file_time(self) -> bool:
        """Whether the cleaner of this version removes tombstones and markers by the modification time of their file,
        and writes no delete horizons (CLEANING.md 16)."""
        return (self.major, self.minor) < _FIRST_WITH_HORIZONS

    @property
    def expires_producers_with_transactional_ids(self) -> bool:
        """Whether producers expire by `transactional.id.expiration.ms`, because this version has no setting for them.
        """
        return (self.major, self.minor) < _FIRST_WITH_PRODUCER_EXPIRATION

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}{self.patch}"


def parse_broker_version(text: str) -> BrokerVersion:
    """Parse a version. Raises ValueError unless it has the form 2.8, 2.8.2 or 0.11.0.3 and is at least 0.11."""
    match = re.fullmatch(r"(\d{1,3})\.(\d{1,3})((?:\.\d{1,3}){0,2})", text.strip(), re.ASCII)
    if match is None or (int(match[1]), int(match[2])) < _FIRST:
        raise ValueError(f"invalid Kafka version {text!r}: use a version from 0.11 on, such as 2.8 or 2.8.2")
    return BrokerVersion(int(match[1]), int(match[2]), match[3])
