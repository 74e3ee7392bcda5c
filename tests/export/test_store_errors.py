"""What a failed export into an object store reports, from the texts of Spark's errors."""

from __future__ import annotations

import pytest

from keytail.export.formats import Formats
from keytail.export.on_spark import _problem_of

NO_SERVER = """An error occurred while calling o88.save.
: org.apache.spark.SparkException: Job aborted.
	at org.apache.hadoop.fs.s3a.S3AFileSystem.create(S3AFileSystem.java:1)
Caused by: org.apache.hadoop.fs.s3a.AWSClientIOException: PUT on s3a://lake/t: SdkClientException: Connect to 127.0.0.1
"""
NO_NAMENODE = """An error occurred while calling o88.execute.
: java.io.EOFException: End of File Exception between local host is: "a/127.0.0.1"; destination host is: "b":8020; : \
java.io.EOFException; For more details see:  http://wiki.apache.org/hadoop/EOFException
	at org.apache.hadoop.ipc.Client.call(Client.java:1)
"""
A_KILLED_WORKER = ": org.apache.spark.SparkException: Python worker exited unexpectedly (crashed)\njava.io.EOFException"


def report(text: str, path: str) -> tuple[str, str]:
    number, problem = _problem_of(Exception(text), Formats(), path)
    assert number is None
    return problem.slug, str(problem)


def test_an_error_of_the_store_is_named() -> None:
    slug, text = report(NO_SERVER, "s3a://lake/t")
    assert slug == "table-not-written"
    assert "Caused by: org.apache.hadoop.fs.s3a.AWSClientIOException: PUT on s3a://lake/t" in text
    assert "run again" in text


def test_a_lost_namenode_is_not_reported_as_a_killed_worker() -> None:
    slug, text = report(NO_NAMENODE, "hdfs://b:8020/lake/t")
    assert slug == "table-not-written"
    assert 'destination host is: "b":8020' in text


@pytest.mark.parametrize(("text", "path"), [(A_KILLED_WORKER, "s3a://lake/t"), (NO_SERVER, "/lake/t")])
def test_other_errors_are_reported_as_for_a_directory(text: str, path: str) -> None:
    assert report(text, path)[0] != "table-not-written"
