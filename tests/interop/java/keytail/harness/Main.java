package keytail.harness;

import com.fasterxml.jackson.core.StreamReadConstraints;
import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;

/**
 * Kafka's storage classes in a process: each line of input and of output is one JSON object, in order.
 * An exception becomes an answer with "error". Only a broken pipe or the end of the JVM ends the loop.
 */
public final class Main {
    private static final ObjectMapper MAPPER = new ObjectMapper();

    private Main() {
    }

    public static void main(String[] arguments) throws Exception {
        PrintStream out = new PrintStream(new java.io.FileOutputStream(java.io.FileDescriptor.out), false, "UTF-8");
        System.setOut(System.err);
        MAPPER.getFactory().setStreamReadConstraints(
            StreamReadConstraints.builder().maxStringLength(Integer.MAX_VALUE).build());
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8), 1 << 16);
        String line;
        while ((line = in.readLine()) != null) {
            out.write(MAPPER.writeValueAsBytes(answer(MAPPER.readTree(line))));
            out.write('\n');
            out.flush();
        }
    }

    private static ObjectNode answer(JsonNode request) {
        ObjectNode answer = MAPPER.createObjectNode();
        Messages.drain();
        try {
            dispatch(request, answer);
        } catch (Exception | Error e) {
            ObjectNode error = answer.putObject("error");
            error.put("class", e.getClass().getName());
            error.put("message", String.valueOf(e.getMessage()));
            ArrayNode causes = error.putArray("trace");
            for (Throwable cause = e; cause != null; cause = cause.getCause()) {
                causes.add(cause.toString());
                for (StackTraceElement frame : cause.getStackTrace()) {
                    causes.add("  at " + frame);
                }
            }
        }
        ArrayNode messages = answer.putArray("messages");
        Messages.drain().forEach(messages::add);
        return answer;
    }

    private static void dispatch(JsonNode request, ObjectNode answer) throws Exception {
        String command = request.get("command").asText();
        switch (command) {
            case "ping" -> answer.put("pong", true);
            case "halt" -> Runtime.getRuntime().halt(3);
            case "append" -> Append.run(request, answer);
            case "append_watched" -> Watched.run(request, answer);
            case "clean" -> Clean.clean(request, answer);
            case "cleanable" -> Clean.cleanable(request, answer);
            case "expire" -> Expire.run(request, answer);
            case "load" -> Load.run(request, answer);
            case "recover" -> Recover.run(request, answer);
            case "lock" -> LogDirs.lock(request, answer);
            case "unlock" -> LogDirs.unlock(request, answer);
            case "read_checkpoint" -> LogDirs.readCheckpoint(request, answer);
            case "write_checkpoint" -> LogDirs.writeCheckpoint(request, answer);
            case "legacy_build" -> Legacy.build(request, answer);
            case "legacy_read" -> Legacy.read(request, answer);
            case "encode" -> Encode.encode(request, answer);
            case "decode" -> Encode.decode(request, answer);
            case "murmur2" -> Encode.murmur2(request, answer);
            case "dump" -> org.apache.kafka.tools.Dump.run(request, answer);
            case "bench_generate" -> Bench.generate(request, answer);
            case "bench_clean" -> Bench.clean(request, answer);
            case "bench_recover" -> Bench.recover(request, answer);
            default -> throw new IllegalArgumentException("unknown command " + command);
        }
    }
}
