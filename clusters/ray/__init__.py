"""Ranks in a Ray cluster: `RayExecutor` calls functions on ranks that actors start."""

if __name__ != "horovodish.ray":
    raise ImportError("import this package as horovodish.ray")

from horovodish.ray.executor import RayExecutor, RaySettings

__all__ = ["RayExecutor", "RaySettings"]
