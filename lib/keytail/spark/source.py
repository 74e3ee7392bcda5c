"""`from keytail.spark.source import register`, which is in `keytail.source.data_source` now."""

from keytail.source.data_source import KafkaLogBatchesSource, KafkaLogSource, register

__all__ = ["KafkaLogBatchesSource", "KafkaLogSource", "register"]
