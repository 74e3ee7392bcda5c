package keytail.harness;

import com.fasterxml.jackson.databind.JsonNode;
import java.io.IOException;
import java.nio.ByteBuffer;
import org.apache.kafka.common.compress.Compression;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.header.internals.RecordHeader;
import org.apache.kafka.common.record.TimestampType;
import org.apache.kafka.common.record.internal.CompressionType;
import org.apache.kafka.common.record.internal.ControlRecordType;
import org.apache.kafka.common.record.internal.EndTransactionMarker;
import org.apache.kafka.common.record.internal.MemoryRecords;
import org.apache.kafka.common.record.internal.MemoryRecordsBuilder;
import org.apache.kafka.common.record.internal.RecordBatch;
import org.apache.kafka.common.utils.ByteBufferOutputStream;

/** Builds Kafka's record batches from their description in a request. */
final class Batches {
    private Batches() {
    }

    static MemoryRecords data(JsonNode batch, long nextOffset) throws IOException {
        JsonNode records = batch.get("records");
        long baseOffset = batch.path("base_offset").asLong(nextOffset);
        TimestampType type = batch.path("log_append_time").isNumber()
            ? TimestampType.LOG_APPEND_TIME : TimestampType.CREATE_TIME;
        ByteBufferOutputStream stream = new ByteBufferOutputStream(512);
        try (MemoryRecordsBuilder builder = new MemoryRecordsBuilder(
                stream,
                RecordBatch.CURRENT_MAGIC_VALUE,
                compression(batch.path("codec").asText("none")),
                type,
                baseOffset,
                batch.path("log_append_time").asLong(RecordBatch.NO_TIMESTAMP),
                batch.path("producer_id").asLong(RecordBatch.NO_PRODUCER_ID),
                (short) batch.path("producer_epoch").asInt(RecordBatch.NO_PRODUCER_EPOCH),
                batch.path("base_sequence").asInt(RecordBatch.NO_SEQUENCE),
                batch.path("transactional").asBoolean(false),
                false,
                batch.path("leader_epoch").asInt(0),
                Integer.MAX_VALUE,
                batch.path("delete_horizon_ms").asLong(RecordBatch.NO_TIMESTAMP))) {
            long offset = baseOffset;
            for (JsonNode record : records) {
                offset = record.path("o").asLong(offset);
                builder.appendWithOffset(
                    offset++, record.get("t").asLong(), bytes(record.get("k")), bytes(record.get("v")),
                    headers(record.path("h")));
            }
            if (batch.path("last_offset").isNumber()) {
                builder.overrideLastOffset(batch.get("last_offset").asLong());
            }
            return builder.build();
        }
    }

    static MemoryRecords marker(JsonNode marker) {
        return MemoryRecords.withEndTransactionMarker(
            marker.get("t").asLong(),
            marker.get("producer_id").asLong(),
            (short) marker.get("producer_epoch").asInt(),
            new EndTransactionMarker(
                ControlRecordType.valueOf(marker.get("type").asText()),
                marker.path("coordinator_epoch").asInt(0)));
    }

    static Compression compression(String codec) {
        return Compression.of(CompressionType.forName(codec)).build();
    }

    static byte[] bytes(JsonNode text) throws IOException {
        return text == null || text.isNull() ? null : text.binaryValue();
    }

    static Header[] headers(JsonNode pairs) throws IOException {
        Header[] headers = new Header[pairs.size()];
        for (int i = 0; i < headers.length; i++) {
            ByteBuffer key = ByteBuffer.wrap(bytes(pairs.get(i).get(0)));
            byte[] value = bytes(pairs.get(i).get(1));
            headers[i] = new RecordHeader(key, value == null ? null : ByteBuffer.wrap(value));
        }
        return headers;
    }
}
