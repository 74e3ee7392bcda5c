package keytail.harness;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.File;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Optional;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.storage.internals.log.LogConfig;
import org.apache.kafka.storage.internals.log.LogDirFailureChannel;
import org.apache.kafka.storage.internals.log.LogFileUtils;
import org.apache.kafka.storage.internals.log.LogSegment;
import org.apache.kafka.storage.internals.log.ProducerStateManager;
import org.apache.kafka.storage.internals.log.ProducerStateManagerConfig;
import org.apache.kafka.storage.internals.log.UnifiedLog;

/** `recover`: the indexes that LogSegment.recover builds from a copy of one `.log` file. */
final class Recover {
    private Recover() {
    }

    static void run(JsonNode request, ObjectNode answer) throws IOException {
        long base = request.get("base_offset").asLong();
        String stem = LogFileUtils.filenamePrefixFromOffset(base);
        Path work = Files.createTempDirectory(Path.of(request.get("work_dir").asText()), "recover");
        TopicPartition topicPartition = new TopicPartition("recover", 0);
        File dir = work.resolve("recover-0").toFile();
        Files.createDirectory(dir.toPath());
        Files.copy(Path.of(request.get("dir").asText(), stem + ".log"), dir.toPath().resolve(stem + ".log"));
        FixedClock clock = new FixedClock(request.path("clock_ms").asLong(0));
        LogConfig config = Partition.config(request.path("configs"));
        LogSegment segment = LogSegment.open(dir, base, config, clock, true, 0, false, "");
        int truncated = segment.recover(
            new ProducerStateManager(
                topicPartition, dir, 900_000, new ProducerStateManagerConfig(86_400_000, false), clock),
            UnifiedLog.createLeaderEpochCache(
                dir, topicPartition, new LogDirFailureChannel(1), Optional.empty(), new DirectScheduler()));
        segment.flush();
        segment.close();
        answer.put("truncated_bytes", truncated);
        for (String suffix : new String[] {"index", "timeindex", "txnindex"}) {
            Path file = dir.toPath().resolve(stem + "." + suffix);
            answer.put(suffix, Files.exists(file) ? Files.readAllBytes(file) : null);
        }
        try (var files = Files.list(dir.toPath())) {
            for (Path file : files.toList()) {
                Files.delete(file);
            }
        }
        Files.delete(dir.toPath());
        Files.delete(work);
    }
}
