"""As pyspark_kafka_log, for `format("kafka-log-batches")`."""

from keytail.source.data_source import KafkaLogBatchesSource as DefaultSource

__all__ = ["DefaultSource"]
