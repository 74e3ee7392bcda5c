package keytail.harness;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.File;
import java.io.IOException;
import java.util.HashMap;
import java.util.Map;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.server.util.FileLock;
import org.apache.kafka.storage.internals.checkpoint.OffsetCheckpointFile;
import org.apache.kafka.storage.internals.log.LogDirFailureChannel;

/** `lock`, `unlock`, `read_checkpoint`, `write_checkpoint`: the files of a log dir, by Kafka's own classes. */
final class LogDirs {
    private static final Map<String, FileLock> HELD = new HashMap<>();

    private LogDirs() {
    }

    static void lock(JsonNode request, ObjectNode answer) throws IOException {
        String dir = request.get("dir").asText();
        FileLock lock = new FileLock(new File(dir, ".lock"));
        boolean held = lock.tryLock();
        if (held) {
            HELD.put(dir, lock);
        } else {
            lock.unlockAndClose();
        }
        answer.put("held", held);
    }

    /** Unlocks, unlinks and closes the lock file, as a broker does at its shutdown. */
    static void unlock(JsonNode request, ObjectNode answer) throws IOException {
        FileLock lock = HELD.remove(request.get("dir").asText());
        answer.put("was_held", lock != null);
        if (lock != null) {
            lock.destroy();
        }
    }

    static void readCheckpoint(JsonNode request, ObjectNode answer) throws IOException {
        OffsetCheckpointFile file =
            new OffsetCheckpointFile(new File(request.get("path").asText()), new LogDirFailureChannel(1));
        ObjectNode entries = answer.putObject("entries");
        file.read().forEach((topicPartition, offset) -> entries.put(topicPartition.toString(), offset));
    }

    static void writeCheckpoint(JsonNode request, ObjectNode answer) throws IOException {
        Map<TopicPartition, Long> entries = new HashMap<>();
        for (Map.Entry<String, JsonNode> entry : request.get("entries").properties()) {
            int dash = entry.getKey().lastIndexOf('-');
            entries.put(
                new TopicPartition(
                    entry.getKey().substring(0, dash), Integer.parseInt(entry.getKey().substring(dash + 1))),
                entry.getValue().asLong());
        }
        new OffsetCheckpointFile(new File(request.get("path").asText()), new LogDirFailureChannel(1)).write(entries);
        answer.put("entries", entries.size());
    }
}
