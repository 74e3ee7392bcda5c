"""Adds Spark's own Kafka source to a session, for comparisons with `kafka-log`."""

from __future__ import annotations

from typing import Any

import pyspark

from tests.interop.broker import Broker

# The source and its dependencies, without the token provider: only Kerberos needs it, and not every version of Spark
# has one.
PACKAGES = (
    f"org.apache.spark:spark-sql-kafka-0-10_2.13:{pyspark.__version__}",
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",
    "org.apache.kafka:kafka-clients:3.9.2",
    "org.apache.commons:commons-pool2:2.12.1",
)


def add_kafka_source(spark: Any) -> None:
    for package in PACKAGES:
        spark.sql(f"ADD JAR 'ivy://{package}?transitive=false'").collect()


def from_kafka(spark: Any, broker: Broker, topic: str, **options: object) -> Any:
    source = spark.read.format("kafka").option("kafka.bootstrap.servers", broker.bootstrap).option("subscribe", topic)
    for name, value in options.items():
        source = source.option(name, str(value))
    return source.option("includeHeaders", "true")
