"""python tests/fuzz/run.py TARGET [OPTIONS OF LIBFUZZER]: lets atheris choose the bytes for a target of targets.py."""

import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[1]))
with atheris.instrument_imports(include=["horovodish", "yaml"]):
    from fuzz.targets import SEEDS, TARGETS


def main() -> None:
    name = sys.argv.pop(1)
    corpus = Path("build/fuzz", name)
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(SEEDS[name]):
        (corpus / f"seed-{number}").write_bytes(seed)
    atheris.Setup([*sys.argv, f"-artifact_prefix=build/fuzz/{name}-", str(corpus)], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
