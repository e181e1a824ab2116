"""What we declare of TensorFlow's C interface is what its own headers say, where they are installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import tensorflow as tf

from support.sources import CSRC

OURS = CSRC / "abi/tensorflow.h"
HEADERS = ("kernels.h", "ops.h", "tf_datatype.h", "tf_status.h", "tf_tensor.h")

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine: apt-get install g++")


def complaints(header: str, tmp_path: Path) -> str:
    """What the compiler says of our declarations and TensorFlow's, side by side in one program.

    Two declarations of one C function of different types are an error, and so are two types of one name: ours of a
    struct or an enumeration are renamed, and compared.
    """
    enumerators = re.findall(r"^  (TF_\w+) = \d+,", header, re.MULTILINE)
    types = re.findall(r"^typedef (?:enum|struct) (\w+)", header, re.MULTILINE)
    assert len(enumerators) > 15 and set(types) == {"TF_Code", "TF_DataType", "TF_AllocatorAttributes"}
    definitions = re.findall(r"^typedef (?:enum|struct) .*?^} \w+;\n", header, re.MULTILINE | re.DOTALL)
    without = re.sub(r"^(#pragma once|struct TF_\w+;)$", "", header, flags=re.MULTILINE)
    for definition in definitions:
        without = without.replace(definition, "")
    renamed = "".join(definitions)
    for name in [*enumerators, *types]:
        renamed = re.sub(rf"\b{name}\b", f"Our_{name}", renamed)
    checks = [f"static_assert(int(Our_{name}) == int({name}));" for name in enumerators]
    checks += [f"static_assert(sizeof(Our_{name}) == sizeof({name}));" for name in types]
    source = tmp_path / "compared.cc"
    includes = "\n".join(f'#include "tensorflow/c/{name}"' for name in HEADERS)
    source.write_text(f"{includes}\n{without}\n{renamed}\n" + "\n".join(checks))
    command = ["g++", "-std=c++20", "-fsyntax-only", f"-isystem{tf.sysconfig.get_include()}", str(source)]
    return subprocess.run(command, capture_output=True, text=True).stderr


def test_our_declarations_are_tensorflows(tmp_path: Path) -> None:
    assert complaints(OURS.read_text(), tmp_path) == ""


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("int64_t TF_StepId(", "int TF_StepId("),
        ("TF_BFLOAT16 = 14", "TF_BFLOAT16 = 15"),
        ("size_t struct_size;", "size_t struct_size, another;"),
    ],
)
def test_this_test_sees_differences(right: str, wrong: str, tmp_path: Path) -> None:
    header = OURS.read_text()
    assert right in header
    assert "error" in complaints(header.replace(right, wrong), tmp_path)
