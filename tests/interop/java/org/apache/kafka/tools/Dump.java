package org.apache.kafka.tools;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.ByteArrayOutputStream;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;

/** Runs DumpLogSegments like its command line, and returns both output streams, the exit status and the seconds. */
public final class Dump {
    private Dump() {
    }

    public static void run(JsonNode request, ObjectNode answer) throws Exception {
        List<String> arguments = new ArrayList<>();
        request.get("arguments").forEach(argument -> arguments.add(argument.asText()));
        PrintStream out = System.out;
        PrintStream err = System.err;
        ByteArrayOutputStream outBytes = new ByteArrayOutputStream();
        ByteArrayOutputStream errBytes = new ByteArrayOutputStream();
        JsonNode target = request.get("out");
        // Like the System.out of a JVM: buffered, and flushed by every println.
        try (PrintStream toFile = target == null ? null : new PrintStream(
                new java.io.BufferedOutputStream(new java.io.FileOutputStream(target.asText()), 8192), true)) {
            System.setOut(toFile != null ? toFile : new PrintStream(outBytes, true, StandardCharsets.UTF_8));
            System.setErr(new PrintStream(errBytes, true, StandardCharsets.UTF_8));
            long start = System.nanoTime();
            int status = 0;
            try {
                DumpLogSegments.main(arguments.toArray(new String[0]));
            } catch (Exception | Error e) { // like a JVM when main throws
                e.printStackTrace();
                status = 1;
            }
            System.out.flush();
            answer.put("status", status);
            answer.put("seconds", (System.nanoTime() - start) / 1e9);
        } finally {
            System.setOut(out);
            System.setErr(err);
        }
        answer.put("out", outBytes.toString(StandardCharsets.UTF_8));
        answer.put("err", errBytes.toString(StandardCharsets.UTF_8));
    }
}
