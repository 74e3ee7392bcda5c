"""Defines the settings of one topic that apply to its compaction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CompactionConfig:
    """The configuration for compacting one partition, by Kafka's names with dots replaced by underscores.

    `segment_bytes` is `internal.segment.bytes` if that is set. The defaults are Kafka's.
    """

    cleanup_policy: frozenset[str] = frozenset({"delete"})
    segment_bytes: int = 1_073_741_824
    segment_index_bytes: int = 10_485_760
    segment_ms: int = 604_800_000
    index_interval_bytes: int = 4096
    max_message_bytes: int = 1_048_588
    delete_retention_ms: int = 86_400_000
    min_compaction_lag_ms: int = 0
    max_compaction_lag_ms: int = 2**63 - 1
    min_cleanable_dirty_ratio: float = 0.5
    producer_id_expiration_ms: int = 86_400_000
    remote_storage_enable: bool = False

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> CompactionConfig:
        """Return the configuration with values by Kafka's topic config names (`config/keys.py`); a missing name has its
        default.
        """
        given = {name.replace(".", "_"): value for name, value in values.items()}
        fields = {name: given[name] for name in cls.__dataclass_fields__ if name in given}
        if "cleanup_policy" in fields:
            fields["cleanup_policy"] = frozenset(fields["cleanup_policy"])
        if given.get("internal_segment_bytes") is not None:
            fields["segment_bytes"] = given["internal_segment_bytes"]
        return cls(**fields)
