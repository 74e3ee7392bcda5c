"""A job for a test: prints the settings of a submitted session and, for each given key, whether Spark knows it and the
value that Spark reads. Run it with `spark-submit ... print_settings.py KEY...`.
"""

from __future__ import annotations

import json
import sys

from keytail.run.spark.session import submitted_session


def main() -> None:
    spark = submitted_session()
    context = spark.sparkContext
    jvm, known = context._jvm, {}
    for module in ("internal.config.UI", "internal.config.Python", "deploy.yarn.config.package", "deploy.k8s.Config"):
        jvm.java.lang.Class.forName(f"org.apache.spark.{module}$")  # keys are known once their module is loaded
    for key in sys.argv[1:]:
        entry = jvm.org.apache.spark.internal.config.ConfigEntry.findEntry(key)
        known[key] = entry is not None and str(context._jsc.sc().conf().get(entry))
    print(json.dumps({"settings": dict(context.getConf().getAll()), "known": known}))
    spark.stop()


if __name__ == "__main__":
    main()
