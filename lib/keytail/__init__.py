"""Offline compaction, indexing and audit of Kafka partition logs, on one host or on Spark.

Start at lib/keytail/README.md.
"""

__version__ = "0.1.0"
