package keytail.harness;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.File;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.NoSuchFileException;
import java.util.zip.CRC32;
import org.apache.kafka.common.record.internal.MemoryRecords;
import org.apache.kafka.server.common.RequestLocal;
import org.apache.kafka.storage.internals.log.AppendOrigin;
import org.apache.kafka.storage.internals.log.LogAppendInfo;
import org.apache.kafka.storage.internals.log.VerificationGuard;

/**
 * `append_watched`: appends sets of batches, as bytes, to UnifiedLog one by one, and returns Kafka's answer and the
 * files on disk after each. `open` and `close` are steps too, so that a log can be started several times.
 */
final class Watched {
    private Watched() {
    }

    static void run(JsonNode request, ObjectNode answer) throws IOException {
        File dir = new File(request.get("dir").asText());
        dir.mkdirs();
        ObjectNode options = ((ObjectNode) request).deepCopy();
        Partition partition = null;
        ArrayNode rows = answer.putArray("steps");
        try {
            for (JsonNode step : request.get("steps")) {
                ObjectNode row = rows.addObject();
                if (step.has("open")) {
                    options.put("clock_ms", step.get("open").asLong());
                    options.put("log_start_offset", step.path("log_start_offset").asLong(0));
                    partition = new Partition(options);
                } else if (step.has("close")) {
                    partition.log.flush(true);
                    row.put("recovery_point", partition.log.recoveryPoint());
                    partition.close();
                    partition = null;
                } else {
                    apply(step, partition, row);
                }
                if (partition != null) {
                    row.put("log_end_offset", partition.log.logEndOffset());
                    row.put("recovery_point", partition.log.recoveryPoint());
                    row.put("jitter_ms", partition.log.activeSegment().rollJitterMs());
                }
                files(dir, row.putObject("files"));
            }
        } finally {
            if (partition != null) {
                partition.close();
            }
        }
    }

    private static void apply(JsonNode step, Partition partition, ObjectNode row) throws IOException {
        if (step.has("clock_ms")) {
            partition.clock.set(step.get("clock_ms").asLong());
        } else if (step.has("roll")) {
            partition.log.roll();
        } else if (step.has("flush")) {
            partition.log.flush(false);
        } else {
            try {
                LogAppendInfo info = append(step, partition);
                row.put("first_offset", info.firstOffset());
                row.put("last_offset", info.lastOffset());
            } catch (RuntimeException e) {
                row.put("refused", e.getClass().getSimpleName());
                row.put("message", e.getMessage());
            }
        }
    }

    private static LogAppendInfo append(JsonNode step, Partition partition) throws IOException {
        MemoryRecords records = MemoryRecords.readableRecords(ByteBuffer.wrap(step.get("batches").binaryValue()));
        int leaderEpoch = step.get("leader_epoch").asInt();
        return switch (step.get("as").asText()) {
            case "follower" -> partition.log.appendAsFollower(records, leaderEpoch);
            case "leader" -> partition.log.appendAsLeader(records, leaderEpoch);
            case "coordinator" -> partition.log.appendAsLeader(
                records, leaderEpoch, AppendOrigin.COORDINATOR, RequestLocal.noCaching(),
                VerificationGuard.SENTINEL, (short) 0);
            default -> throw new IllegalArgumentException("unknown step " + step);
        };
    }

    /** Size and CRC-32 of every file. Files whose deletion Kafka delays are already unlinked. */
    private static void files(File dir, ObjectNode found) throws IOException {
        for (File file : dir.listFiles()) {
            if (file.getName().endsWith(".deleted")) {
                continue;
            }
            try {
                byte[] bytes = Files.readAllBytes(file.toPath());
                CRC32 crc = new CRC32();
                crc.update(bytes);
                found.putArray(file.getName()).add(bytes.length).add(crc.getValue());
            } catch (NoSuchFileException e) {
                continue;
            }
        }
    }
}
