"""Offline compaction, indexing and audit of Kafka partition logs, on one host or on Spark.

The interface for programs is `keytail.api`; every other module is private. Start at lib/keytail/README.md.
"""

__version__ = "0.1.0"
