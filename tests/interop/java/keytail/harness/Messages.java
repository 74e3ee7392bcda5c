package keytail.harness;

import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.slf4j.Logger;
import org.slf4j.helpers.FormattingTuple;
import org.slf4j.helpers.MarkerIgnoringBase;
import org.slf4j.helpers.MessageFormatter;

/**
 * The messages that Kafka logged since the last command began, as "LEVEL Class: text": INFO and above, and DEBUG of the
 * loader, which logs at this level which unfinished files it removes.
 */
public final class Messages {
    private static final int LIMIT = 2_000;
    private static final Map<String, Logger> LOGGERS = new ConcurrentHashMap<>();
    private static final List<String> LINES = new ArrayList<>();
    /** False during a benchmark: Kafka then formats no messages, as in a broker with the level WARN. */
    static volatile boolean info = true;

    private Messages() {
    }

    public static Logger logger(String name) {
        return LOGGERS.computeIfAbsent(name, Kept::new);
    }

    static synchronized List<String> drain() {
        List<String> lines = new ArrayList<>(LINES);
        LINES.clear();
        return lines;
    }

    private static synchronized void keep(String level, String name, FormattingTuple text) {
        if (LINES.size() >= LIMIT) {
            return;
        }
        String cause = text.getThrowable() == null ? "" : " [" + text.getThrowable() + "]";
        LINES.add(level + " " + name.substring(name.lastIndexOf('.') + 1) + ": " + text.getMessage() + cause);
    }

    private static final class Kept extends MarkerIgnoringBase {
        private final boolean debug;

        private Kept(String name) {
            this.name = name;
            this.debug = name.endsWith(".LogLoader");
        }

        private void at(String level, String format, Object... arguments) {
            keep(level, name, MessageFormatter.arrayFormat(format, arguments));
        }

        @Override public boolean isTraceEnabled() { return false; }
        @Override public void trace(String text) { }
        @Override public void trace(String format, Object a) { }
        @Override public void trace(String format, Object a, Object b) { }
        @Override public void trace(String format, Object... all) { }
        @Override public void trace(String text, Throwable cause) { }

        @Override public boolean isDebugEnabled() { return debug; }
        @Override public void debug(String text) { if (debug) at("DEBUG", text); }
        @Override public void debug(String format, Object a) { if (debug) at("DEBUG", format, a); }
        @Override public void debug(String format, Object a, Object b) { if (debug) at("DEBUG", format, a, b); }
        @Override public void debug(String format, Object... all) { if (debug) at("DEBUG", format, all); }
        @Override public void debug(String text, Throwable cause) { if (debug) at("DEBUG", text, cause); }

        @Override public boolean isInfoEnabled() { return info; }
        @Override public void info(String text) { if (info) at("INFO", text); }
        @Override public void info(String format, Object a) { if (info) at("INFO", format, a); }
        @Override public void info(String format, Object a, Object b) { if (info) at("INFO", format, a, b); }
        @Override public void info(String format, Object... all) { if (info) at("INFO", format, all); }
        @Override public void info(String text, Throwable cause) { if (info) at("INFO", text, cause); }

        @Override public boolean isWarnEnabled() { return true; }
        @Override public void warn(String text) { at("WARN", text); }
        @Override public void warn(String format, Object a) { at("WARN", format, a); }
        @Override public void warn(String format, Object a, Object b) { at("WARN", format, a, b); }
        @Override public void warn(String format, Object... all) { at("WARN", format, all); }
        @Override public void warn(String text, Throwable cause) { at("WARN", text, cause); }

        @Override public boolean isErrorEnabled() { return true; }
        @Override public void error(String text) { at("ERROR", text); }
        @Override public void error(String format, Object a) { at("ERROR", format, a); }
        @Override public void error(String format, Object a, Object b) { at("ERROR", format, a, b); }
        @Override public void error(String format, Object... all) { at("ERROR", format, all); }
        @Override public void error(String text, Throwable cause) { at("ERROR", text, cause); }
    }
}
