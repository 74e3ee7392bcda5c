import java.util.ArrayList;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

/** Prints every record of some partitions, as read by a consumer of version 0.10, in the form of Consume.java.
 *  Arguments: bootstrap, then one or more topic:partition. */
public final class ConsumeOld {
    public static void main(String[] arguments) {
        Properties config = new Properties();
        config.put("bootstrap.servers", arguments[0]);
        config.put("enable.auto.commit", "false");
        config.put("auto.offset.reset", "none");
        config.put("check.crcs", "true");
        List<TopicPartition> partitions = new ArrayList<>();
        for (int at = 1; at < arguments.length; at++) {
            int colon = arguments[at].lastIndexOf(':');
            partitions.add(new TopicPartition(
                arguments[at].substring(0, colon), Integer.parseInt(arguments[at].substring(colon + 1))));
        }
        StringBuilder out = new StringBuilder();
        ByteArrayDeserializer bytes = new ByteArrayDeserializer();
        try (KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(config, bytes, bytes)) {
            consumer.assign(partitions);
            Map<TopicPartition, Long> left = new HashMap<>(consumer.endOffsets(partitions));
            consumer.seekToBeginning(partitions);
            while (true) {
                left.entrySet().removeIf(entry -> consumer.position(entry.getKey()) >= entry.getValue());
                if (left.isEmpty()) {
                    break;
                }
                for (ConsumerRecord<byte[], byte[]> record : consumer.poll(200)) {
                    out.append(record.topic()).append('\t').append(record.partition()).append('\t');
                    out.append(record.offset()).append('\t').append(record.timestamp()).append('\t');
                    out.append(record.timestampType()).append('\t').append(text(record.key())).append('\t');
                    out.append(text(record.value())).append('\n');
                }
            }
        }
        System.out.print(out);
    }

    private static String text(byte[] data) {
        return data == null ? "-" : Base64.getEncoder().encodeToString(data);
    }
}
