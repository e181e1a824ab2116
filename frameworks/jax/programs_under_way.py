"""The engine does not stop before the programs end that JAX has dispatched. JAX returns from a call before they do."""

from __future__ import annotations

import contextlib
import time

import jax
from jax._src import xla_bridge

from horovodish.runtime import basics

_NAP_SECONDS = 0.002


@jax.jit
def _last_program(x: jax.Array) -> jax.Array:
    return x + 1


def _finish() -> list[str]:
    held: list[str] = []
    if not xla_bridge.backends_are_initialized():
        return held
    # A device runs the programs of a thread in order, so that this thread's have ended when one more has. Programs of
    # other threads count as long as somebody holds their results.
    last: list[jax.Array] = []
    for device in jax.local_devices():
        with contextlib.suppress(RuntimeError):  # the device has failed
            last.append(_last_program(jax.device_put(0, device)))
    for array in [*last, *jax.live_arrays()]:
        try:
            while not array.is_ready():
                time.sleep(_NAP_SECONDS)  # and not in native code, where Ctrl-C does not interrupt the wait
            array.block_until_ready()
        except (RuntimeError, ValueError) as error:  # it was deleted meanwhile, or its program has failed
            held.append(str(error))
    return held


basics.follow(finish=_finish)
