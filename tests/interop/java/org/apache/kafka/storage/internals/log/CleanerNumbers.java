package org.apache.kafka.storage.internals.log;

import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;
import java.util.Optional;

/**
 * The numbers by which Kafka's cleaner selects the range to clean, computed by its own functions. This class is in
 * their package because they are package-private.
 */
public final class CleanerNumbers {
    private static final Method MAX_COMPACTION_DELAY = maxCompactionDelay();

    public final long firstDirtyOffset;
    public final long firstUncleanableDirtyOffset;
    public final boolean forceUpdateCheckpoint;
    public final long compactionDelayMs;

    private CleanerNumbers(LogCleanerManager.OffsetsToClean offsets, long compactionDelayMs) {
        this.firstDirtyOffset = offsets.firstDirtyOffset();
        this.firstUncleanableDirtyOffset = offsets.firstUncleanableDirtyOffset();
        this.forceUpdateCheckpoint = offsets.forceUpdateCheckpoint();
        this.compactionDelayMs = compactionDelayMs;
    }

    public static CleanerNumbers of(UnifiedLog log, Optional<Long> checkpoint, long nowMs) throws Exception {
        LogCleanerManager.OffsetsToClean offsets = LogCleanerManager.cleanableOffsets(log, checkpoint, nowMs);
        try {
            long delay = (long) MAX_COMPACTION_DELAY.invoke(null, log, offsets.firstDirtyOffset(), nowMs);
            return new CleanerNumbers(offsets, delay);
        } catch (InvocationTargetException e) {
            throw e.getCause() instanceof Exception ? (Exception) e.getCause() : e;
        }
    }

    private static Method maxCompactionDelay() {
        try {
            Method method = LogCleanerManager.class.getDeclaredMethod(
                "maxCompactionDelay", UnifiedLog.class, long.class, long.class);
            method.setAccessible(true);
            return method;
        } catch (NoSuchMethodException e) {
            throw new ExceptionInInitializerError(e);
        }
    }

    public static boolean needCompactionNow(LogToClean log) {
        return log.needCompactionNow();
    }
}
