"""How fast one core encodes and decodes each codec:  python benchmarks/codec_speed.py

Figures are of the fastest of 9 rounds. `topk` and `randomk` send 1 % of the values. Needs a C++ compiler. Takes some
seconds after it is compiled.
"""

import subprocess
import tempfile
from pathlib import Path

from machine import command, machine

CSRC = Path(__file__).parent.parent / "horovodish" / "csrc"
MILLIONS, ROUNDS = "16", "9"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder, "codec_speed"))
        sources = [*(CSRC / "arithmetic" / "codecs").glob("*.cc"), CSRC / "arithmetic" / "instructions.cc"]
        options = ["-std=c++20", "-O3", "-ffp-contract=off", f"-I{CSRC}"]
        beside = str(Path(__file__).with_suffix(".cc"))
        subprocess.run(["c++", *options, beside, *map(str, sources), "-o", program], check=True)
        print(
            command(),
            machine(),
            "",
            "codec    B/value   encode   decode and add, GB/s of float32",
            sep="\n",
            flush=True,
        )
        subprocess.run([program, MILLIONS, ROUNDS], check=True)


if __name__ == "__main__":
    main()
