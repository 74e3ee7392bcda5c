"""The fields of Kafka 4.3.1's own records, generated from its message definitions. Do not edit.

Written by `python -m tests.golden.kafka_messages`. The notation is that of `format/messages.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from keytail.format.messages import NEVER, Definition

# fmt: off


# Records of the cluster metadata log by type.
METADATA: Mapping[int, Definition] = {
    # RegisterBrokerRecord
    0: Definition(4, 0, ""
        "brokerId:int32 isMigratingZkBroker:bool/2+ incarnationId:uuid brokerEpoch:int64 endPoints:[(name:string "
        "host:string port:uint16 securityProtocol:int16)] features:[(name:string minSupportedVersion:int16 "
        "maxSupportedVersion:int16)] rack:string? fenced:bool inControlledShutdown:bool/1+ logDirs:[uuid]/3+#0 "
        "cordonedLogDirs:[uuid]?/4+#1"),
    # UnregisterBrokerRecord
    1: Definition(0, 0, "brokerId:int32 brokerEpoch:int64"),
    # TopicRecord
    2: Definition(0, 0, "name:string topicId:uuid"),
    # PartitionRecord
    3: Definition(2, 0, ""
        "partitionId:int32 topicId:uuid replicas:[int32] isr:[int32] removingReplicas:[int32] addingReplicas:[int32] "
        "leader:int32 leaderRecoveryState:int8#0=0 leaderEpoch:int32 partitionEpoch:int32 directories:[uuid]/1+ "
        "eligibleLeaderReplicas:[int32]?/2+#1 lastKnownElr:[int32]?/2+#2"),
    # ConfigRecord
    4: Definition(0, 0, "resourceType:int8 resourceName:string name:string value:string?"),
    # PartitionChangeRecord
    5: Definition(2, 0, ""
        "partitionId:int32 topicId:uuid isr:[int32]?#0 leader:int32#1=-2 replicas:[int32]?#2 "
        "removingReplicas:[int32]?#3 addingReplicas:[int32]?#4 leaderRecoveryState:int8#5=-1 directories:[uuid]?/1+#8"
        " eligibleLeaderReplicas:[int32]?/2+#6 lastKnownElr:[int32]?/2+#7"),
    # FenceBrokerRecord
    7: Definition(0, 0, "id:int32 epoch:int64"),
    # UnfenceBrokerRecord
    8: Definition(0, 0, "id:int32 epoch:int64"),
    # RemoveTopicRecord
    9: Definition(0, 0, "topicId:uuid"),
    # DelegationTokenRecord
    10: Definition(0, 0, ""
        "owner:string requester:string renewers:[string] issueTimestamp:int64 maxTimestamp:int64 "
        "expirationTimestamp:int64 tokenId:string"),
    # UserScramCredentialRecord
    11: Definition(0, 0, "name:string mechanism:int8 salt:bytes storedKey:bytes serverKey:bytes iterations:int32"),
    # FeatureLevelRecord
    12: Definition(0, 0, "name:string featureLevel:int16"),
    # ClientQuotaRecord
    14: Definition(0, 0, "entity:[(entityType:string entityName:string?)] key:string value:float64 remove:bool"),
    # ProducerIdsRecord
    15: Definition(0, 0, "brokerId:int32 brokerEpoch:int64 nextProducerId:int64"),
    # BrokerRegistrationChangeRecord
    17: Definition(3, 0, ""
        "brokerId:int32 brokerEpoch:int64 fenced:int8#0 inControlledShutdown:int8/1+#1 logDirs:[uuid]/2+#2 "
        "cordonedLogDirs:[uuid]?/3+#3"),
    # AccessControlEntryRecord
    18: Definition(0, 0, ""
        "id:uuid resourceType:int8 resourceName:string patternType:int8 principal:string host:string operation:int8 "
        "permissionType:int8"),
    # RemoveAccessControlEntryRecord
    19: Definition(0, 0, "id:uuid"),
    # NoOpRecord
    20: Definition(0, 0, ""),
    # ZkMigrationStateRecord
    21: Definition(0, 0, "zkMigrationState:int8"),
    # RemoveUserScramCredentialRecord
    22: Definition(0, 0, "name:string mechanism:int8"),
    # BeginTransactionRecord
    23: Definition(0, 0, "name:string?#0"),
    # EndTransactionRecord
    24: Definition(0, 0, ""),
    # AbortTransactionRecord
    25: Definition(0, 0, "reason:string?#0"),
    # RemoveDelegationTokenRecord
    26: Definition(0, 0, "tokenId:string"),
    # RegisterControllerRecord
    27: Definition(0, 0, ""
        "controllerId:int32 incarnationId:uuid zkMigrationReady:bool endPoints:[(name:string host:string port:uint16 "
        "securityProtocol:int16)] features:[(name:string minSupportedVersion:int16 maxSupportedVersion:int16)]"),
    # ClearElrRecord
    28: Definition(0, 0, "topicName:string"),
}

# Keys of `__consumer_offsets` by record type.
GROUP_KEYS: Mapping[int, Definition] = {
    # LegacyOffsetCommitKey
    0: Definition(0, NEVER, "group:string topic:string partition:int32"),
    # OffsetCommitKey
    1: Definition(0, NEVER, "group:string topic:string partition:int32"),
    # GroupMetadataKey
    2: Definition(0, NEVER, "group:string"),
    # ConsumerGroupMetadataKey
    3: Definition(0, NEVER, "groupId:string"),
    # ConsumerGroupPartitionMetadataKey
    4: Definition(0, NEVER, "groupId:string"),
    # ConsumerGroupMemberMetadataKey
    5: Definition(0, NEVER, "groupId:string memberId:string"),
    # ConsumerGroupTargetAssignmentMetadataKey
    6: Definition(0, NEVER, "groupId:string"),
    # ConsumerGroupTargetAssignmentMemberKey
    7: Definition(0, NEVER, "groupId:string memberId:string"),
    # ConsumerGroupCurrentMemberAssignmentKey
    8: Definition(0, NEVER, "groupId:string memberId:string"),
    # ShareGroupMemberMetadataKey
    10: Definition(0, NEVER, "groupId:string memberId:string"),
    # ShareGroupMetadataKey
    11: Definition(0, NEVER, "groupId:string"),
    # ShareGroupTargetAssignmentMetadataKey
    12: Definition(0, NEVER, "groupId:string"),
    # ShareGroupTargetAssignmentMemberKey
    13: Definition(0, NEVER, "groupId:string memberId:string"),
    # ShareGroupCurrentMemberAssignmentKey
    14: Definition(0, NEVER, "groupId:string memberId:string"),
    # ShareGroupStatePartitionMetadataKey
    15: Definition(0, NEVER, "groupId:string"),
    # ConsumerGroupRegularExpressionKey
    16: Definition(0, NEVER, "groupId:string regularExpression:string"),
    # StreamsGroupMetadataKey
    17: Definition(0, NEVER, "groupId:string"),
    # StreamsGroupMemberMetadataKey
    19: Definition(0, NEVER, "groupId:string memberId:string"),
    # StreamsGroupTargetAssignmentMetadataKey
    20: Definition(0, NEVER, "groupId:string"),
    # StreamsGroupTargetAssignmentMemberKey
    21: Definition(0, NEVER, "groupId:string memberId:string"),
    # StreamsGroupCurrentMemberAssignmentKey
    22: Definition(0, NEVER, "groupId:string memberId:string"),
    # StreamsGroupTopologyKey
    23: Definition(0, NEVER, "groupId:string"),
}

# Values of `__consumer_offsets` by record type.
GROUP_VALUES: Mapping[int, Definition] = {
    # LegacyOffsetCommitValue
    0: Definition(0, NEVER, "offset:int64 metadata:string commitTimestamp:int64"),
    # OffsetCommitValue
    1: Definition(4, 4, ""
        "offset:int64 leaderEpoch:int32/3+ metadata:string commitTimestamp:int64 expireTimestamp:int64/1 "
        "topicId:uuid/4+#0"),
    # GroupMetadataValue
    2: Definition(4, 4, ""
        "protocolType:string generation:int32 protocol:string? leader:string? currentStateTimestamp:int64/2+ "
        "members:[(memberId:string groupInstanceId:string?/3+ clientId:string clientHost:string "
        "rebalanceTimeout:int32/1+ sessionTimeout:int32 subscription:bytes assignment:bytes)]"),
    # ConsumerGroupMetadataValue
    3: Definition(0, 0, "epoch:int32 metadataHash:int64#0=0"),
    # ConsumerGroupPartitionMetadataValue
    4: Definition(0, 0, ""
        "topics:[(topicId:uuid topicName:string numPartitions:int32 partitionMetadata:[(partition:int32 "
        "racks:[string])])]"),
    # ConsumerGroupMemberMetadataValue
    5: Definition(0, 0, ""
        "instanceId:string? rackId:string? clientId:string clientHost:string subscribedTopicNames:[string] "
        "subscribedTopicRegex:string? rebalanceTimeoutMs:int32 serverAssignor:string? "
        "classicMemberMetadata:(sessionTimeoutMs:int32 supportedProtocols:[(name:string metadata:bytes)])?#0"),
    # ConsumerGroupTargetAssignmentMetadataValue
    6: Definition(0, 0, "assignmentEpoch:int32 assignmentTimestamp:int64#0=0"),
    # ConsumerGroupTargetAssignmentMemberValue
    7: Definition(0, 0, "topicPartitions:[(topicId:uuid partitions:[int32])]"),
    # ConsumerGroupCurrentMemberAssignmentValue
    8: Definition(0, 0, ""
        "memberEpoch:int32 previousMemberEpoch:int32 state:int8 assignedPartitions:[(topicId:uuid partitions:[int32] "
        "assignmentEpochs:[int32]?#0)] partitionsPendingRevocation:[(topicId:uuid partitions:[int32] "
        "assignmentEpochs:[int32]?#0)]"),
    # ShareGroupMemberMetadataValue
    10: Definition(0, 0, "rackId:string? clientId:string clientHost:string subscribedTopicNames:[string]"),
    # ShareGroupMetadataValue
    11: Definition(0, 0, "epoch:int32 metadataHash:int64"),
    # ShareGroupTargetAssignmentMetadataValue
    12: Definition(0, 0, "assignmentEpoch:int32 assignmentTimestamp:int64#0=0"),
    # ShareGroupTargetAssignmentMemberValue
    13: Definition(0, 0, "topicPartitions:[(topicId:uuid partitions:[int32])]"),
    # ShareGroupCurrentMemberAssignmentValue
    14: Definition(0, 0, ""
        "memberEpoch:int32 previousMemberEpoch:int32 state:int8 assignedPartitions:[(topicId:uuid "
        "partitions:[int32])]"),
    # ShareGroupStatePartitionMetadataValue
    15: Definition(0, 0, ""
        "initializingTopics:[(topicId:uuid topicName:string partitions:[int32])] initializedTopics:[(topicId:uuid "
        "topicName:string partitions:[int32])] deletingTopics:[(topicId:uuid topicName:string)]"),
    # ConsumerGroupRegularExpressionValue
    16: Definition(0, 0, "topics:[string] version:int64 timestamp:int64"),
    # StreamsGroupMetadataValue
    17: Definition(0, 0, ""
        "epoch:int32 metadataHash:int64 validatedTopologyEpoch:int32#0=-1 lastAssignmentConfigs:[(key:string "
        "value:string)]?#1"),
    # StreamsGroupMemberMetadataValue
    19: Definition(0, 0, ""
        "instanceId:string? rackId:string? clientId:string clientHost:string rebalanceTimeoutMs:int32 "
        "topologyEpoch:int32 processId:string userEndpoint:(host:string port:uint16)? clientTags:[(key:string "
        "value:string)]"),
    # StreamsGroupTargetAssignmentMetadataValue
    20: Definition(0, 0, "assignmentEpoch:int32 assignmentTimestamp:int64#0=0"),
    # StreamsGroupTargetAssignmentMemberValue
    21: Definition(0, 0, ""
        "activeTasks:[(subtopologyId:string partitions:[int32])] standbyTasks:[(subtopologyId:string "
        "partitions:[int32])] warmupTasks:[(subtopologyId:string partitions:[int32])]"),
    # StreamsGroupCurrentMemberAssignmentValue
    22: Definition(0, 0, ""
        "memberEpoch:int32 previousMemberEpoch:int32 state:int8 activeTasks:[(subtopologyId:string partitions:[int32]"
        " assignmentEpochs:[int32]?#0)] standbyTasks:[(subtopologyId:string partitions:[int32] "
        "assignmentEpochs:[int32]?#0)] warmupTasks:[(subtopologyId:string partitions:[int32] "
        "assignmentEpochs:[int32]?#0)] activeTasksPendingRevocation:[(subtopologyId:string partitions:[int32] "
        "assignmentEpochs:[int32]?#0)] standbyTasksPendingRevocation:[(subtopologyId:string partitions:[int32] "
        "assignmentEpochs:[int32]?#0)] warmupTasksPendingRevocation:[(subtopologyId:string partitions:[int32] "
        "assignmentEpochs:[int32]?#0)]"),
    # StreamsGroupTopologyValue
    23: Definition(0, 0, ""
        "epoch:int32 subtopologies:[(subtopologyId:string sourceTopics:[string] sourceTopicRegex:[string] "
        "stateChangelogTopics:[(name:string partitions:int32 replicationFactor:int16 topicConfigs:[(key:string "
        "value:string)])] repartitionSinkTopics:[string] repartitionSourceTopics:[(name:string partitions:int32 "
        "replicationFactor:int16 topicConfigs:[(key:string value:string)])] copartitionGroups:[(sourceTopics:[int16] "
        "sourceTopicRegex:[int16] repartitionSourceTopics:[int16])])]"),
}

# Keys of `__transaction_state`.
TRANSACTION_KEYS: Mapping[int, Definition] = {
    # TransactionLogKey
    0: Definition(0, NEVER, "transactionalId:string"),
}

# Values of `__transaction_state`.
TRANSACTION_VALUES: Mapping[int, Definition] = {
    # TransactionLogValue
    0: Definition(1, 1, ""
        "producerId:int64 previousProducerId:int64/1+#0=-1 nextProducerId:int64/1+#1=-1 producerEpoch:int16 "
        "nextProducerEpoch:int16/1+#3=-1 transactionTimeoutMs:int32 transactionStatus:int8 "
        "transactionPartitions:[(topic:string partitionIds:[int32])]? transactionLastUpdateTimestampMs:int64 "
        "transactionStartTimestampMs:int64 clientTransactionVersion:int16/1+#2=0"),
}

# What members of a classic consumer group send.
CONSUMER_PROTOCOL: Mapping[str, Definition] = {
    # ConsumerProtocolAssignment
    "assignment": Definition(3, NEVER, "assignedPartitions:[(topic:string partitions:[int32])] userData:bytes?"),
    # ConsumerProtocolSubscription
    "subscription": Definition(3, NEVER, ""
        "topics:[string] userData:bytes? ownedPartitions:[(topic:string partitions:[int32])]/1+ generationId:int32/2+"
        " rackId:string?/3+"),
}

# Control records of the cluster metadata log by name.
CONTROL: Mapping[str, Definition] = {
    # KRaftVersionRecord
    "KRaftVersionRecord": Definition(0, 0, "version:int16 kRaftVersion:int16"),
    # LeaderChangeMessage
    "LeaderChangeMessage": Definition(1, 0, ""
        "version:int16 leaderId:int32 voters:[(voterId:int32 voterDirectoryId:uuid/1+)] "
        "grantingVoters:[(voterId:int32 voterDirectoryId:uuid/1+)]"),
    # SnapshotFooterRecord
    "SnapshotFooterRecord": Definition(0, 0, "version:int16"),
    # SnapshotHeaderRecord
    "SnapshotHeaderRecord": Definition(0, 0, "version:int16 lastContainedLogTimestamp:int64"),
    # VotersRecord
    "VotersRecord": Definition(0, 0, ""
        "version:int16 voters:[(voterId:int32 voterDirectoryId:uuid endpoints:[(name:string host:string port:uint16)]"
        " kRaftVersionFeature:(minSupportedVersion:int16 maxSupportedVersion:int16))]"),
}
