package keytail.harness;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.BufferedReader;
import java.io.File;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.reflect.Constructor;
import java.lang.reflect.Executable;
import java.lang.reflect.Field;
import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;
import java.lang.reflect.Proxy;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ScheduledFuture;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.common.utils.Time;

/**
 * The Scala cleaner of Kafka 2.4 to 3.9 in a process with one request and one answer per line. Each request is one round
 * of kafka.log.Cleaner in one partition directory, between the given offsets, at the given time.
 *
 * Classes were moved and constructors got more parameters between those versions. Classes are therefore found by name,
 * and arguments by type.
 */
public final class CleanOnce {
    private static final ObjectMapper MAPPER = new ObjectMapper();
    private static final int SLOT_BYTES = 24;

    private CleanOnce() {
    }

    public static void main(String[] arguments) throws Exception {
        PrintStream out = new PrintStream(new FileOutputStream(FileDescriptor.out), false, "UTF-8");
        System.setOut(System.err);
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        String line;
        while ((line = in.readLine()) != null) {
            ObjectNode answer = MAPPER.createObjectNode();
            try {
                clean(MAPPER.readTree(line), answer);
            } catch (Exception | Error problem) {
                Throwable cause = problem;
                while (cause instanceof InvocationTargetException) {
                    cause = cause.getCause();
                }
                ObjectNode error = answer.putObject("error");
                error.put("class", cause.getClass().getName());
                error.put("message", String.valueOf(cause.getMessage()));
                ArrayNode trace = error.putArray("trace");
                for (StackTraceElement frame : cause.getStackTrace()) {
                    trace.add("  at " + frame);
                }
            }
            answer.putArray("messages");
            out.write(MAPPER.writeValueAsBytes(answer));
            out.write('\n');
            out.flush();
        }
    }

    private static void clean(JsonNode request, ObjectNode answer) throws Exception {
        Time clock = new FixedClock(request.get("clock_ms").asLong());
        List<Object> delayed = new ArrayList<>();
        Object log = log(request, clock, delayed);
        call(log, "updateHighWatermark", request.get("high_watermark").asLong());
        int slots = request.get("map_slots").asInt();
        Object map = made(named("SkimpyOffsetMap"), given(slots * SLOT_BYTES, "MD5"));
        scala.Function1<Object, Object> checkDone = topicPartition -> scala.runtime.BoxedUnit.UNIT;
        Object throttler = made(named("Throttler"), given(Double.MAX_VALUE, 300L, false, "cleaner-io", "bytes", clock));
        Object cleaner = made(
            Class.forName("kafka.log.Cleaner"),
            given(0, map, 262_144, 1_048_588, 0.9, throttler, clock, checkDone));
        Object choice = made(
            Class.forName("kafka.log.LogToClean"),
            given(
                call(log, "topicPartition"), log, request.get("first_dirty_offset").asLong(),
                request.get("first_uncleanable_offset").asLong(), false));
        Object result = call(cleaner, "clean", choice);
        Object stats = call(result, "_2");
        answer.put("end_offset", (Long) call(result, "_1"));
        answer.put("map_max_entries", (int) (slots * 0.9));
        answer.put("map_entries", (Integer) call(map, "size"));
        answer.put("records_read", (Long) call(stats, "messagesRead"));
        answer.put("records_written", (Long) call(stats, "messagesWritten"));
        answer.put("records_without_key", (Long) call(stats, "invalidMessagesRead"));
        call(log, "close");
        for (Object task : delayed) {
            run(task);
        }
    }

    /** Opens the log as a broker does after a clean shutdown. */
    private static Object log(JsonNode request, Time clock, List<Object> delayed) throws Exception {
        Class<?> companion = named("UnifiedLog$", "Log$");
        Method apply = null;
        for (Method method : companion.getMethods()) {
            boolean isLonger = apply == null || method.getParameterCount() > apply.getParameterCount();
            if (method.getName().equals("apply") && isLonger) {
                apply = method;
            }
        }
        Class<?> configs = named("LogConfig");
        Map<String, String> values = new HashMap<>();
        request.get("configs").fields().forEachRemaining(entry -> values.put(entry.getKey(), entry.getValue().asText()));
        Object noOverrides = scala.collection.immutable.Set$.MODULE$.empty();
        Object config = made(configs, given(values, noOverrides, new java.util.HashSet<>()));
        Class<?> scheduler = named("Scheduler");
        int expirationMs = request.get("producer_id_expiration_ms").asInt();
        List<Object> arguments = given(
            new File(request.get("dir").asText()), config, request.get("log_start_offset").asLong(),
            request.get("recovery_point").asLong(), scheduler(scheduler, delayed),
            made(named("BrokerTopicStats"), given(java.util.Optional.empty(), false)), clock,
            made(named("LogDirFailureChannel"), given(10)), scala.Option.empty(), new ConcurrentHashMap<>());
        boolean hasProducerConfig = false;
        for (Class<?> type : apply.getParameterTypes()) {
            if (type.getSimpleName().equals("ProducerStateManagerConfig")) {
                arguments.add(made(type, given(expirationMs, false)));
                hasProducerConfig = true;
            } else if (type.getSimpleName().equals("LogOffsetsListener")) {
                Field none = type.getField("NO_OP_OFFSETS_LISTENER");
                arguments.add(none.get(null));
            }
        }
        // The first number is the expiration of producers, or of transactions if these have a separate argument.
        arguments.addAll(given(hasProducerConfig ? 900_000 : expirationMs, 600_000, true, true, false));
        Object module = companion.getField("MODULE$").get(null);
        return apply.invoke(module, chosen(apply, arguments));
    }

    /** Runs immediate tasks, saves delayed ones, and never runs periodic ones. */
    private static Object scheduler(Class<?> type, List<Object> delayed) {
        Class<?>[] future = {ScheduledFuture.class};
        Object scheduled = Proxy.newProxyInstance(
            CleanOnce.class.getClassLoader(), future, (self, method, arguments) -> method.getName().equals("cancel"));
        return Proxy.newProxyInstance(type.getClassLoader(), new Class<?>[] {type}, (self, method, arguments) -> {
            switch (method.getName()) {
                case "schedule", "scheduleOnce" -> {
                    long delayMs = arguments.length > 2 ? (Long) arguments[2] : 0;
                    long periodMs = arguments.length > 3 ? (Long) arguments[3] : -1;
                    if (periodMs < 0 && delayMs <= 0) {
                        run(arguments[1]);
                    } else if (periodMs < 0) {
                        delayed.add(arguments[1]);
                    }
                    return scheduled;
                }
                case "schedule$default$3" -> {
                    return 0L;
                }
                case "schedule$default$4" -> {
                    return -1L;
                }
                case "schedule$default$5" -> {
                    return TimeUnit.MILLISECONDS;
                }
                case "isStarted" -> {
                    return true;
                }
                default -> {
                    return null;
                }
            }
        });
    }

    private static void run(Object task) {
        if (task instanceof Runnable) {
            ((Runnable) task).run();
        } else {
            ((scala.Function0<?>) task).apply();
        }
    }

    /** Finds a class of Kafka by its name, in its package in this version. */
    private static Class<?> named(String... names) throws ClassNotFoundException {
        String[] packages = {
            "kafka.log.", "kafka.utils.", "kafka.server.", "org.apache.kafka.storage.internals.log.",
            "org.apache.kafka.storage.internals.utils.", "org.apache.kafka.storage.log.metrics.",
            "org.apache.kafka.server.util."};
        for (String name : names) {
            for (String start : packages) {
                try {
                    return Class.forName(start + name);
                } catch (ClassNotFoundException elsewhere) {
                    continue;
                }
            }
        }
        throw new ClassNotFoundException(String.join(", ", names));
    }

    private static List<Object> given(Object... arguments) {
        return new ArrayList<>(List.of(arguments));
    }

    /** Calls the public constructor with the most parameters for which there are arguments. */
    private static Object made(Class<?> type, List<Object> arguments) throws Exception {
        Object[] taken = null;
        Constructor<?> longest = null;
        for (Constructor<?> constructor : type.getConstructors()) {
            Object[] fitting = chosen(constructor, arguments);
            boolean isLonger = longest == null || constructor.getParameterCount() > longest.getParameterCount();
            if (fitting != null && isLonger) {
                longest = constructor;
                taken = fitting;
            }
        }
        if (longest == null) {
            throw new NoSuchMethodException("no constructor of " + type + " for " + arguments);
        }
        return longest.newInstance(taken);
    }

    /** Returns for each parameter the first unused argument of its type; null if an argument is missing. */
    private static Object[] chosen(Executable executable, List<Object> arguments) {
        Object[] left = arguments.toArray();
        Class<?>[] types = executable.getParameterTypes();
        Object[] taken = new Object[types.length];
        for (int i = 0; i < types.length; i++) {
            Class<?> type = boxed(types[i]);
            for (int j = 0; j < left.length && taken[i] == null; j++) {
                if (type.isInstance(left[j])) {
                    taken[i] = left[j];
                    left[j] = null;
                }
            }
            if (taken[i] == null) {
                return null;
            }
        }
        return taken;
    }

    private static Class<?> boxed(Class<?> type) {
        return java.lang.invoke.MethodType.methodType(type).wrap().returnType();
    }

    private static Object call(Object target, String name, Object... arguments) throws Exception {
        for (Method method : target.getClass().getMethods()) {
            if (method.getName().equals(name) && method.getParameterCount() == arguments.length) {
                Object[] fitting = chosen(method, List.of(arguments));
                if (fitting != null) {
                    method.setAccessible(true);
                    return method.invoke(target, fitting);
                }
            }
        }
        throw new NoSuchMethodException(target.getClass() + "." + name);
    }
}
