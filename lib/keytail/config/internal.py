"""Lists Kafka's internal topics, and the settings with which a broker creates each of them.

The sources are Kafka's classes GroupCoordinatorService, TransactionStateManager, ShareCoordinatorService (KIP-932) and
TopicBasedRemoteLogMetadataManager. `__cluster_metadata` has no settings: only controllers write and remove its
records.
"""

from __future__ import annotations

from collections.abc import Mapping

# The settings do not include min.insync.replicas, which does not affect files. Sizes are the defaults of
# offsets.topic.segment.bytes, transaction.state.log.segment.bytes and share.coordinator.state.topic.segment.bytes.
_SEGMENT_BYTES = str(100 << 20)
INTERNAL_TOPICS: Mapping[str, Mapping[str, str]] = {
    "__consumer_offsets": {
        "cleanup.policy": "compact",
        "compression.type": "producer",
        "segment.bytes": _SEGMENT_BYTES,
    },
    "__transaction_state": {
        "cleanup.policy": "compact",
        "compression.type": "uncompressed",
        "segment.bytes": _SEGMENT_BYTES,
        "unclean.leader.election.enable": "false",
    },
    "__share_group_state": {
        "cleanup.policy": "delete",
        "retention.ms": "-1",
        "compression.type": "producer",
        "segment.bytes": _SEGMENT_BYTES,
    },
    "__remote_log_metadata": {"cleanup.policy": "delete", "retention.ms": "-1", "remote.storage.enable": "false"},
    "__cluster_metadata": {},
}
