"""Ranks in a Spark cluster: `run()` calls a function on ranks that the tasks of a Spark job start."""

if __name__ != "horovodish.spark":
    raise ImportError("import this package as horovodish.spark")

from horovodish.spark.run_function import run

__all__ = ["run"]
