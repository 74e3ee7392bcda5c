package keytail.harness;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.File;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Optional;
import java.util.TreeSet;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.record.internal.FileRecords.TimestampAndOffset;
import org.apache.kafka.common.record.internal.Record;
import org.apache.kafka.common.record.internal.RecordBatch;
import org.apache.kafka.common.utils.Utils;
import org.apache.kafka.server.storage.log.FetchIsolation;
import org.apache.kafka.storage.internals.log.LogSegment;
import org.apache.kafka.storage.internals.log.UnifiedLog;

/** `load`: opens a directory in any state, and returns what a consumer would read from it. */
final class Load {
    private Load() {
    }

    static void run(JsonNode request, ObjectNode answer) throws IOException {
        File dir = new File(request.get("dir").asText());
        try (Partition partition = new Partition(request)) {
            partition.describe(answer);
            answer.set("files_open", listing(dir.toPath(), answer.arrayNode()));
            List<Long> offsets = scan(request, partition.log, answer);
            if (request.path("fetch").asBoolean(false)) {
                fetchEach(partition.log, offsets, answer.putArray("fetch_mismatches"));
            }
            if (request.path("transactions").asBoolean(false)) {
                Served.describe(partition.log, answer);
            }
            ArrayNode found = answer.putArray("timestamps");
            for (JsonNode timestamp : request.path("timestamps")) {
                lookUp(partition.log, timestamp.asLong(), found.addArray());
            }
        }
        answer.set("files", listing(dir.toPath(), answer.arrayNode()));
    }

    static ArrayNode listing(Path dir, ArrayNode names) throws IOException {
        try (var entries = Files.list(dir)) {
            entries.map(entry -> entry.getFileName().toString()).sorted().forEach(names::add);
        }
        return names;
    }

    /** All records in order, read without indexes. The checksum of each batch is verified. */
    private static List<Long> scan(JsonNode request, UnifiedLog log, ObjectNode answer) throws IOException {
        boolean wanted = request.path("records").asBoolean(true);
        ArrayNode records = answer.putArray("records");
        ArrayNode batches = answer.putArray("batches");
        List<Long> offsets = new ArrayList<>();
        for (LogSegment segment : log.logSegments()) {
            for (RecordBatch batch : segment.log().batches()) {
                batch.ensureValid();
                if (request.path("batches").asBoolean(false)) {
                    describe(batch, segment.baseOffset(), batches.addObject());
                }
                for (Record record : batch) {
                    if (!batch.isControlBatch() && record.offset() >= log.logStartOffset()) {
                        offsets.add(record.offset());
                    }
                    if (wanted) {
                        write(batch, record, records.addArray());
                    }
                }
            }
        }
        return offsets;
    }

    static void describe(RecordBatch batch, long segmentBase, ObjectNode row) {
        row.put("segment", segmentBase);
        row.put("base_offset", batch.baseOffset());
        row.put("last_offset", batch.lastOffset());
        row.put("bytes", batch.sizeInBytes());
        row.put("magic", batch.magic());
        row.put("codec", batch.compressionType().name);
        row.put("timestamp_type", batch.timestampType().name);
        row.put("max_timestamp", batch.maxTimestamp());
        row.put("delete_horizon_ms", batch.deleteHorizonMs().orElse(-1));
        row.put("leader_epoch", batch.partitionLeaderEpoch());
        row.put("producer_id", batch.producerId());
        row.put("producer_epoch", batch.producerEpoch());
        row.put("base_sequence", batch.baseSequence());
        row.put("transactional", batch.isTransactional());
        row.put("control", batch.isControlBatch());
        row.put("records", batch.countOrNull() == null ? -1 : batch.countOrNull());
    }

    static void write(RecordBatch batch, Record record, ArrayNode row) {
        row.add(record.offset()).add(record.timestamp());
        binary(row, record.key());
        binary(row, record.value());
        ArrayNode headers = row.addArray();
        for (Header header : record.headers()) {
            ArrayNode pair = headers.addArray().add(header.key());
            pair.add(header.value());
        }
        row.add(batch.isControlBatch());
    }

    private static void binary(ArrayNode row, ByteBuffer bytes) {
        if (bytes == null) {
            row.addNull();
        } else {
            row.add(Utils.toArray(bytes));
        }
    }

    /** Reads through the indexes, as a fetch does, from the offset of each record and from the next offset. */
    private static void fetchEach(UnifiedLog log, List<Long> offsets, ArrayNode mismatches) throws IOException {
        TreeSet<Long> present = new TreeSet<>(offsets);
        TreeSet<Long> asked = new TreeSet<>(offsets);
        offsets.forEach(offset -> asked.add(offset + 1));
        for (long offset : asked) {
            if (offset >= log.logEndOffset()) {
                continue;
            }
            Long expected = present.ceiling(offset);
            Long got = firstFetched(log, offset);
            if (expected == null ? got != null : !expected.equals(got)) {
                mismatches.addArray().add(offset).add(expected).add(got);
            }
        }
    }

    private static Long firstFetched(UnifiedLog log, long offset) throws IOException {
        long from = offset;
        while (from < log.logEndOffset()) {
            long next = from;
            for (RecordBatch batch : log.read(from, 1, FetchIsolation.LOG_END, true).records.batches()) {
                next = batch.nextOffset();
                if (batch.isControlBatch()) {
                    continue;
                }
                for (Record record : batch) {
                    if (record.offset() >= offset) {
                        return record.offset();
                    }
                }
            }
            if (next <= from) {
                return null;
            }
            from = next;
        }
        return null;
    }

    private static void lookUp(UnifiedLog log, long timestamp, ArrayNode row) {
        Optional<TimestampAndOffset> found =
            log.fetchOffsetByTimestamp(timestamp, Optional.empty()).timestampAndOffsetOpt();
        row.add(timestamp);
        if (found.isPresent()) {
            row.add(found.get().timestamp).add(found.get().offset);
        }
    }
}
