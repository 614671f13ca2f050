"""This module finds and loads librvm, the C library that is built with the package (neon/include/rvm.h)."""

import ctypes as C
import functools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ruvmlx
from ruvmlx.errors import RuvmlxError

ABI_VERSION = 21
OK, BAD_ARGUMENT, NOT_FINITE = 0, 1, 2
MAX_RANK = 64

_SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"
_P, _N, _F = C.c_void_p, C.c_size_t, C.c_float

# The functions that the C struct rvm_kernels points to, in the order of its fields, with the types of each
# function's arguments. All pointers are passed as addresses.
_SIGNATURES: dict[str, list[Any]] = {
    "dot": [_P, _P, _N, _P],
    "all_within": [_P, _N, _F],
    "micro_update": [_P, _N, _F, _F],
    "head_add": [_P, _P, _P, _F, _N, _N, _N, _N, _P],
    "trace_accumulate": [_P, _P, _P, _P, _F, _N, _N, _N, _N, _P, _P, _P],
    "kl_to_frozen": [_P, _P, _P, _P, _F, _N, _N, _N, _P],
    "evidence_add": [_P, _P, _P, _F, _F, _N, _P],
    "evidence_push": [_P, _P, _F, _F, _F, _N, _N, _N, _N, _P],
    "micro_place": [_P, _F, _P, _P, _F, _N, _N, _N, _N, _F, _P],
    "logprobs": [_P, _P, _N, _N, _P],
    "draw": [_P, _N, _P, _P, _P],
}
KERNELS = tuple(_SIGNATURES)


class Param(C.Structure):
    """This is the C struct rvm_param: one weight array with its velocity and its gradient."""

    _fields_ = [("w", _P), ("velocity", _P), ("g", _P), ("n", _N)]


class _KernelTable(C.Structure):
    _fields_ = [("name", C.c_char_p), *((name, _P) for name in KERNELS)]


class LibraryError(RuvmlxError):
    """This error means that librvm is missing, cannot be loaded, has another ABI version than this package
    needs, or does not have the wanted implementation for this machine."""


def find(name: str) -> Path:
    """Return the path of a library that is installed as ruvmlx/_lib/lib<name>, in a wheel or an editable
    install."""
    wanted = f"lib{name}{_SUFFIX}"
    for folder in _folders():
        if (folder / wanted).is_file():
            return folder / wanted
    raise LibraryError(
        f"{wanted} is not installed beside ruvmlx {ruvmlx.__version__} in {Path(ruvmlx.__file__).parent}; "
        "build it with `uv sync --reinstall-package ruvmlx` or `pip install .` (needs a C compiler)."
    )


def _folders() -> list[Path]:
    """Return the folders in which `find` looks for the library. In an editable install, the sources are in
    the checkout and the built library is in site-packages, so both are searched."""
    packages = [Path(p) for p in ruvmlx.__path__] + [Path(p) / "ruvmlx" for p in sys.path]
    return [p / "_lib" for p in packages]


@functools.cache
def _load() -> C.CDLL:
    path = find("rvm")
    try:
        lib = C.CDLL(str(path))
        version = lib.rvm_abi_version()
    except (OSError, AttributeError) as error:
        raise LibraryError(f"cannot load {path}: {error}; reinstall ruvmlx on this machine.") from None
    if version != ABI_VERSION:
        raise LibraryError(
            f"{path} has ABI version {version}, these sources need {ABI_VERSION}; "
            "rebuild it with `uv sync --reinstall-package ruvmlx` or `pip install .`."
        )
    lib.rvm_impl.restype, lib.rvm_impl.argtypes = C.POINTER(_KernelTable), [C.c_char_p]
    lib.rvm_impl_name.restype, lib.rvm_impl_name.argtypes = C.c_char_p, [_N]
    return lib


@functools.cache
def implementations() -> tuple[str, ...]:
    """Return the names of the implementations (instruction sets) that run on this machine, fastest first:
    ("avx512", "avx2", "scalar") or ("neon", "scalar")."""
    lib = _load()
    names: list[str] = []
    while name := lib.rvm_impl_name(len(names)):
        names.append(name.decode())
    return tuple(names)


def available(kernel: str) -> tuple[str, ...]:
    """Return the names of the implementations of one kernel (each implementation has all kernels), for
    `pytest.mark.parametrize("impl", available("head_add"))`."""
    if kernel not in _SIGNATURES:
        raise KeyError(f"no kernel {kernel!r}; there are {', '.join(KERNELS)}")
    return implementations()


@functools.cache
def functions(impl: str | None = None) -> SimpleNamespace:
    """Return the kernels KERNELS of one implementation (None: the fastest) as ctypes functions that release
    Python's global lock (GIL)."""
    table = _load().rvm_impl(impl.encode() if impl else None)
    if not table:
        raise LibraryError(f"no implementation {impl!r} here; there are {', '.join(implementations())}.")
    made = {
        name: C.CFUNCTYPE(C.c_int, *types)(getattr(table.contents, name))
        for name, types in _SIGNATURES.items()
    }
    return SimpleNamespace(**made)


def registry() -> dict[str, str]:
    """Return {kernel: the implementation that runs by default}, for `ruvmlx doctor`."""
    return {kernel: implementations()[0] for kernel in KERNELS}
