package keytail.harness;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.IOException;
import java.nio.ByteBuffer;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.record.TimestampType;
import org.apache.kafka.common.record.internal.AbstractLegacyRecordBatch;
import org.apache.kafka.common.record.internal.MemoryRecords;
import org.apache.kafka.common.record.internal.MemoryRecordsBuilder;
import org.apache.kafka.common.record.internal.MutableRecordBatch;
import org.apache.kafka.common.record.internal.Record;
import org.apache.kafka.common.record.internal.RecordBatch;
import org.apache.kafka.common.utils.ByteBufferOutputStream;

/** Builds messages of magic 0 and 1 with Kafka's builder, and reads bytes of any magic with Kafka's reader. */
final class Legacy {
    private Legacy() {
    }

    static void build(JsonNode request, ObjectNode answer) throws IOException {
        boolean appendTime = request.path("log_append_time").isNumber();
        long baseOffset = request.get("records").get(0).get("o").asLong();
        ByteBufferOutputStream stream = new ByteBufferOutputStream(512);
        try (MemoryRecordsBuilder builder = new MemoryRecordsBuilder(
                stream,
                (byte) request.get("magic").asInt(),
                Batches.compression(request.get("codec").asText()),
                appendTime ? TimestampType.LOG_APPEND_TIME
                    : request.get("magic").asInt() == 0 ? TimestampType.NO_TIMESTAMP_TYPE : TimestampType.CREATE_TIME,
                baseOffset,
                request.path("log_append_time").asLong(RecordBatch.NO_TIMESTAMP),
                RecordBatch.NO_PRODUCER_ID,
                RecordBatch.NO_PRODUCER_EPOCH,
                RecordBatch.NO_SEQUENCE,
                false,
                false,
                RecordBatch.NO_PARTITION_LEADER_EPOCH,
                Integer.MAX_VALUE)) {
            for (JsonNode record : request.get("records")) {
                builder.appendWithOffset(
                    record.get("o").asLong(), record.get("t").asLong(),
                    Batches.bytes(record.get("k")), Batches.bytes(record.get("v")), new Header[0]);
            }
            ByteBuffer buffer = builder.build().buffer();
            byte[] bytes = new byte[buffer.remaining()];
            buffer.duplicate().get(bytes);
            answer.put("bytes", bytes);
        }
    }

    static void read(JsonNode request, ObjectNode answer) throws IOException {
        ByteBuffer bytes = ByteBuffer.wrap(request.get("bytes").binaryValue());
        ArrayNode batches = answer.putArray("batches");
        for (MutableRecordBatch batch : MemoryRecords.readableRecords(bytes).batches()) {
            ObjectNode row = batches.addObject();
            row.put("magic", batch.magic());
            row.put("valid", batch.isValid());
            row.put("last_offset", batch.lastOffset());
            row.put("max_timestamp", batch.maxTimestamp());
            row.put("timestamp_type", batch.timestampType().name);
            row.put("size", batch.sizeInBytes());
            ArrayNode records = row.putArray("records");
            boolean innerValid = true;
            try {
                row.put("codec", batch.compressionType().name);
                for (Record record : batch) {
                    byte[] key = bytes(record.key());
                    byte[] value = bytes(record.value());
                    records.addArray().add(record.offset()).add(record.timestamp()).add(key).add(value);
                    if (record instanceof AbstractLegacyRecordBatch message) {
                        innerValid &= message.isValid();
                    }
                }
                row.put("base_offset", batch.baseOffset());
            } catch (RuntimeException problem) {
                row.put("problem", problem.getClass().getSimpleName() + ": " + problem.getMessage());
            }
            row.put("inner_valid", innerValid);
        }
    }

    private static byte[] bytes(ByteBuffer buffer) {
        if (buffer == null) {
            return null;
        }
        byte[] bytes = new byte[buffer.remaining()];
        buffer.duplicate().get(bytes);
        return bytes;
    }
}
