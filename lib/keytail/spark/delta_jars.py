"""The former module name of `python -m keytail.run.delta_jars DIR`: `python -m keytail.spark.delta_jars DIR`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("keytail.run.delta_jars", run_name="__main__", alter_sys=True)
