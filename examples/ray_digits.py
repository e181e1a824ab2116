"""Handwritten digits, learned by ranks in a Ray cluster:  python examples/ray_digits.py

Run it on a machine of the cluster. Without a cluster, Ray starts one on this machine.
"""

import sys

import ray
from digits_by_function import train

from horovodish.ray import RayExecutor


def main(workers):
    ray.init()
    executor = RayExecutor(RayExecutor.create_settings(), num_workers=workers)
    executor.start()
    try:
        accuracies = executor.run(train, kwargs={"epochs": 20})
    finally:
        executor.shutdown()
    print(f"{workers} ranks in Ray, test accuracy of each: {' '.join(f'{each:.4f}' for each in accuracies)}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
