package keytail.harness;

import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Delayed;
import java.util.concurrent.ScheduledFuture;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.server.util.Scheduler;

/**
 * Runs Kafka's immediate tasks in the thread of the caller, saves delayed ones (unlinking `.deleted` files) until
 * {@link #runDelayed}, and never runs periodic ones.
 */
final class DirectScheduler implements Scheduler {
    private final List<Runnable> delayed = new ArrayList<>();

    @Override
    public ScheduledFuture<?> schedule(String name, Runnable task, long delayMs, long periodMs) {
        if (periodMs < 0 && delayMs <= 0) {
            task.run();
        } else if (periodMs < 0) {
            delayed.add(task);
        }
        return new Handle();
    }

    void runDelayed() {
        while (!delayed.isEmpty()) {
            List<Runnable> now = new ArrayList<>(delayed);
            delayed.clear();
            now.forEach(Runnable::run);
        }
    }

    @Override
    public void startup() {
    }

    @Override
    public void shutdown() {
    }

    @Override
    public void resizeThreadPool(int size) {
    }

    private static final class Handle extends CompletableFuture<Object> implements ScheduledFuture<Object> {
        @Override
        public long getDelay(TimeUnit unit) {
            return 0;
        }

        @Override
        public int compareTo(Delayed other) {
            return 0;
        }
    }
}
