"""Handwritten digits, learned by ranks in a Spark cluster:  spark-submit examples/spark_digits.py

With `python` instead of `spark-submit`, Spark starts on this machine.
"""

import sys

from digits_by_function import train
from pyspark.sql import SparkSession

import horovodish.spark


def main(tasks):
    spark = SparkSession.builder.appName("digits").getOrCreate()
    accuracies = horovodish.spark.run(train, kwargs={"epochs": 20}, num_proc=tasks)
    spark.stop()
    print(f"{tasks} ranks in Spark, test accuracy of each: {' '.join(f'{each:.4f}' for each in accuracies)}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
