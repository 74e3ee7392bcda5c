package keytail.harness;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.File;
import java.io.IOException;
import java.util.Map;
import java.util.Optional;
import java.util.Properties;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.storage.internals.log.LogConfig;
import org.apache.kafka.storage.internals.log.LogDirFailureChannel;
import org.apache.kafka.storage.internals.log.LogSegment;
import org.apache.kafka.storage.internals.log.ProducerStateManagerConfig;
import org.apache.kafka.storage.internals.log.UnifiedLog;
import org.apache.kafka.storage.log.metrics.BrokerTopicStats;

/** A partition directory that is opened and closed as by a broker, with a fixed clock. */
final class Partition implements AutoCloseable {
    private static final BrokerTopicStats STATS = new BrokerTopicStats();
    private static final int PRODUCER_EXPIRATION_MS = 86_400_000;

    final FixedClock clock;
    final UnifiedLog log;
    private final DirectScheduler scheduler = new DirectScheduler();
    private final boolean keepDeleted;

    /** Reads dir, clock_ms, configs, log_start_offset, recovery_point, clean, high_watermark of a request. */
    Partition(JsonNode request) throws IOException {
        File dir = new File(request.get("dir").asText());
        clock = new FixedClock(request.get("clock_ms").asLong());
        keepDeleted = request.path("keep_deleted").asBoolean(false);
        int expirationMs = request.path("producer_id_expiration_ms").asInt(PRODUCER_EXPIRATION_MS);
        log = UnifiedLog.create(
            dir,
            config(request.path("configs")),
            request.path("log_start_offset").asLong(0),
            request.path("recovery_point").asLong(0),
            scheduler,
            STATS,
            clock,
            900_000,
            new ProducerStateManagerConfig(expirationMs, false),
            600_000,
            new LogDirFailureChannel(10),
            request.path("clean").asBoolean(true),
            request.hasNonNull("topic_id")
                ? Optional.of(Uuid.fromString(request.get("topic_id").asText())) : Optional.empty());
        // A broker determines the high watermark after loading. That of a single replica is its log end offset.
        log.updateHighWatermark(
            request.hasNonNull("high_watermark") ? request.get("high_watermark").asLong() : log.logEndOffset());
    }

    static LogConfig config(JsonNode configs) {
        Properties properties = new Properties();
        properties.put("cleanup.policy", "compact");
        properties.put("message.timestamp.after.max.ms", Long.toString(Long.MAX_VALUE));
        for (Map.Entry<String, JsonNode> entry : configs.properties()) {
            properties.put(entry.getKey(), entry.getValue().asText());
        }
        return new LogConfig(properties);
    }

    void describe(ObjectNode answer) throws IOException {
        answer.put("log_start_offset", log.logStartOffset());
        answer.put("log_end_offset", log.logEndOffset());
        answer.put("high_watermark", log.highWatermark());
        answer.put("last_stable_offset", log.lastStableOffset());
        answer.put("recovery_point", log.recoveryPoint());
        ArrayNode segments = answer.putArray("segments");
        for (LogSegment segment : log.logSegments()) {
            ObjectNode row = segments.addObject();
            row.put("base_offset", segment.baseOffset());
            row.put("log_bytes", segment.size());
            row.put("index_bytes", segment.offsetIndex().sizeInBytes());
            row.put("time_index_bytes", segment.timeIndex().sizeInBytes());
            row.put("largest_timestamp_ms", segment.largestTimestamp());
        }
    }

    /** A clean shutdown as by a broker: flush (which creates all index files), snapshot, trim, unlink. */
    @Override
    public void close() throws IOException {
        try {
            log.flush(true);
            log.close();
            log.removeLogMetrics();
        } finally {
            if (!keepDeleted) {
                scheduler.runDelayed();
            }
        }
    }
}
