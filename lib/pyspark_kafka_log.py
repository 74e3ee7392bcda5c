"""Spark looks into modules named pyspark_* for data sources: with this one `format("kafka-log")` needs no set-up."""

from keytail.source.data_source import KafkaLogSource as DefaultSource

__all__ = ["DefaultSource"]
