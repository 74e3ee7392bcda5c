# Read by spark-submit, spark-class and Spark's start scripts, which export these variables.

# Keep Python from importing modules from the current directory, in the driver and in the Python that the JVM starts.
PYTHONSAFEPATH=1
