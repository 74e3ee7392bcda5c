package keytail.harness;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.channels.Channels;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.record.TimestampType;
import org.apache.kafka.common.record.internal.MemoryRecords;
import org.apache.kafka.common.record.internal.MemoryRecordsBuilder;
import org.apache.kafka.common.record.internal.Record;
import org.apache.kafka.common.record.internal.RecordBatch;
import org.apache.kafka.common.utils.ByteBufferOutputStream;
import org.apache.kafka.common.utils.Utils;

/** Encodes rows of records as batches with Kafka's builder, decodes batches to records, and hashes keys. */
final class Encode {
    private Encode() {
    }

    static void encode(JsonNode request, ObjectNode answer) throws IOException {
        long offset = request.get("base_offset").asLong();
        ByteArrayOutputStream out = new ByteArrayOutputStream();
        MemoryRecordsBuilder builder = null;
        for (JsonNode record : request.get("records")) {
            long time = record.get("t").asLong();
            byte[] keyBytes = Batches.bytes(record.get("k"));
            byte[] valueBytes = Batches.bytes(record.get("v"));
            Header[] headers = Batches.headers(record.path("h"));
            ByteBuffer key = keyBytes == null ? null : ByteBuffer.wrap(keyBytes);
            ByteBuffer value = valueBytes == null ? null : ByteBuffer.wrap(valueBytes);
            if (builder != null && !builder.hasRoomFor(time, key, value, headers)) {
                write(builder, out);
                builder = null;
            }
            if (builder == null) {
                builder = builder(request, offset);
            }
            builder.appendWithOffset(offset++, time, key, value, headers);
        }
        if (builder != null) {
            write(builder, out);
        }
        answer.put("bytes", out.toByteArray());
    }

    private static MemoryRecordsBuilder builder(JsonNode request, long baseOffset) {
        return new MemoryRecordsBuilder(
            new ByteBufferOutputStream(512), RecordBatch.CURRENT_MAGIC_VALUE, Batches.compression("none"),
            TimestampType.CREATE_TIME, baseOffset, RecordBatch.NO_TIMESTAMP, RecordBatch.NO_PRODUCER_ID,
            RecordBatch.NO_PRODUCER_EPOCH, RecordBatch.NO_SEQUENCE, false, false,
            request.get("leader_epoch").asInt(), request.get("batch_bytes").asInt(), RecordBatch.NO_TIMESTAMP);
    }

    private static void write(MemoryRecordsBuilder builder, ByteArrayOutputStream out) throws IOException {
        Channels.newChannel(out).write(builder.build().buffer());
    }

    static void decode(JsonNode request, ObjectNode answer) throws IOException {
        ArrayNode batches = answer.putArray("batches");
        ArrayNode records = answer.putArray("records");
        MemoryRecords read = MemoryRecords.readableRecords(ByteBuffer.wrap(request.get("bytes").binaryValue()));
        for (RecordBatch batch : read.batches()) {
            batch.ensureValid();
            Load.describe(batch, 0, batches.addObject());
            for (Record record : batch) {
                record.ensureValid();
                Load.write(batch, record, records.addArray());
            }
        }
        answer.put("valid_bytes", read.validBytes());
    }

    static void murmur2(JsonNode request, ObjectNode answer) throws IOException {
        int partitions = request.get("partitions").asInt();
        ArrayNode found = answer.putArray("partitions");
        for (JsonNode key : request.get("keys")) {
            found.add(Utils.toPositive(Utils.murmur2(key.binaryValue())) % partitions);
        }
    }
}
