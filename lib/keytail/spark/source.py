"""The former import path of `keytail.source.data_source`, for programs that still use it."""

from keytail.source.data_source import KafkaLogBatchesSource, KafkaLogSource, register

__all__ = ["KafkaLogBatchesSource", "KafkaLogSource", "register"]
