package keytail.harness;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import com.sun.management.OperatingSystemMXBean;
import java.io.File;
import java.io.IOException;
import java.lang.management.ManagementFactory;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.Optional;
import java.util.SplittableRandom;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.compress.Compression;
import org.apache.kafka.common.record.TimestampType;
import org.apache.kafka.common.record.internal.MemoryRecords;
import org.apache.kafka.common.record.internal.MemoryRecordsBuilder;
import org.apache.kafka.common.record.internal.RecordBatch;
import org.apache.kafka.storage.internals.epoch.LeaderEpochFileCache;
import org.apache.kafka.storage.internals.log.LogConfig;
import org.apache.kafka.storage.internals.log.LogDirFailureChannel;
import org.apache.kafka.storage.internals.log.LogSegment;
import org.apache.kafka.storage.internals.log.LogToClean;
import org.apache.kafka.storage.internals.log.ProducerStateManager;
import org.apache.kafka.storage.internals.log.ProducerStateManagerConfig;
import org.apache.kafka.storage.internals.log.UnifiedLog;

/** `bench_*`: a large log of one shape, and timed rounds of the cleaner and recoveries of copies of it. */
final class Bench {
    private static final String FILLER = "{\"status\":\"active\",\"region\":\"eu-west-1\",\"note\":\"";
    private static final int SALT_BYTES = 40;

    private Bench() {
    }

    static void generate(JsonNode request, ObjectNode answer) throws IOException {
        new File(request.get("dir").asText()).mkdirs();
        long records = request.get("records").asLong();
        int batchRecords = request.get("batch_records").asInt();
        int keys = request.get("keys").asInt();
        long cleanRecords = request.path("clean_records").asLong(0);
        Compression codec = Batches.compression(request.path("codec").asText("none"));
        SplittableRandom random = new SplittableRandom(request.path("seed").asLong(1));
        byte[] value = new byte[request.path("value_bytes").asInt(91)];
        byte[] filler = FILLER.getBytes(StandardCharsets.US_ASCII);
        for (int i = 0; i < value.length; i++) {
            value[i] = filler[i % filler.length];
        }
        ByteBuffer buffer = ByteBuffer.allocate(batchRecords * (value.length + 64) + 256);
        long timestamp = request.get("clock_ms").asLong();
        Messages.info = false;
        try (Partition partition = new Partition(request)) {
            for (long done = 0; done < records; done += batchRecords) {
                int count = (int) Math.min(batchRecords, records - done);
                MemoryRecords batch = batch(
                    buffer, codec, done, count, timestamp + done / 10, cleanRecords, keys, value, random);
                partition.log.appendAsFollower(batch, 0);
            }
            // The cleaner never cleans the active segment, so all generated records must be in other segments.
            partition.log.roll();
            partition.describe(answer);
        } finally {
            Messages.info = true;
        }
    }

    private static MemoryRecords batch(
            ByteBuffer buffer, Compression codec, long base, int count, long timestamp, long cleanRecords, int keys,
            byte[] value, SplittableRandom random) {
        buffer.clear();
        try (MemoryRecordsBuilder builder = MemoryRecords.builder(
                buffer, RecordBatch.CURRENT_MAGIC_VALUE, codec, TimestampType.CREATE_TIME, base,
                RecordBatch.NO_TIMESTAMP, 0)) {
            byte[] key = new byte[16];
            for (int i = 0; i < count; i++) {
                // The cleaned part contains each key once.
                decimal(key, base + i < cleanRecords ? (int) (base + i) : random.nextInt(keys));
                salt(value, random);
                builder.appendWithOffset(base + i, timestamp + i / 10, key, value);
            }
            return builder.build();
        }
    }

    private static void decimal(byte[] key, int number) {
        int rest = number;
        for (int i = key.length - 1; i >= 0; i--) {
            key[i] = (byte) ('0' + rest % 10);
            rest /= 10;
        }
    }

    /** Random letters before the compressible filler; each is about half of the value. */
    private static void salt(byte[] value, SplittableRandom random) {
        int length = Math.min(SALT_BYTES, value.length);
        for (int i = 0; i < length; ) {
            long word = random.nextLong();
            for (int k = 0; k < 8 && i < length; k++, i++) {
                value[i] = (byte) ('a' + ((word >>> (8 * k)) & 15));
            }
        }
    }

    /**
     * One round of each directory, in order. The seconds are those of doClean, including its flush and renames.
     * The CPU seconds are those of the whole JVM, including its garbage collector and compilers.
     */
    static void clean(JsonNode request, ObjectNode answer) throws Exception {
        ArrayNode seconds = answer.putArray("seconds");
        ArrayNode cpuSeconds = answer.putArray("cpu_seconds");
        OperatingSystemMXBean system = (OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();
        Messages.info = false;
        try {
            for (JsonNode dir : request.get("dirs")) {
                ObjectNode one = ((ObjectNode) request).deepCopy();
                one.set("dir", dir);
                try (Partition partition = new Partition(one)) {
                    LogToClean choice = Clean.choose(one, partition, answer);
                    System.gc();
                    long cpuBefore = system.getProcessCpuTime();
                    long started = System.nanoTime();
                    Clean.round(one, partition, choice, answer);
                    seconds.add((System.nanoTime() - started) / 1e9);
                    cpuSeconds.add((system.getProcessCpuTime() - cpuBefore) / 1e9);
                    partition.describe(answer);
                }
            }
        } finally {
            Messages.info = true;
        }
    }

    /** LogSegment.recover of each segment of a directory, in order. Nothing else is timed. */
    static void recover(JsonNode request, ObjectNode answer) throws IOException {
        File dir = new File(request.get("dir").asText());
        LogConfig config = Partition.config(request.path("configs"));
        FixedClock clock = new FixedClock(request.get("clock_ms").asLong());
        TopicPartition topicPartition = new TopicPartition("bench", 0);
        ProducerStateManager producers = new ProducerStateManager(
            topicPartition, dir, 900_000, new ProducerStateManagerConfig(86_400_000, false), clock);
        LeaderEpochFileCache epochs = UnifiedLog.createLeaderEpochCache(
            dir, topicPartition, new LogDirFailureChannel(1), Optional.empty(), new DirectScheduler());
        long nanos = 0;
        System.gc();
        for (JsonNode base : request.get("base_offsets")) {
            LogSegment segment = LogSegment.open(dir, base.asLong(), config, clock, true, 0, false, "");
            long started = System.nanoTime();
            int truncated = segment.recover(producers, epochs);
            nanos += System.nanoTime() - started;
            if (truncated != 0) {
                throw new IllegalStateException(truncated + " bytes were cut");
            }
            segment.close();
        }
        answer.put("seconds", nanos / 1e9);
    }
}
