# Read by spark-submit, spark-class and the start scripts of Spark, which export what is set here.

# No module from the current directory, in the Python driver or in what the JVM asks of Python by itself.
PYTHONSAFEPATH=1
