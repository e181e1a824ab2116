"""The public names of horovodish.jax, what its import does not do, and XLA's interface as we declare it."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import jaxlib
import pytest

import horovodish.jax
from horovodish import _native
from support.sources import CSRC
from support.surface import check_surface


def test_the_public_names() -> None:
    check_surface(horovodish.jax)


def test_the_import_starts_no_backend_and_no_mpi() -> None:
    code = "import horovodish.jax, sys; from jax._src.xla_bridge import backends_are_initialized as begun; "
    code += "assert not begun(); assert 'mpi4py.MPI' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


STRUCTS = {  # ours, theirs, and members of both
    "Extension": ("XLA_FFI_Extension_Base", {"type": "type", "next": "next"}),
    "ApiVersion": ("XLA_FFI_Api_Version", {"major_version": "major_version", "minor_version": "minor_version"}),
    "Metadata": ("XLA_FFI_Metadata", {"api_version": "api_version", "traits": "traits"}),
    "MetadataExtension": ("XLA_FFI_Metadata_Extension", {"metadata": "metadata"}),
    "ErrorCreateArgs": ("XLA_FFI_Error_Create_Args", {"message": "message", "code": "errc"}),
    "FutureCreateArgs": ("XLA_FFI_Future_Create_Args", {"future": "future"}),
    "FutureSetAvailableArgs": ("XLA_FFI_Future_SetAvailable_Args", {"future": "future"}),
    "FutureSetErrorArgs": ("XLA_FFI_Future_SetError_Args", {"future": "future", "error": "error"}),
    "HandlerBundle": (
        "XLA_FFI_Handler_Bundle",
        {"instantiate": "instantiate", "prepare": "prepare", "initialize": "initialize", "execute": "execute"},
    ),
    "HandlerRegisterArgs": (
        "XLA_FFI_Handler_Register_Args",
        {"name": "name", "platform": "platform", "bundle": "bundle", "traits": "traits"},
    ),
    "StreamGetArgs": ("XLA_FFI_Stream_Get_Args", {"context": "ctx", "stream": "stream"}),
    "RunIdGetArgs": ("XLA_FFI_RunId_Get_Args", {"context": "ctx", "run_id": "run_id"}),
    "DeviceOrdinalGetArgs": ("XLA_FFI_DeviceOrdinal_Get_Args", {"context": "ctx", "ordinal": "device_ordinal"}),
    "Buffer": ("XLA_FFI_Buffer", {"dtype": "dtype", "data": "data", "rank": "rank", "dims": "dims"}),
    "ByteSpan": ("XLA_FFI_ByteSpan", {"data": "ptr", "size": "len"}),
    "Scalar": ("XLA_FFI_Scalar", {"dtype": "dtype", "value": "value"}),
    "Buffers": ("XLA_FFI_Args", {"size": "size", "types": "types", "buffers": "args"}),
    "Attributes": ("XLA_FFI_Attrs", {"size": "size", "types": "types", "names": "names", "values": "attrs"}),
    "Api": (
        "XLA_FFI_Api",
        {
            "api_version": "api_version",
            "error_create": "XLA_FFI_Error_Create",
            "handler_register": "XLA_FFI_Handler_Register",
            "stream_get": "XLA_FFI_Stream_Get",
            "future_create": "XLA_FFI_Future_Create",
            "future_set_available": "XLA_FFI_Future_SetAvailable",
            "future_set_error": "XLA_FFI_Future_SetError",
            "run_id_get": "XLA_FFI_RunId_Get",
            "device_ordinal_get": "XLA_FFI_DeviceOrdinal_Get",
        },
    ),
    "CallFrame": (
        "XLA_FFI_CallFrame",
        {
            "api": "api",
            "context": "ctx",
            "stage": "stage",
            "arguments": "args",
            "results": "rets",
            "attributes": "attrs",
            "future": "future",
        },
    ),
}
VALUES = {
    "kMajorVersion": "XLA_FFI_API_MAJOR",
    "kMetadataExtension": "XLA_FFI_Extension_Metadata",
    "kCancelled": "XLA_FFI_Error_Code_CANCELLED",
    "kInvalidArgument": "XLA_FFI_Error_Code_INVALID_ARGUMENT",
    "kDeadlineExceeded": "XLA_FFI_Error_Code_DEADLINE_EXCEEDED",
    "kInternal": "XLA_FFI_Error_Code_INTERNAL",
    "kUnavailable": "XLA_FFI_Error_Code_UNAVAILABLE",
    "kBufferType": "XLA_FFI_ArgType_BUFFER",
    "kScalarAttribute": "XLA_FFI_AttrType_SCALAR",
    "kStringAttribute": "XLA_FFI_AttrType_STRING",
    **{
        f"k{name}": f"XLA_FFI_DataType_{name}"
        for name in ("S8", "S16", "S32", "S64", "U8", "F16", "F32", "F64", "BF16")
    },
    "kPred": "XLA_FFI_DataType_PRED",
}


def test_our_declarations_of_xlas_interface_are_those_of_its_header(tmp_path: Path) -> None:
    """The header that jaxlib brings, newer ones included: structs may only have grown at their ends."""
    lines = ["#include <cstddef>", "#include <cstdint>", "#include <xla/ffi/api/c_api.h>", '#include "abi/xla_ffi.h"']
    # Version 0.4 has another name for it.
    lines += ["#if XLA_FFI_API_MINOR >= 4", "using XLA_FFI_Extension_Base = XLA_FFI_InternalExtension;", "#endif"]
    lines.append("namespace ours = horovodish::abi::xla;")
    for name, (theirs, members) in STRUCTS.items():
        lines.append(f'static_assert(sizeof(ours::{name}) <= sizeof({theirs}), "{name}");')
        for own, other in members.items():
            lines.append(
                f'static_assert(offsetof(ours::{name}, {own}) == offsetof({theirs}, {other}), "{name}.{own}");'
            )
    lines += [f'static_assert(int(ours::{own}) == int({other}), "{own}");' for own, other in VALUES.items()]
    source = tmp_path / "compared.cc"
    source.write_text("\n".join(lines) + "\n")
    include = Path(jaxlib.__file__).parent / "include"
    command = ["g++", "-std=c++20", "-fsyntax-only", f"-I{include}", f"-I{CSRC}", str(source)]
    compiled = subprocess.run(command, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr


class ApiVersion(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("extensions", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
    )


class Metadata(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("version", ApiVersion), ("traits", ctypes.c_uint32))


class MetadataExtension(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.POINTER(Metadata)),
    )


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_versions_of_jaxlib_that_ask_without_their_table_get_an_answer(platform: str) -> None:
    """Versions before 0.9 ask when a handler is registered: the frame holds nothing but the question."""
    name_of, address_of = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
    name_of.restype, name_of.argtypes = ctypes.c_char_p, (ctypes.py_object,)
    address_of.restype, address_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    for capsule in _native.xla_handlers(platform).values():
        metadata = Metadata()
        question = MetadataExtension(ctypes.sizeof(MetadataExtension), 1, None, ctypes.pointer(metadata))
        frame = (ctypes.c_void_p * 32)(ctypes.sizeof(ctypes.c_void_p) * 32, ctypes.addressof(question))
        answer = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(address_of(capsule, name_of(capsule)))
        assert answer(ctypes.addressof(frame)) is None
        assert (metadata.version.major, metadata.version.minor) == (0, 1)
