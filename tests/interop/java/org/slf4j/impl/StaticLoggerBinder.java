package org.slf4j.impl;

import keytail.harness.Messages;
import org.slf4j.ILoggerFactory;
import org.slf4j.spi.LoggerFactoryBinder;

/** Binds SLF4J to {@link Messages}, so that the answer contains Kafka's log messages. */
public final class StaticLoggerBinder implements LoggerFactoryBinder {
    public static final String REQUESTED_API_VERSION = "1.7.36";
    private static final StaticLoggerBinder SINGLETON = new StaticLoggerBinder();

    public static StaticLoggerBinder getSingleton() {
        return SINGLETON;
    }

    @Override
    public ILoggerFactory getLoggerFactory() {
        return Messages::logger;
    }

    @Override
    public String getLoggerFactoryClassStr() {
        return Messages.class.getName();
    }
}
