"""All-reduce calls between two hosts, ours beside mpi4py and gloo:  python benchmarks/two_hosts.py

The hosts are network namespaces of this machine, joined by a virtual link, so that their ranks speak over TCP as those
of two machines do. Runs allreduce.py with one rank on each host and then with two, all contenders over the same link.
Needs root and iproute2. Takes two minutes on 2 cores.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from support.hosts import Hosts, hosts, why_there_are_no_hosts  # noqa: E402
from support.mpi_command import mpi_environment  # noqa: E402

SIZES = [4, 4 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20]


def run(on: Hosts, ranks_per_host: int, options: argparse.Namespace) -> None:
    arguments = ["--rounds", str(options.rounds), "--sizes", *map(str, options.sizes)]
    for name in ("csv", "plot"):
        path = getattr(options, name)
        if path:
            arguments += [f"--{name}", str(path.with_stem(f"{path.stem}-{ranks_per_host}-per-host"))]
    program = [sys.executable, str(HERE / "allreduce.py"), *arguments]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**mpi_environment(), "GLOO_SOCKET_IFNAME": "e0", "TMPDIR": folder}
        command = on.command([ranks_per_host] * on.count, survivors=False)
        subprocess.run([*command, *program], env=environment, check=True, stdin=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="blocks of each contender and size")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of the tensors")
    parser.add_argument("--ranks-per-host", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--csv", type=Path, help="writes the figures to files of this name, one for each number of ranks"
    )
    parser.add_argument("--plot", type=Path, help="draws them likewise, as PNG")
    options = parser.parse_args()
    reason = why_there_are_no_hosts()
    if reason:
        sys.exit(f"two_hosts.py: no hosts can be made here: {reason}")
    with hosts(2) as on:
        for ranks_per_host in options.ranks_per_host:
            print(f"{os.path.relpath(sys.argv[0])}: two hosts, {ranks_per_host} rank(s) on each", flush=True)
            run(on, ranks_per_host, options)


if __name__ == "__main__":
    main()
