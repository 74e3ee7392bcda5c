import java.util.Collection;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.AlterConfigOp;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.common.config.ConfigResource;

/**
 * Changes the metadata of a cluster. Arguments after the bootstrap address:
 * {@code create NAME PARTITIONS}, {@code delete NAME}, {@code topic NAME KEY=VALUE}, {@code broker ID KEY=VALUE}
 * ({@code all} for the default of all brokers; {@code KEY} alone removes the config).
 */
public final class MetadataAdmin {
    public static void main(String[] arguments) throws Exception {
        try (Admin admin = Admin.create(Map.of("bootstrap.servers", arguments[0]))) {
            for (int i = 1; i < arguments.length; i++) {
                run(admin, arguments[i].split(" "));
            }
        }
    }

    private static void run(Admin admin, String[] words) throws Exception {
        switch (words[0]) {
            case "create":
                NewTopic topic = new NewTopic(words[1], Integer.parseInt(words[2]), (short) 1);
                Map<String, String> configs = new HashMap<>();
                for (int i = 3; i < words.length; i++) {
                    configs.put(words[i].split("=")[0], words[i].split("=")[1]);
                }
                admin.createTopics(List.of(topic.configs(configs))).all().get();
                break;
            case "delete":
                admin.deleteTopics(List.of(words[1])).all().get();
                break;
            case "topic":
                alter(admin, new ConfigResource(ConfigResource.Type.TOPIC, words[1]), words[2]);
                break;
            case "broker":
                String name = words[1].equals("all") ? "" : words[1];
                alter(admin, new ConfigResource(ConfigResource.Type.BROKER, name), words[2]);
                break;
            default:
                throw new IllegalArgumentException(words[0]);
        }
    }

    private static void alter(Admin admin, ConfigResource resource, String setting) throws Exception {
        String[] parts = setting.split("=");
        boolean delete = parts.length == 1;
        AlterConfigOp.OpType type = delete ? AlterConfigOp.OpType.DELETE : AlterConfigOp.OpType.SET;
        Collection<AlterConfigOp> ops =
            List.of(new AlterConfigOp(new ConfigEntry(parts[0], delete ? "" : parts[1]), type));
        admin.incrementalAlterConfigs(Map.of(resource, ops)).all().get();
    }
}
