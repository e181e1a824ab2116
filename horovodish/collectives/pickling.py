"""Python objects as bytes: pickle, and cloudpickle for what pickle cannot carry."""

import pickle

__all__ = ["dumps"]


def dumps(value: object) -> bytes:
    """The object as bytes for `pickle.loads`. Not collective.

    Raises:
        pickle.PicklingError: pickle cannot carry the object, and cloudpickle is not installed.
        Exception: neither of them can carry it.
    """
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError) as problem:
        try:
            import cloudpickle  # an extra: the core needs NumPy and mpi4py alone
        except ModuleNotFoundError:
            raise pickle.PicklingError(
                f"{problem}. Lambdas, and functions and classes that are defined within a function, travel where "
                "cloudpickle is installed on every host: pip install cloudpickle"
            ) from problem
        return bytes(cloudpickle.dumps(value, pickle.HIGHEST_PROTOCOL))
