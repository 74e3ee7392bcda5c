"""A Spark Python daemon that has imported keytail, so that its forked workers need not each spend a second on that.

    spark.python.daemon.module  tests.run.preloaded

Spark's own daemon imports nothing, because libraries that start threads may not survive a fork. keytail's libraries
start their threads when they are first used, which is in a worker.
"""

from __future__ import annotations

if __name__ == "__main__":
    import gc

    import pandas  # noqa: F401
    import pyarrow  # noqa: F401
    import pyspark.worker  # noqa: F401
    from pyspark.daemon import manager

    import keytail.compact.worker  # noqa: F401

    # Spark's daemon collects garbage after each task, which takes a tenth of a second with these imports.
    gc.freeze()
    manager()
