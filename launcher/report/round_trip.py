"""Two real ranks on this host that reduce something: shows that ranks can be started and find each other."""

import json
import subprocess
import time
from collections.abc import Mapping

from horovodish.errors import LaunchError
from horovodish.launcher.own_python import ANSWER_SECONDS, answer, module_command, program_command

PROGRAM = """import json, statistics, time
import numpy
import horovodish as hvd

hvd.init()
array, times = numpy.ones(1024, numpy.float32), []
for _ in range(300):
    begin = time.perf_counter()
    total = hvd.allreduce(array, op=hvd.Sum, name="round trip")
    times.append(time.perf_counter() - begin)
if hvd.size() != 2 or total.sum() != 2048:
    raise SystemExit(f"2 ranks were started, but the sum of 1024 ones over {hvd.size()} ranks is {total.sum():g}")
if hvd.rank() == 0:
    print(json.dumps(statistics.median(times)))
"""


def round_trip(environ: Mapping[str, str]) -> str:
    """The time that two ranks need for a small reduction and in all, in words. Blocks for a second or two.

    Raises:
        LaunchError: they could not be started, or did not come to the right result.
    """
    # Here, whatever a scheduler has allocated.
    launcher = module_command("horovodish.launcher", "run", "-np", "2", "--hosts", "localhost:2", "--")
    begin = time.monotonic()
    try:
        done = answer([*launcher, *program_command(PROGRAM)], environ)
    except subprocess.TimeoutExpired as hung:
        raise LaunchError(f"two ranks did not end within {ANSWER_SECONDS} seconds") from hung
    if done.returncode != 0:
        raise LaunchError(f"two ranks failed with exit status {done.returncode}:\n{done.stderr.strip()}")
    seconds = json.loads(done.stdout)
    return f"2 ranks sum 4 KiB in {seconds * 1e6:.0f} us; {time.monotonic() - begin:.1f} s from start to end"
