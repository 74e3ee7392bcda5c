"""As pyspark_kafka_log, for `format("kafka-log-batches")`."""

from keytail.spark.source import KafkaLogBatchesSource as DefaultSource

__all__ = ["DefaultSource"]
