"""Checks URIs of tables, such as s3a://bucket/lake, and determines which jars and settings Spark needs for a URI.

Only Spark accesses remote URIs: its configuration and environment have the credentials, and Delta commits by the rules
of the store. Spark contains the connector for hdfs://; guide/tables-in-object-stores.md names those for other stores.
"""

from __future__ import annotations

import glob
import os
import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from keytail.acting_user import as_caller
from keytail.errors import KeytailError, UsageProblem
from keytail.run.ended import first_line
from keytail.run.spark.s3_commits import commit_conditionally

_URI = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*):/")
# Hadoop's connectors (Maven artifacts), by the scheme of the URIs.
_ARTIFACTS = {"s3a": "hadoop-aws", "abfss": "hadoop-azure", "abfs": "hadoop-azure", "gs": "hadoop-gcp"}
# By the version of Hadoop: the version of the AWS SDK with which its hadoop-aws was built.
_AWS_SDK = {"3.5.0": "2.35.4"}
_AWS_MODULES = ("s3", "s3-transfer-manager", "sts")
# Packages that are not downloaded. The bundle is the whole AWS SDK (600 MB), of which only modules (10 MB) are needed;
# Spark contains the other packages.
_NOT_FETCHED = (
    "software.amazon.awssdk:bundle",
    "org.wildfly.openssl:wildfly-openssl",
    "io.netty:*",
    "org.apache.httpcomponents:*",
    "commons-codec:commons-codec",
    "commons-logging:commons-logging",
    "org.slf4j:slf4j-api",
)
# The default stream since Hadoop 3.5 ends a read after 30 s with an error, and prints a stack trace for each retry.
_S3A = {"spark.hadoop.fs.s3a.input.stream.type": "classic"}


@dataclass(frozen=True)
class Connector:
    """The packages, excluded dependencies (both as Maven coordinates) and settings that a session needs for URIs of
    `scheme`. `jar` is the beginning of the file name of the connector's jar."""

    scheme: str = ""
    jar: str = ""
    packages: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)


def is_uri(place: str) -> bool:
    """Return whether `place` is a URI such as s3a://bucket/ledger or file:///ledger, and not a path on this host."""
    return _URI.match(place) is not None


def scheme_of(uri: str) -> str:
    """Return the scheme of a URI, in lower case; "" for a path."""
    found = _URI.match(uri)
    return found[1].lower() if found else ""


def local_path(place: str) -> str | None:
    """Return the path on this host if `place` is a path or a file URI; None for other URIs."""
    if scheme_of(place) in ("", "file"):
        return unquote(urlsplit(place).path) if is_uri(place) else place
    return None


def is_remote(place: str) -> bool:
    """Return whether `place` is a URI other than a file URI, which only Spark can access."""
    return local_path(place) is None


def checked_uri(uri: str, flag: str) -> str:
    """Return the URI without trailing slashes. Raises UsageProblem if the URI contains options, contains or may contain
    credentials, or has the scheme s3 or s3n."""
    refuse_credentials(uri, flag)
    scheme = scheme_of(uri)
    if scheme in ("s3", "s3n"):
        raise UsageProblem(
            f"{flag} begins with {scheme}://, for which Spark has no connector",
            remedy="Give the URI as s3a://BUCKET/PATH, for which Spark has a connector",
            slug="unsupported-uri",
        )
    if "?" in uri or "#" in uri:
        raise UsageProblem(
            f"the URI of {flag} has options after a ? or #",
            remedy="Remove the options, and set Spark's settings for the store, such as spark.hadoop.fs.s3a.endpoint",
            slug="unsupported-uri",
        )
    return uri.rstrip("/")


def refuse_credentials(uri: str, flag: str) -> None:
    """Raise UsageProblem if the URI contains or may contain credentials. Do nothing for a path. `flag` is the name of
    the flag or argument."""
    scheme = scheme_of(uri)
    refuse_slash_in_password(uri, flag)
    user, at, _ = uri.partition("://")[2].partition("@")
    is_container = scheme.startswith(("abfs", "wasb")) and ":" not in user
    if at and not is_container and ("/" not in user or (scheme == "s3a" and ":" in user)):
        raise UsageProblem(
            f"the URI of {flag} contains credentials",
            remedy="Remove the credentials from the URI, and give them in the environment or in Spark's configuration "
            "(guide/tables-in-object-stores.md)",
            slug="credentials-in-uri",
        )


def refuse_slash_in_password(uri: str, flag: str) -> None:
    """Raise UsageProblem if the first "/" after the scheme may be in a password, also in one such as `12/x`: if there
    is a ":" before it, and an "@" only after it. Every program takes the password for a port and a path, and shows it.
    """
    host, _, path = uri.partition("://")[2].partition("/")
    if ":" in host and "@" not in host and "@" in path:
        raise UsageProblem(
            f"the URI of {flag} may contain a password: an @ follows a : and a /",
            remedy="Remove credentials from the URI, and give them in the environment or in Spark's configuration. If "
            "the @ is part of the path, omit the port",
            slug="credentials-in-uri",
        )


def connector_for(place: str | None) -> Connector:
    """Return the connector that a session started by keytail needs for `place`; it has packages only for s3a URIs."""
    scheme = scheme_of(place or "")
    if scheme != "s3a":
        return Connector(scheme)
    artifact, hadoop = _ARTIFACTS[scheme], hadoop_version()
    connector, sdk = f"org.apache.hadoop:{artifact}:{hadoop}", _AWS_SDK.get(hadoop)
    if sdk is None:  # hadoop-aws is downloaded with all its dependencies, including the bundle
        return Connector(scheme, artifact, (connector,), (), _S3A)
    modules = (f"software.amazon.awssdk:{name}:{sdk}" for name in _AWS_MODULES)
    return Connector(scheme, artifact, (connector, *modules), _NOT_FETCHED, _S3A)


def hadoop_version() -> str:
    """Return the version of Hadoop's client that Spark contains; "" if the version is unknown."""
    found = jars_of_spark("hadoop-client-api-*.jar")
    return os.path.basename(found[0]).removeprefix("hadoop-client-api-").removesuffix(".jar") if found else ""


@as_caller()
def jars_of_spark(pattern: str) -> list[str]:
    """Return the paths of Spark's own jars whose names match the pattern."""
    home = os.environ.get("SPARK_HOME")
    if home is None:
        import pyspark  # noqa: PLC0415 (a start without Delta does not pay for it)

        home = os.path.dirname(pyspark.__file__)
    return sorted(glob.glob(os.path.join(glob.escape(home), "jars", pattern)))


@as_caller()
def require_store(spark: Any, place: str, *, writes: bool = False) -> None:
    """Raise UsageProblem if the session has no connector for `place`, a directory of tables.

    If the session `writes` tables to S3, its commits become conditional: UsageProblem is also raised if the server
    ignores conditions, and KeytailError if writing to the store fails. In all other cases no request is sent.
    """
    if not is_remote(place):
        return
    context = spark.sparkContext
    try:
        context._jvm.org.apache.hadoop.fs.Path(place).getFileSystem(context._jsc.hadoopConfiguration())
    except Exception as problem:
        raise _no_connector(scheme_of(place), first_line(problem)) from problem
    if not writes or scheme_of(place) != "s3a":
        return
    try:
        commit_conditionally(spark, place)
    except KeytailError:
        raise
    except Exception as problem:
        raise KeytailError(
            f"writing to the store failed: {first_line(problem)}",
            path=place,
            remedy="Check the URI, the store, the network and the credentials, then run again",
            slug="store-not-writable",
        ) from problem


def _no_connector(scheme: str, problem: str) -> UsageProblem:
    known = scheme in _ARTIFACTS
    connector = f"org.apache.hadoop:{_ARTIFACTS[scheme]}:{hadoop_version()}" if known else "a connector for it"
    return UsageProblem(
        f"Spark cannot access {scheme}://: {problem}",
        remedy=f"Check the URI and the store's settings. If Spark lacks the connector, pass {connector} and its "
        "dependencies as --packages or --jars of spark-submit, or add these jars to the directory of --delta-jars",
        slug="store-not-accessible",
    )
