import java.time.Duration;
import java.util.Base64;
import java.util.HashMap;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

/** Prints every record of some partitions, as read by the consumer of the version on the class path.
 *  Arguments: bootstrap, isolation level, then one or more topic:partition. Prints a line for each record, with fields
 *  divided by tabs, bytes as base64, and null as a dash: topic, partition, offset, timestamp, timestamp type, key, value,
 *  name and value of headers. */
public final class Consume {
    public static void main(String[] arguments) {
        Properties config = new Properties();
        config.put("bootstrap.servers", arguments[0]);
        config.put("isolation.level", arguments[1]);
        config.put("enable.auto.commit", "false");
        config.put("auto.offset.reset", "none");
        config.put("check.crcs", "true");
        Set<TopicPartition> partitions = new HashSet<>();
        for (int at = 2; at < arguments.length; at++) {
            int colon = arguments[at].lastIndexOf(':');
            partitions.add(new TopicPartition(
                arguments[at].substring(0, colon), Integer.parseInt(arguments[at].substring(colon + 1))));
        }
        StringBuilder out = new StringBuilder();
        ByteArrayDeserializer bytes = new ByteArrayDeserializer();
        try (KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(config, bytes, bytes)) {
            consumer.assign(partitions);
            consumer.seekToBeginning(partitions);
            Map<TopicPartition, Long> ends = new LinkedHashMap<>(consumer.endOffsets(partitions));
            Map<TopicPartition, Long> left = new HashMap<>(ends);
            while (true) {
                left.entrySet().removeIf(entry -> consumer.position(entry.getKey()) >= entry.getValue());
                if (left.isEmpty()) {
                    break;
                }
                for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofMillis(200))) {
                    print(record, out);
                }
            }
        }
        System.out.print(out);
    }

    private static void print(ConsumerRecord<byte[], byte[]> record, StringBuilder out) {
        out.append(record.topic()).append('\t').append(record.partition()).append('\t').append(record.offset());
        out.append('\t').append(record.timestamp()).append('\t').append(record.timestampType());
        out.append('\t').append(text(record.key())).append('\t').append(text(record.value()));
        for (Header header : record.headers()) {
            out.append('\t').append(header.key()).append('\t').append(text(header.value()));
        }
        out.append('\n');
    }

    private static String text(byte[] data) {
        return data == null ? "-" : Base64.getEncoder().encodeToString(data);
    }
}
