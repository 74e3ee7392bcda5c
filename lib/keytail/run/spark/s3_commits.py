"""Lets Delta commit to s3a:// with conditional requests, so that no commit is lost if several drivers write.

Delta 4.4 checks that a commit does not exist, and then writes the commit with a call that S3A 3.5 never makes
conditional, with any settings. S3A makes conditional requests for files that its file builder creates, which
ConditionalLogStore.java uses. The driver compiles that class with Janino, which is one of Spark's jars, so keytail
needs no jar of its own.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

from keytail.errors import UsageProblem
from keytail.run.ended import text_of

LOG_STORE = "keytail.ConditionalLogStore"
_SOURCE = Path(__file__).with_name("ConditionalLogStore.java")
_KEY, _KEY_OF_ALL = "spark.delta.logStore.s3a.impl", "spark.delta.logStore.class"
_CONDITIONAL = "fs.option.create.conditional.overwrite"
PROBE = ".keytail-conditional-writes"


def commit_conditionally(spark: Any, uri: str) -> None:
    """Let Delta in this session commit to s3a:// conditionally, unless Spark's configuration names a log store. `uri`
    is the directory of the tables. Raises UsageProblem if the server ignores conditions.

    The object PROBE in that directory is not removed: as long as it exists, one request is enough for the check.
    """
    known = spark.sparkContext.getConf()
    if known.get(_KEY, LOG_STORE) != LOG_STORE or known.get(_KEY_OF_ALL):
        return
    if not known.get(_KEY):
        _add_log_store(spark.sparkContext)
        spark.sparkContext._jsc.sc().conf().set(_KEY, LOG_STORE)  # Delta reads this configuration
        # Delta's cache may have tables with the default log store.
        spark.sparkContext._jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()
    if _creates(spark, f"{uri}/{PROBE}") and _creates(spark, f"{uri}/{PROBE}"):
        raise UsageProblem(
            "the S3 server ignores the header If-None-Match of PUT requests: if two runs wrote at the same time, "
            "commits would be lost",
            path=uri,
            remedy=f"Use a server that supports conditional writes. If only one run at a time writes, set {_KEY} to "
            "io.delta.storage.S3SingleDriverLogStore in Spark's configuration",
            slug="store-without-conditional-writes",
        )


def _add_log_store(context: Any) -> None:
    """Compile the class of the log store, and add it to the classes of the driver and of the executors."""
    java = context._jvm.java
    loader = java.lang.Thread.currentThread().getContextClassLoader()
    compiler = context._jvm.org.codehaus.janino.SimpleCompiler()
    compiler.setParentClassLoader(loader)
    compiler.cook(_SOURCE.read_text())
    jar = os.path.join(context._temp_dir, "keytail-log-store.jar")
    with zipfile.ZipFile(jar, "w") as file:
        for name, code in compiler.getBytecodes().items():
            file.writestr(f"{name.replace('.', '/')}.class", bytes(code))
    loader.addURL(java.io.File(jar).toURI().toURL())
    context._jsc.addJar(jar)


def _creates(spark: Any, uri: str) -> bool:
    """Send a conditional request to create an empty object. Return True if the server accepts the request, and False if
    it refuses because the object exists."""
    path = spark.sparkContext._jvm.org.apache.hadoop.fs.Path(uri)
    store = path.getFileSystem(spark.sparkContext._jsc.hadoopConfiguration())
    try:
        store.createFile(path).must(_CONDITIONAL, True).build().close()
    except Exception as problem:
        if "RemoteFileChangedException" in text_of(problem):
            return False
        raise
    return True
