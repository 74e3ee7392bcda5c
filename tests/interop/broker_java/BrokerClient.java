import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.BufferedReader;
import java.io.DataInputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.net.Socket;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Base64;
import java.util.Collection;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Properties;
import java.util.Set;
import java.util.concurrent.Future;
import org.apache.kafka.clients.admin.AbortTransactionSpec;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.AlterConfigOp;
import org.apache.kafka.clients.admin.Config;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.admin.ListOffsetsOptions;
import org.apache.kafka.clients.admin.ListOffsetsResult;
import org.apache.kafka.clients.admin.LogDirDescription;
import org.apache.kafka.clients.admin.NewPartitionReassignment;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.OffsetSpec;
import org.apache.kafka.clients.admin.ProducerState;
import org.apache.kafka.clients.admin.RecordsToDelete;
import org.apache.kafka.clients.admin.TopicDescription;
import org.apache.kafka.clients.consumer.ConsumerGroupMetadata;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.consumer.OffsetAndTimestamp;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.ElectionType;
import org.apache.kafka.common.IsolationLevel;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.compress.Compression;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.header.internals.RecordHeader;
import org.apache.kafka.common.message.ProduceRequestData;
import org.apache.kafka.common.message.ProduceResponseData;
import org.apache.kafka.common.protocol.ApiKeys;
import org.apache.kafka.common.protocol.Errors;
import org.apache.kafka.common.record.internal.CompressionType;
import org.apache.kafka.common.record.internal.MemoryRecords;
import org.apache.kafka.common.record.internal.SimpleRecord;
import org.apache.kafka.common.requests.AbstractResponse;
import org.apache.kafka.common.requests.ProduceRequest;
import org.apache.kafka.common.requests.ProduceResponse;
import org.apache.kafka.common.requests.RequestHeader;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * Kafka's own clients for tests in Python, with one line of JSON for each request and each reply. The process outlives
 * the broker, so that a producer can continue after a restart. Bytes are encoded as base64, null as JSON null.
 */
public final class BrokerClient {
    private static final ObjectMapper JSON = new ObjectMapper();
    private static final Base64.Encoder ENCODER = Base64.getEncoder();
    private static final Base64.Decoder DECODER = Base64.getDecoder();

    private final Map<String, KafkaProducer<byte[], byte[]>> producers = new HashMap<>();
    private String bootstrap;
    private Admin admin;

    public static void main(String[] args) throws Exception {
        PrintStream replies = System.out;
        System.setOut(System.err);  // output of libraries must not be mixed with the replies
        BrokerClient client = new BrokerClient();
        BufferedReader requests = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = requests.readLine(); line != null; line = requests.readLine()) {
            ObjectNode reply = JSON.createObjectNode();
            try {
                reply.set("ok", client.answer(JSON.readTree(line)));
            } catch (Throwable problem) {
                Throwable root = problem;
                while (root.getCause() != null) {
                    root = root.getCause();
                }
                reply.put("error", root.getClass().getSimpleName() + ": " + root.getMessage());
            }
            replies.write((reply + "\n").getBytes(StandardCharsets.UTF_8));
            replies.flush();
        }
        client.disconnect();
        System.exit(0);  // idle network threads of producers without a broker must not keep the process alive
    }

    private JsonNode answer(JsonNode request) throws Exception {
        switch (request.get("op").asText()) {
            case "connect": return connect(request);
            case "create_topic": return createTopic(request);
            case "reassign": return reassign(request);
            case "elect_leader": return electLeader(request);
            case "alter_configs": return alterConfigs(request);
            case "describe_topics": return describeTopics();
            case "describe_log_dirs": return describeLogDirs(request);
            case "describe_producers": return describeProducers(request);
            case "produce": return produce(request);
            case "produce_file": return produceFile(request);
            case "transaction": return transaction(request);
            case "send_offsets": return sendOffsets(request);
            case "transaction_states": return transactionStates();
            case "abort_transaction": return abortTransaction(request);
            case "close_producer": return closeProducer(request);
            case "raw_produce": return rawProduce(request);
            case "consume": return consume(request);
            case "restore": return restore(request);
            case "first_from": return firstFrom(request);
            case "offsets": return offsets(request);
            case "offsets_for_times": return offsetsForTimes(request);
            case "commit_offsets": return commitOffsets(request);
            case "committed_offsets": return committedOffsets(request);
            case "delete_records": return deleteRecords(request);
            case "delete_group": return deleteGroup(request);
            default: throw new IllegalArgumentException("unknown op " + request.get("op"));
        }
    }

    private JsonNode connect(JsonNode request) {
        if (admin != null) {
            admin.close(Duration.ZERO);
        }
        bootstrap = request.get("bootstrap").asText();
        Properties settings = new Properties();
        settings.put("bootstrap.servers", bootstrap);
        admin = Admin.create(settings);
        return JSON.getNodeFactory().booleanNode(true);
    }

    private void disconnect() {
        for (KafkaProducer<byte[], byte[]> producer : producers.values()) {
            producer.close(Duration.ZERO);
        }
        if (admin != null) {
            admin.close(Duration.ZERO);
        }
    }

    private JsonNode createTopic(JsonNode request) throws Exception {
        String name = request.get("topic").asText();
        NewTopic topic = request.hasNonNull("brokers")
            ? new NewTopic(name, Map.of(0, integers(request.get("brokers"))))
            : new NewTopic(name, request.get("partitions").asInt(), (short) request.get("replicas").asInt());
        topic.configs(strings(request.get("configs")));
        admin.createTopics(List.of(topic)).all().get();
        return JSON.getNodeFactory().booleanNode(true);
    }

    /** Changes the brokers of a partition; `brokers` begins with the preferred leader. */
    private JsonNode reassign(JsonNode request) throws Exception {
        var target = new NewPartitionReassignment(integers(request.get("brokers")));
        admin.alterPartitionReassignments(Map.of(partition(request), Optional.of(target))).all().get();
        return JSON.getNodeFactory().booleanNode(true);
    }

    private JsonNode electLeader(JsonNode request) throws Exception {
        ElectionType type = request.get("unclean").asBoolean() ? ElectionType.UNCLEAN : ElectionType.PREFERRED;
        admin.electLeaders(type, Set.of(partition(request))).all().get();
        return JSON.getNodeFactory().booleanNode(true);
    }

    private JsonNode alterConfigs(JsonNode request) throws Exception {
        List<AlterConfigOp> changes = new ArrayList<>();
        strings(request.get("configs")).forEach((key, value) ->
            changes.add(new AlterConfigOp(new ConfigEntry(key, value), AlterConfigOp.OpType.SET)));
        ConfigResource topic = new ConfigResource(ConfigResource.Type.TOPIC, request.get("topic").asText());
        Map<ConfigResource, Collection<AlterConfigOp>> all = Map.of(topic, changes);
        admin.incrementalAlterConfigs(all).all().get();
        return JSON.getNodeFactory().booleanNode(true);
    }

    /**
     * All topics, including internal ones: partition count, id, overrides of the topic, and the effective value and the
     * kind of source of each setting.
     */
    private JsonNode describeTopics() throws Exception {
        ObjectNode answer = JSON.createObjectNode();
        var all = new org.apache.kafka.clients.admin.ListTopicsOptions().listInternal(true);
        List<String> names = new ArrayList<>(admin.listTopics(all).names().get());
        Map<String, TopicDescription> topics = admin.describeTopics(names).allTopicNames().get();
        List<ConfigResource> resources = new ArrayList<>();
        names.forEach(name -> resources.add(new ConfigResource(ConfigResource.Type.TOPIC, name)));
        Map<ConfigResource, Config> configs = admin.describeConfigs(resources).all().get();
        for (ConfigResource resource : resources) {
            ObjectNode topic = answer.putObject(resource.name());
            topic.put("partitions", topics.get(resource.name()).partitions().size());
            topic.put("id", topics.get(resource.name()).topicId().toString());
            ArrayNode leaders = topic.putArray("leaders");
            topics.get(resource.name()).partitions().forEach(partition ->
                leaders.add(partition.leader() == null ? -1 : partition.leader().id()));
            topic.put("in_sync", topics.get(resource.name()).partitions().stream()
                .mapToInt(partition -> partition.isr().size()).min().orElse(0));
            ObjectNode overrides = topic.putObject("configs");
            ObjectNode holding = topic.putObject("holding");
            for (ConfigEntry entry : configs.get(resource).entries()) {
                holding.putArray(entry.name()).add(entry.value()).add(entry.source().toString());
                if (entry.source() == ConfigEntry.ConfigSource.DYNAMIC_TOPIC_CONFIG) {
                    overrides.put(entry.name(), entry.value());
                }
            }
        }
        return answer;
    }

    private JsonNode describeLogDirs(JsonNode request) throws Exception {
        ObjectNode answer = JSON.createObjectNode();
        int node = request.get("node").asInt();
        Map<String, LogDirDescription> dirs = admin.describeLogDirs(List.of(node)).allDescriptions().get().get(node);
        dirs.forEach((path, dir) -> {
            ObjectNode one = answer.putObject(path);
            one.put("error", dir.error() == null ? null : dir.error().toString());
            ObjectNode sizes = one.putObject("size_bytes");
            dir.replicaInfos().forEach((partition, info) -> sizes.put(partition.toString(), info.size()));
        });
        return answer;
    }

    private JsonNode describeProducers(JsonNode request) throws Exception {
        TopicPartition partition = partition(request);
        ArrayNode answer = JSON.createArrayNode();
        var states = admin.describeProducers(List.of(partition)).partitionResult(partition).get();
        for (ProducerState state : states.activeProducers()) {
            ObjectNode one = answer.addObject();
            one.put("producer_id", state.producerId());
            one.put("epoch", state.producerEpoch());
            one.put("last_sequence", state.lastSequence());
            one.put("last_timestamp_ms", state.lastTimestamp());
            one.put("transaction_start_offset", state.currentTransactionStartOffset().orElse(-1));
        }
        return answer;
    }

    private JsonNode transactionStates() throws Exception {
        ArrayNode answer = JSON.createArrayNode();
        admin.listTransactions().all().get().forEach(transaction -> answer.add(transaction.state().name()));
        return answer;
    }

    private KafkaProducer<byte[], byte[]> producer(JsonNode request) {
        String name = request.get("producer").asText();
        KafkaProducer<byte[], byte[]> known = producers.get(name);
        if (known != null) {
            return known;
        }
        Properties settings = new Properties();
        settings.put("bootstrap.servers", bootstrap);
        settings.put("client.id", name);
        settings.put("compression.type", request.path("codec").asText("none"));
        settings.put("enable.idempotence", request.path("idempotent").asText("false"));
        settings.put("acks", request.path("acks").asText("all"));
        settings.put("linger.ms", "60000");  // each call writes one batch, because produce() flushes
        settings.put("batch.size", "1000000");
        settings.put("delivery.timeout.ms", "120000");
        if (request.hasNonNull("transactional_id")) {
            settings.put("enable.idempotence", "true");
            settings.put("transactional.id", request.get("transactional_id").asText());
            settings.put("transaction.timeout.ms", request.path("timeout_ms").asText("60000"));
        }
        var made = new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer());
        if (request.hasNonNull("transactional_id")) {
            made.initTransactions();
        }
        producers.put(name, made);
        return made;
    }

    private JsonNode produce(JsonNode request) throws Exception {
        KafkaProducer<byte[], byte[]> producer = producer(request);
        List<Future<RecordMetadata>> sent = new ArrayList<>();
        for (JsonNode record : request.get("records")) {
            Long timestamp = record.hasNonNull("ts") ? record.get("ts").asLong() : null;
            sent.add(producer.send(new ProducerRecord<>(request.get("topic").asText(),
                request.get("partition").asInt(), timestamp, bytes(record.get("k")), bytes(record.get("v")),
                headers(record))));
        }
        producer.flush();
        ArrayNode offsets = JSON.createArrayNode();
        for (Future<RecordMetadata> one : sent) {
            offsets.add(one.get().offset());
        }
        return offsets;
    }

    /** Sends all records of a file with the producer's own partitioner. The file is read before the time is measured. */
    private JsonNode produceFile(JsonNode request) throws Exception {
        List<ProducerRecord<byte[], byte[]>> records = new ArrayList<>();
        try (DataInputStream in = new DataInputStream(new java.io.BufferedInputStream(
                new java.io.FileInputStream(request.get("path").asText()), 1 << 20))) {
            for (int left = in.readInt(); left > 0; left--) {
                long timestamp = in.readLong();
                byte[] key = in.readNBytes(in.readInt());
                byte[] value = in.readNBytes(in.readInt());
                records.add(new ProducerRecord<>(request.get("topic").asText(), null, timestamp, key, value));
            }
        }
        Properties settings = new Properties();
        settings.put("bootstrap.servers", bootstrap);
        settings.put("compression.type", request.get("codec").asText());
        settings.put("batch.size", request.get("batch_bytes").asText());
        settings.put("buffer.memory", "134217728");
        long nanos;
        try (var producer = new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer())) {
            producer.partitionsFor(request.get("topic").asText());
            List<Future<RecordMetadata>> sent = new ArrayList<>(records.size());
            long start = System.nanoTime();
            for (ProducerRecord<byte[], byte[]> record : records) {
                sent.add(producer.send(record));
            }
            producer.flush();
            nanos = System.nanoTime() - start;
            for (Future<RecordMetadata> one : sent) {
                one.get();
            }
        }
        return JSON.getNodeFactory().numberNode(nanos / 1e9);
    }

    private JsonNode transaction(JsonNode request) {
        KafkaProducer<byte[], byte[]> producer = producer(request);
        switch (request.get("step").asText()) {
            case "begin": producer.beginTransaction(); break;
            case "commit": producer.commitTransaction(); break;
            case "abort": producer.abortTransaction(); break;
            default: throw new IllegalArgumentException("unknown step " + request.get("step"));
        }
        return JSON.getNodeFactory().booleanNode(true);
    }

    /** Adds group offsets to the transaction. */
    private JsonNode sendOffsets(JsonNode request) {
        Map<TopicPartition, OffsetAndMetadata> offset =
            Map.of(partition(request), new OffsetAndMetadata(request.get("offset").asLong()));
        producer(request).sendOffsetsToTransaction(offset, new ConsumerGroupMetadata(request.get("group").asText()));
        return JSON.getNodeFactory().booleanNode(true);
    }

    /** Writes an ABORT marker without the coordinator, as `kafka-transactions.sh abort` does. */
    private JsonNode abortTransaction(JsonNode request) throws Exception {
        TopicPartition partition = partition(request);
        long startOffset = request.get("start_offset").asLong();
        var states = admin.describeProducers(List.of(partition)).partitionResult(partition).get();
        for (ProducerState state : states.activeProducers()) {
            if (state.currentTransactionStartOffset().orElse(-1) == startOffset) {
                admin.abortTransaction(new AbortTransactionSpec(partition, state.producerId(),
                    (short) state.producerEpoch(), state.coordinatorEpoch().orElse(0))).all().get();
                return JSON.getNodeFactory().booleanNode(true);
            }
        }
        throw new IllegalArgumentException("no transaction begins at " + startOffset);
    }

    private JsonNode closeProducer(JsonNode request) {
        KafkaProducer<byte[], byte[]> producer = producers.remove(request.get("producer").asText());
        if (producer != null) {
            producer.close(Duration.ofSeconds(10));
        }
        return JSON.getNodeFactory().booleanNode(producer != null);
    }

    /** Sends one batch with the given producer id, epoch and first sequence, without a producer. */
    private JsonNode rawProduce(JsonNode request) throws Exception {
        List<SimpleRecord> records = new ArrayList<>();
        for (JsonNode record : request.get("records")) {
            records.add(new SimpleRecord(record.get("ts").asLong(), bytes(record.get("k")), bytes(record.get("v")),
                headers(record).toArray(new Header[0])));
        }
        String codec = request.path("codec").asText("none");
        MemoryRecords batch = MemoryRecords.withIdempotentRecords(
            Compression.of(CompressionType.forName(codec)).build(), request.get("producer_id").asLong(),
            (short) request.get("epoch").asInt(), request.get("sequence").asInt(),
            records.toArray(new SimpleRecord[0]));
        short version = 8;  // for brokers from 2.4 on; versions after 12 need the topic id
        ProduceRequestData data = new ProduceRequestData().setAcks((short) -1).setTimeoutMs(30000);
        data.topicData().add(new ProduceRequestData.TopicProduceData().setName(request.get("topic").asText())
            .setPartitionData(List.of(new ProduceRequestData.PartitionProduceData()
                .setIndex(request.get("partition").asInt()).setRecords(batch))));
        RequestHeader header = new RequestHeader(ApiKeys.PRODUCE, version, "raw", 1);
        ProduceResponse response = (ProduceResponse) exchange(header,
            new ProduceRequest(data, version).serializeWithHeader(header));
        ProduceResponseData.PartitionProduceResponse answer =
            response.data().responses().iterator().next().partitionResponses().get(0);
        ObjectNode reply = JSON.createObjectNode();
        reply.put("error", Errors.forCode(answer.errorCode()).name());
        reply.put("base_offset", answer.baseOffset());
        reply.put("log_append_time_ms", answer.logAppendTimeMs());
        return reply;
    }

    private AbstractResponse exchange(RequestHeader header, ByteBuffer request) throws Exception {
        String[] address = bootstrap.split(":");
        try (Socket socket = new Socket(address[0], Integer.parseInt(address[1]))) {
            socket.setSoTimeout(60000);
            byte[] framed = new byte[4 + request.remaining()];
            ByteBuffer.wrap(framed).putInt(request.remaining()).put(request.duplicate());
            socket.getOutputStream().write(framed);
            DataInputStream in = new DataInputStream(socket.getInputStream());
            byte[] response = new byte[in.readInt()];
            in.readFully(response);
            return AbstractResponse.parseResponse(ByteBuffer.wrap(response), header);
        }
    }

    private KafkaConsumer<byte[], byte[]> consumer(String group, String isolation) {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", bootstrap);
        settings.put("enable.auto.commit", "false");
        settings.put("auto.offset.reset", "none");
        settings.put("isolation.level", isolation);
        settings.put("exclude.internal.topics", "false");
        settings.put("max.poll.records", "5000");
        settings.put("fetch.max.wait.ms", "20");  // a fetch at the end of a log delays the next seek
        if (group != null) {
            settings.put("group.id", group);
        }
        return new KafkaConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer());
    }

    /** All records of the given partitions up to the log ends at the time of the call. */
    private JsonNode consume(JsonNode request) {
        ArrayNode answer = JSON.createArrayNode();
        String isolation = request.path("isolation").asText("read_uncommitted");
        try (KafkaConsumer<byte[], byte[]> consumer = consumer(null, isolation)) {
            List<TopicPartition> partitions = partitions(request);
            consumer.assign(partitions);
            Map<TopicPartition, Long> ends = consumer.endOffsets(partitions);
            consumer.seekToBeginning(partitions);
            List<TopicPartition> open = new ArrayList<>(partitions);
            long giveUpMs = System.currentTimeMillis() + 120_000;
            while (!open.isEmpty()) {
                for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofMillis(200))) {
                    answer.add(served(record));
                }
                // The position also passes offsets whose records compaction removed, so it can end the loop.
                open.removeIf(partition -> consumer.position(partition) >= ends.get(partition));
                if (System.currentTimeMillis() > giveUpMs) {
                    throw new IllegalStateException("not at the end after 120 s: " + open);
                }
            }
        }
        return answer;
    }

    /** Reads partitions into a map of latest values, as an application restores a table; returns what that took. */
    private JsonNode restore(JsonNode request) {
        Map<ByteBuffer, byte[]> table = new HashMap<>();
        long records = 0;
        long startNs = System.nanoTime();
        try (KafkaConsumer<byte[], byte[]> consumer = consumer(null, request.get("isolation").asText())) {
            List<TopicPartition> partitions = partitions(request);
            consumer.assign(partitions);
            Map<TopicPartition, Long> ends = consumer.endOffsets(partitions);
            consumer.seekToBeginning(partitions);
            List<TopicPartition> open = new ArrayList<>(partitions);
            while (!open.isEmpty()) {
                for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofMillis(200))) {
                    records++;
                    if (record.key() == null) {
                        continue;
                    } else if (record.value() == null) {
                        table.remove(ByteBuffer.wrap(record.key()));
                    } else {
                        table.put(ByteBuffer.wrap(record.key()), record.value());
                    }
                }
                open.removeIf(partition -> consumer.position(partition) >= ends.get(partition));
            }
        }
        ObjectNode answer = JSON.createObjectNode();
        return answer.put("records", records).put("keys", table.size())
            .put("seconds", (System.nanoTime() - startNs) / 1e9);
    }

    private static ArrayNode served(ConsumerRecord<byte[], byte[]> record) {
        ArrayNode one = JSON.createArrayNode();
        one.add(record.topic()).add(record.partition()).add(record.offset()).add(record.timestamp());
        one.add(record.timestampType().toString());
        one.add(text(record.key())).add(text(record.value()));
        ArrayNode headers = one.addArray();
        record.headers().forEach(header -> headers.addArray().add(header.key()).add(text(header.value())));
        return one;
    }

    /** For each requested offset, the offset of the first record that a consumer reads from there, or null. */
    private JsonNode firstFrom(JsonNode request) {
        ArrayNode answer = JSON.createArrayNode();
        TopicPartition partition = partition(request);
        try (KafkaConsumer<byte[], byte[]> consumer = consumer(null, "read_uncommitted")) {
            consumer.assign(List.of(partition));
            long end = consumer.endOffsets(List.of(partition)).get(partition);
            for (JsonNode offset : request.get("offsets")) {
                consumer.seek(partition, offset.asLong());
                Long found = null;
                while (found == null && consumer.position(partition) < end) {
                    for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofMillis(200))) {
                        found = found == null ? record.offset() : found;
                    }
                }
                answer.add(found);
            }
        }
        return answer;
    }

    private JsonNode offsets(JsonNode request) throws Exception {
        ObjectNode answer = JSON.createObjectNode();
        Map<TopicPartition, OffsetSpec> earliest = new HashMap<>();
        Map<TopicPartition, OffsetSpec> latest = new HashMap<>();
        for (TopicPartition partition : partitions(request)) {
            earliest.put(partition, OffsetSpec.earliest());
            latest.put(partition, OffsetSpec.latest());
        }
        boolean committed = request.path("isolation").asText().equals("read_committed");
        var isolation = new ListOffsetsOptions(
            committed ? IsolationLevel.READ_COMMITTED : IsolationLevel.READ_UNCOMMITTED);
        Map<TopicPartition, ListOffsetsResult.ListOffsetsResultInfo> starts = admin.listOffsets(earliest).all().get();
        admin.listOffsets(latest, isolation).all().get().forEach((partition, end) ->
            answer.putArray(partition.toString()).add(starts.get(partition).offset()).add(end.offset()));
        return answer;
    }

    private JsonNode offsetsForTimes(JsonNode request) {
        ArrayNode answer = JSON.createArrayNode();
        TopicPartition partition = partition(request);
        try (KafkaConsumer<byte[], byte[]> consumer = consumer(null, "read_uncommitted")) {
            for (JsonNode timestamp : request.get("timestamps")) {
                OffsetAndTimestamp found =
                    consumer.offsetsForTimes(Map.of(partition, timestamp.asLong())).get(partition);
                if (found == null) {
                    answer.addNull();
                } else {
                    answer.addArray().add(found.offset()).add(found.timestamp());
                }
            }
        }
        return answer;
    }

    private JsonNode commitOffsets(JsonNode request) {
        try (KafkaConsumer<byte[], byte[]> consumer = consumer(request.get("group").asText(), "read_uncommitted")) {
            TopicPartition partition = partition(request);
            consumer.assign(List.of(partition));
            for (JsonNode offset : request.get("offsets")) {
                String note = request.path("note").asText("");
                consumer.commitSync(Map.of(partition, new OffsetAndMetadata(offset.asLong(), note)));
            }
        }
        return JSON.getNodeFactory().booleanNode(true);
    }

    private JsonNode committedOffsets(JsonNode request) throws Exception {
        ObjectNode answer = JSON.createObjectNode();
        String group = request.get("group").asText();
        admin.listConsumerGroupOffsets(group).partitionsToOffsetAndMetadata().get()
            .forEach((partition, offset) -> answer.put(partition.toString(), offset == null ? -1 : offset.offset()));
        return answer;
    }

    private JsonNode deleteRecords(JsonNode request) throws Exception {
        RecordsToDelete before = RecordsToDelete.beforeOffset(request.get("before_offset").asLong());
        admin.deleteRecords(Map.of(partition(request), before)).all().get();
        return JSON.getNodeFactory().booleanNode(true);
    }

    private JsonNode deleteGroup(JsonNode request) throws Exception {
        admin.deleteConsumerGroups(List.of(request.get("group").asText())).all().get();
        return JSON.getNodeFactory().booleanNode(true);
    }

    private static TopicPartition partition(JsonNode request) {
        return new TopicPartition(request.get("topic").asText(), request.get("partition").asInt());
    }

    private static List<TopicPartition> partitions(JsonNode request) {
        List<TopicPartition> all = new ArrayList<>();
        for (JsonNode one : request.get("partitions")) {
            all.add(new TopicPartition(one.get(0).asText(), one.get(1).asInt()));
        }
        return all;
    }

    private static List<Integer> integers(JsonNode array) {
        List<Integer> all = new ArrayList<>();
        array.forEach(number -> all.add(number.asInt()));
        return all;
    }

    private static Map<String, String> strings(JsonNode object) {
        Map<String, String> all = new HashMap<>();
        if (object != null) {
            object.properties().forEach(field -> all.put(field.getKey(), field.getValue().asText()));
        }
        return all;
    }

    private static List<Header> headers(JsonNode record) {
        List<Header> all = new ArrayList<>();
        if (record.has("h")) {
            for (JsonNode header : record.get("h")) {
                all.add(new RecordHeader(header.get(0).asText(), bytes(header.get(1))));
            }
        }
        return all;
    }

    private static byte[] bytes(JsonNode text) {
        return text == null || text.isNull() ? null : DECODER.decode(text.asText());
    }

    private static String text(byte[] bytes) {
        return bytes == null ? null : ENCODER.encodeToString(bytes);
    }
}
