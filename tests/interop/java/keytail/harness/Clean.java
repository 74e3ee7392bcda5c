package keytail.harness;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.util.Map;
import java.util.Optional;
import org.apache.kafka.storage.internals.log.Cleaner;
import org.apache.kafka.storage.internals.log.CleanerNumbers;
import org.apache.kafka.storage.internals.log.CleanerStats;
import org.apache.kafka.storage.internals.log.LogToClean;
import org.apache.kafka.storage.internals.log.SkimpyOffsetMap;
import org.apache.kafka.storage.internals.utils.Throttler;

/** `cleanable` and `clean`: the range that the cleaner selects, and one round of the cleaner. */
final class Clean {
    private static final int SLOT_BYTES = 24;
    private static final int DEFAULT_SLOTS = 4096;
    private static final int IO_BUFFER_BYTES = 262_144;
    private static final int MAX_IO_BUFFER_BYTES = 1_048_588;

    private Clean() {
    }

    static void cleanable(JsonNode request, ObjectNode answer) throws Exception {
        try (Partition partition = new Partition(request)) {
            choose(request, partition, answer);
            partition.describe(answer);
        }
    }

    static void clean(JsonNode request, ObjectNode answer) throws Exception {
        try (Partition partition = new Partition(request)) {
            LogToClean choice = choose(request, partition, answer);
            if (!request.path("only_if_cleanable").asBoolean(false) || choice.cleanableBytes() > 0) {
                round(request, partition, choice, answer);
            } else {
                answer.put("cleaned", false);
            }
            partition.describe(answer);
        }
    }

    /** The log with the offsets that the cleaner would select, or with those of the request. */
    static LogToClean choose(JsonNode request, Partition partition, ObjectNode answer) throws Exception {
        long nowMs = partition.clock.milliseconds();
        Optional<Long> checkpoint = request.hasNonNull("checkpoint")
            ? Optional.of(request.get("checkpoint").asLong()) : Optional.empty();
        CleanerNumbers numbers = CleanerNumbers.of(partition.log, checkpoint, nowMs);
        LogToClean choice = new LogToClean(
            partition.log,
            given(request, "first_dirty_offset", numbers.firstDirtyOffset),
            given(request, "first_uncleanable_offset", numbers.firstUncleanableDirtyOffset),
            numbers.compactionDelayMs > 0);
        answer.put("first_dirty_offset", choice.firstDirtyOffset());
        answer.put("first_uncleanable_dirty_offset", numbers.firstUncleanableDirtyOffset);
        answer.put("first_uncleanable_offset", choice.firstUncleanableOffset());
        answer.put("clean_bytes", choice.cleanBytes());
        answer.put("cleanable_bytes", choice.cleanableBytes());
        answer.put("total_bytes", choice.totalBytes());
        answer.put("dirty_ratio", Double.toString(choice.cleanableRatio()));
        answer.put("must_compact_now", CleanerNumbers.needCompactionNow(choice));
        answer.put("compaction_delay_ms", numbers.compactionDelayMs);
        answer.put("rewrite_checkpoint", numbers.forceUpdateCheckpoint);
        return choice;
    }

    static Map.Entry<Long, CleanerStats> round(
            JsonNode request, Partition partition, LogToClean choice, ObjectNode answer) throws Exception {
        SkimpyOffsetMap map = new SkimpyOffsetMap(request.path("map_slots").asInt(DEFAULT_SLOTS) * SLOT_BYTES);
        double loadFactor = request.path("load_factor").asDouble(0.9);
        Cleaner cleaner = new Cleaner(
            0,
            map,
            request.path("io_buffer_bytes").asInt(IO_BUFFER_BYTES),
            request.path("max_io_buffer_bytes").asInt(MAX_IO_BUFFER_BYTES),
            loadFactor,
            new Throttler(Double.MAX_VALUE, 300, "cleaner-io", "bytes", partition.clock),
            partition.clock,
            topicPartition -> { });
        Map.Entry<Long, CleanerStats> result = cleaner.doClean(choice, partition.clock.milliseconds());
        CleanerStats stats = result.getValue();
        answer.put("cleaned", true);
        answer.put("end_offset", result.getKey());
        answer.put("map_max_entries", (int) (map.slots() * loadFactor));
        answer.put("map_entries", map.size());
        answer.put("bytes_read", stats.bytesRead());
        answer.put("bytes_written", stats.bytesWritten());
        answer.put("records_read", stats.messagesRead());
        answer.put("records_written", stats.messagesWritten());
        answer.put("records_without_key", stats.invalidMessagesRead());
        answer.put("records_mapped", stats.mapMessagesRead());
        return result;
    }

    private static long given(JsonNode request, String name, long otherwise) {
        return request.hasNonNull(name) ? request.get(name).asLong() : otherwise;
    }
}
