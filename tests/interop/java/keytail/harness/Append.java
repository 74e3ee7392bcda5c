package keytail.harness;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.File;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.util.Optional;
import org.apache.kafka.common.record.internal.MemoryRecords;
import org.apache.kafka.server.common.RequestLocal;
import org.apache.kafka.storage.internals.log.AppendOrigin;
import org.apache.kafka.storage.internals.log.LogStartOffsetIncrementReason;
import org.apache.kafka.storage.internals.log.VerificationGuard;

/** `append`: writes traffic to a partition through UnifiedLog, and shuts the log down cleanly. */
final class Append {
    private Append() {
    }

    static void run(JsonNode request, ObjectNode answer) throws IOException {
        new File(request.get("dir").asText()).mkdirs();
        ObjectNode again = ((ObjectNode) request).deepCopy();
        try (Partition partition = new Partition(request)) {
            for (JsonNode step : request.get("steps")) {
                apply(step, partition);
            }
            partition.describe(answer);
            again.put("log_start_offset", partition.log.logStartOffset());
            again.put("clock_ms", partition.clock.milliseconds());
        }
        if (request.path("settle").asBoolean(true)) {
            // Start once more: stray snapshots are removed only at a start.
            try (Partition partition = new Partition(again)) {
                partition.describe(answer);
            }
        }
    }

    private static void apply(JsonNode step, Partition partition) throws IOException {
        if (step.has("batch")) {
            data(step.get("batch"), partition);
        } else if (step.has("marker")) {
            JsonNode marker = step.get("marker");
            partition.log.appendAsLeader(
                Batches.marker(marker),
                marker.path("leader_epoch").asInt(0),
                AppendOrigin.COORDINATOR,
                RequestLocal.noCaching(),
                VerificationGuard.SENTINEL,
                (short) marker.path("transaction_version").asInt(0));
        } else if (step.has("raw")) {
            ByteBuffer bytes = ByteBuffer.wrap(step.get("raw").binaryValue());
            partition.log.appendAsFollower(
                MemoryRecords.readableRecords(bytes), step.path("leader_epoch").asInt(0));
        } else if (step.has("roll")) {
            partition.log.roll(
                step.get("roll").isNumber() ? Optional.of(step.get("roll").asLong()) : Optional.empty());
        } else if (step.has("clock_ms")) {
            partition.clock.set(step.get("clock_ms").asLong());
        } else if (step.has("log_start_offset")) {
            partition.log.updateHighWatermark(partition.log.logEndOffset());
            partition.log.maybeIncrementLogStartOffset(
                step.get("log_start_offset").asLong(), LogStartOffsetIncrementReason.ClientRecordDeletion);
        } else {
            throw new IllegalArgumentException("unknown step " + step);
        }
    }

    private static void data(JsonNode batch, Partition partition) throws IOException {
        boolean follower = batch.path("follower").asBoolean(false);
        // A producer's batch begins at offset 0; a follower's batch has its final offsets.
        MemoryRecords records = Batches.data(batch, follower ? partition.log.logEndOffset() : 0);
        int leaderEpoch = batch.path("leader_epoch").asInt(0);
        if (follower) {
            partition.log.appendAsFollower(records, leaderEpoch);
        } else {
            partition.log.appendAsLeader(records, leaderEpoch);
        }
    }
}
