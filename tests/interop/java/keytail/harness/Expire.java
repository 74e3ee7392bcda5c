package keytail.harness;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.File;
import java.io.IOException;
import org.apache.kafka.storage.internals.epoch.LeaderEpochFileCache;

/** `expire`: retention as a broker applies it to an open log, then a clean shutdown. */
final class Expire {
    private Expire() {
    }

    static void run(JsonNode request, ObjectNode answer) throws IOException {
        File dir = new File(request.get("dir").asText());
        try (Partition partition = new Partition(request)) {
            answer.put("deleted", partition.log.deleteOldSegments());
            partition.describe(answer);
            LeaderEpochFileCache cache = partition.log.leaderEpochCache();
            ArrayNode epochs = answer.putArray("epochs");
            cache.epochEntries().forEach(entry -> epochs.addArray().add(entry.epoch()).add(entry.startOffset()));
        }
        answer.set("files", Load.listing(dir.toPath(), answer.arrayNode()));
    }
}
