package keytail.harness;

import java.util.function.Supplier;
import org.apache.kafka.common.utils.Time;

/** A clock that changes only when it is set. */
final class FixedClock implements Time {
    private long nowMs;

    FixedClock(long nowMs) {
        this.nowMs = nowMs;
    }

    void set(long ms) {
        nowMs = ms;
    }

    @Override
    public long milliseconds() {
        return nowMs;
    }

    @Override
    public long nanoseconds() {
        return nowMs * 1_000_000L;
    }

    @Override
    public void sleep(long ms) {
        nowMs += ms;
    }

    @Override
    public void waitObject(Object object, Supplier<Boolean> condition, long deadlineMs) {
        throw new UnsupportedOperationException("nothing in the harness waits");
    }
}
