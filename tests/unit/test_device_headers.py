"""What we declare of CUDA and NCCL beside their own headers and NCCL's own library, where those are installed."""

from __future__ import annotations

import glob
import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.pretended_gpu import library
from support.sources import CSRC

PREAMBLE = """
#include <cstddef>
#include <string_view>
#include <type_traits>
#define SAME(ours, theirs) static_assert(static_cast<long>(ours) == static_cast<long>(theirs))
template <class Ours, class Theirs> struct Alike : std::false_type {};
template <class R, class... A, class S, class... B>
struct Alike<R (*)(A...), S (*)(B...)>
    : std::bool_constant<((sizeof(A) == sizeof(B)) && ... && (sizeof(R) == sizeof(S)))> {};
#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)
"""

NCCL = """
#define __CUDA_BF16_TYPES_EXIST__  // as CUDA's headers do, for an old one
#include "nccl.h"
#include "abi/nccl.h"
using namespace horovodish::abi;
SAME(NcclResult::success, ncclSuccess);
SAME(NcclResult::in_progress, ncclInProgress);
SAME(NcclType::int8, ncclInt8);
SAME(NcclType::uint8, ncclUint8);
SAME(NcclType::int32, ncclInt32);
SAME(NcclType::int64, ncclInt64);
SAME(NcclType::float16, ncclFloat16);
SAME(NcclType::float32, ncclFloat32);
SAME(NcclType::float64, ncclFloat64);
SAME(NcclType::bfloat16, ncclBfloat16);
SAME(NcclOp::sum, ncclSum);
SAME(NcclOp::product, ncclProd);
SAME(NcclOp::max, ncclMax);
SAME(NcclOp::min, ncclMin);
SAME(NcclOp::average, ncclAvg);
SAME(kNcclScalarHostImmediate, ncclScalarHostImmediate);
SAME(sizeof(NcclUniqueId), sizeof(ncclUniqueId));
SAME(sizeof(NcclOp), sizeof(ncclRedOp_t));
#ifdef NCCL_API_MAGIC  // before, the header has it as a number
SAME(NcclConfig{}.magic, NCCL_API_MAGIC);
#else
SAME(NcclConfig{}.magic, [] { ncclConfig_t config = NCCL_CONFIG_INITIALIZER; return config.magic; }());
#endif
SAME(NcclConfig::kUndefined, NCCL_CONFIG_UNDEF_INT);
SAME(offsetof(NcclConfig, version), offsetof(ncclConfig_t, version));
SAME(offsetof(NcclConfig, blocking), offsetof(ncclConfig_t, blocking));
SAME(offsetof(NcclConfig, net_name), offsetof(ncclConfig_t, netName));
SAME(offsetof(NcclConfig, split_share), offsetof(ncclConfig_t, splitShare));
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
SAME(offsetof(NcclConfig, traffic_class), offsetof(ncclConfig_t, trafficClass));
SAME(sizeof(NcclConfig), offsetof(ncclConfig_t, commName));
#else
static_assert(sizeof(NcclConfig) <= sizeof(ncclConfig_t));
#endif
"""

CUDA = """
#include "cuda.h"
#include "abi/cuda.h"
using namespace horovodish::abi;
SAME(sizeof(CuPointer), sizeof(CUdeviceptr));
SAME(sizeof(CuDevice), sizeof(CUdevice));
SAME(sizeof(CuUuid), sizeof(CUuuid));
SAME(kCudaSuccess, CUDA_SUCCESS);
SAME(kCudaOutOfMemory, CUDA_ERROR_OUT_OF_MEMORY);
SAME(kCudaNotReady, CUDA_ERROR_NOT_READY);
SAME(kCudaStreamCaptureImplicit, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
SAME(kCudaStreamNonBlocking, CU_STREAM_NON_BLOCKING);
SAME(kCudaEventDisableTiming, CU_EVENT_DISABLE_TIMING);
SAME(kCudaCaptureNone, CU_STREAM_CAPTURE_STATUS_NONE);
SAME(kCudaCaptureModeRelaxed, CU_STREAM_CAPTURE_MODE_RELAXED);
SAME(kCudaPoolReleaseThreshold, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD);
SAME(CuPoolOptions{}.allocation_type, CU_MEM_ALLOCATION_TYPE_PINNED);
SAME(CuPoolOptions{}.location_type, CU_MEM_LOCATION_TYPE_DEVICE);
SAME(sizeof(CuPoolOptions), sizeof(CUmemPoolProps));
SAME(offsetof(CuPoolOptions, location_type), offsetof(CUmemPoolProps, location.type));
SAME(offsetof(CuPoolOptions, location), offsetof(CUmemPoolProps, location.id));
"""

# Those without are other functions in CUDA 12.
NAMED_WITH_THEIR_VERSION = ("cuDeviceGetUuid_v2",)
LOOKED_UP = re.compile(r"\(\*(\w+)\)\([^()]*\)\s*=\s*look_up\(\"(\w+)\"\)")


def installed(name: str, wheels: tuple[str, ...], folders: str) -> Path | None:
    """A file of one of the wheels, or of the system."""
    for wheel in wheels:
        try:
            files = importlib.metadata.files(wheel) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == name:
                return Path(str(file.locate()))
    return next((Path(path) for path in sorted(glob.glob(folders + name))), None)


def nccl(name: str) -> Path:
    found = installed(name, ("nvidia-nccl-cu13", "nvidia-nccl-cu12"), "/usr/include/")
    return found or pytest.skip(f"no {name} to compare with: pip install nvidia-nccl-cu13")


def functions(source: str, table: str) -> str:
    """For every function that is looked up: that the header gives its name to that version of it, and its type."""
    lines = []
    for member, symbol in LOOKED_UP.findall((CSRC / source).read_text()):
        name = symbol if symbol in NAMED_WITH_THEIR_VERSION else re.sub(r"_v\d$", "", symbol)
        lines.append(f'static_assert(std::string_view(TEXT({name})) == "{symbol}");')
        lines.append(f"static_assert(Alike<decltype({table}::{member}), decltype(&{name})>::value);")
    assert len(lines) > 20
    return "\n".join(lines)


def compiled(folder: Path, text: str) -> str:
    """What the compiler has against it."""
    source = folder / "agrees.cc"
    source.write_text(PREAMBLE + text)
    command = ["g++", "-std=c++20", "-fsyntax-only", f"-I{folder}", f"-I{CSRC}", str(source)]
    return subprocess.run(command, capture_output=True, text=True).stderr


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine: apt-get install g++")
def test_what_we_declare_is_what_nccl_declares(tmp_path: Path) -> None:
    shutil.copy(nccl("nccl.h"), tmp_path)
    # All of CUDA that it needs: the types of a stream and an event.
    (tmp_path / "cuda_runtime.h").write_text("typedef struct S* cudaStream_t; typedef struct E* cudaEvent_t;")
    (tmp_path / "cuda_fp16.h").write_text("")
    assert compiled(tmp_path, NCCL + functions("abi/nccl.h", "Nccl")) == ""


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine: apt-get install g++")
def test_what_we_declare_is_what_cuda_declares(tmp_path: Path) -> None:
    wheels = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12")
    header = installed("cuda.h", wheels, "/usr/local/cuda*/include/")
    if header is None:
        pytest.skip("no cuda.h to compare with: pip install nvidia-cuda-runtime")
    shutil.copy(header, tmp_path)
    assert compiled(tmp_path, CUDA + functions("abi/cuda.h", "Cuda")) == ""


def test_nccl_has_what_we_look_up() -> None:
    path = nccl("libnccl.so.2")
    code = f"from horovodish import _native; print(_native.load_device_libraries({str(library())!r}, {str(path)!r}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.strip().isdigit(), run.stderr
