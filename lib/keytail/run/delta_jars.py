"""`python -m keytail.run.delta_jars DIR` downloads Delta's jars into a folder, for hosts that cannot reach Maven.

DIR can then be given to `--delta-jars`; it may also be Spark's own folder of jars, as in conf/Dockerfile. The command
needs Java, pyspark and delta-spark, and access to Maven Central or to the repository whose address follows DIR. With
the further argument `s3a://` it also downloads the jars for tables at such URIs.
"""

from __future__ import annotations

import glob
import os
import shutil
import sys
import tempfile

from keytail.errors import KeytailError
from keytail.run.spark.delta import session_settings
from keytail.run.spark.session import end_jvm, local_session


def fetch(folder: str, repository: str | None = None, *, place: str | None = None) -> list[str]:
    """Download Delta's jars, and those for tables at `place`, into `folder`; return their file names. Jars that are
    among Spark's own are not downloaded. Raises UsageProblem if jars cannot be downloaded."""
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="keytail-jars-") as ivy:
        settings = {**session_settings(None, place=place), "spark.jars.ivy": ivy}
        if repository:
            settings["spark.jars.repositories"] = repository
        try:
            local_session("local[1]", "Delta's jars", settings).stop()
        finally:
            end_jvm()
        jars = glob.glob(os.path.join(glob.escape(ivy), "jars", "*.jar"))
        for jar in jars:
            shutil.copy(jar, folder)
    return sorted(map(os.path.basename, jars))


if __name__ == "__main__":
    try:
        place = next((argument for argument in sys.argv[2:] if argument.endswith("://")), None)
        print(*fetch(*[argument for argument in sys.argv[1:] if argument != place], place=place), sep="\n")
    except KeytailError as problem:
        sys.exit(str(problem))
