"""Runs a benchmark on two hosts:  python benchmarks/two_hosts.py [--gbit RATE] RANKS_PER_HOST benchmarks/NAME.py ...

The hosts are network namespaces of this machine, joined by a virtual link, so that their ranks speak over TCP as those
of two machines do. Needs root and iproute2.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.hosts import Hosts, hosts, limit_links, why_there_are_no_hosts
from support.mpi_command import mpi_environment

END_SECONDS = 20


def run(on: Hosts, ranks_per_host: int, program: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        environment = {**mpi_environment(), "GLOO_SOCKET_IFNAME": "e0", "TMPDIR": folder}
        command = on.command([ranks_per_host] * on.count, survivors=False)
        job = subprocess.Popen([*command, sys.executable, *program], env=environment, stdin=subprocess.DEVNULL)
        try:
            return job.wait()
        except KeyboardInterrupt:
            job.terminate()  # so that mpirun ends the ranks of both hosts
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(END_SECONDS)
            raise
        finally:
            job.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gbit", type=float, help="gigabits that a host can send in a second; no limit without")
    parser.add_argument("ranks_per_host", type=int)
    parser.add_argument("program", nargs=argparse.REMAINDER, help="the benchmark and its arguments")
    options = parser.parse_args()
    reason = why_there_are_no_hosts()
    if reason:
        sys.exit(f"two_hosts.py: no hosts can be made here: {reason}")
    with hosts(2) as on:
        if options.gbit:
            limit_links(on, options.gbit)
        print(f"{os.path.relpath(sys.argv[0])} {' '.join(sys.argv[1:])}", flush=True)
        sys.exit(run(on, options.ranks_per_host, options.program))


if __name__ == "__main__":
    main()
