"""Compiles exported Metal source with clang as C++ for OpenCL, the open language nearest to Metal's.

Both are clang with the same four address spaces: pointers, threadgroup variables and constants at program
scope obey one set of rules. What the two languages hold differently is in README.md here; metal_rules.py
checks some of that in the text.
"""

import json
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

from ..builds import built_file, contents
from ..kernels.c_programs import version
from . import metal_rules
from .simulator import LIMIT

PRELUDE = Path(__file__).parent / "metal_prelude.h"
CLANGS = "clang", *(f"clang-{n}" for n in range(20, 13, -1))  # C++ for OpenCL 2021 came with 14
WITHOUT = (
    "__opencl_c_program_scope_global_variables",
    "__opencl_c_device_enqueue",
    "__opencl_c_generic_address_space",
    "__opencl_c_pipes",
    "__opencl_c_fp64",
    "cl_khr_fp64",
)
LANGUAGE = ["-x", "clcpp", "-cl-std=clc++2021", "-target", "spir64-unknown-unknown", "-cl-no-stdinc"]
FLAGS = [
    *LANGUAGE,
    *("-include", str(PRELUDE), "-ferror-limit=0", "-Wall", "-Werror"),
    *("-Wno-unknown-pragmas", "-Wno-unused-function", "-Wno-sign-compare", "-Wno-unused-const-variable"),
    "-Wno-unused-local-typedef",
    *("-Xclang", "-cl-ext=" + ",".join(f"-{name}" for name in WITHOUT)),
    *("-S", "-emit-llvm", "-O0", "-o", "-"),
]


@cache
def clang() -> str:
    """The compiler, or a skipped test."""
    for name in CLANGS:
        if (found := shutil.which(name)) and _knows_opencl(found):
            return found
    pytest.skip("no clang 14 or later to check the Metal sources with: apt-get install clang")


def _knows_opencl(compiler: str) -> bool:
    """Apple's clang, and versions before 14, do not."""
    # Without the prelude: a mistake in it must not skip the tests.
    command = [compiler, *LANGUAGE, "-S", "-emit-llvm", "-o", "-", "-"]
    return subprocess.run(command, input="", capture_output=True, text=True).returncode == 0


def complaints(text: str) -> list[str]:
    """All that is wrong with a Metal source that MLX would compile; [] if nothing is."""
    checker = contents(PRELUDE, Path(__file__), Path(metal_rules.__file__), metal_rules.NAMES)
    inputs = version(clang()), *FLAGS, checker, text
    found = built_file("front_end", lambda to: to.write_text(json.dumps(_complaints(text))), *inputs)
    return json.loads(found.read_text())


def _complaints(text: str) -> list[str]:
    kernel = concrete(text)
    said = [*metal_rules.broken(expanded(kernel)), *metal_rules.library_macros(text)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.clcpp"
        file.write_text(kernel)
        done = subprocess.run([clang(), *FLAGS, str(file)], capture_output=True, text=True)
    if done.returncode:
        return said + re.findall(r"^.*: (?:error|fatal error|note): .*$", done.stderr, flags=re.M)
    return [*said, *too_much_threadgroup_memory(done.stdout), *recursion(done.stdout)]


def expanded(kernel: str) -> str:
    """Without macros; the prelude's are not known here, so address spaces keep Metal's names."""
    command = [clang(), *LANGUAGE, "-E", "-P", "-"]
    done = subprocess.run(command, input=kernel, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def concrete(text: str) -> str:
    """MLX's template and its instantiation -> one __kernel with the template values as constants in it."""
    instance = re.search(r"^template \[\[host_name.*<(.*)>;$", text, flags=re.M)
    head = re.search(r"(?:template <(.*)>\n)?\[\[kernel\]\] void \w+\((?:.|\n)*?\) \{$", text, flags=re.M)
    assert head and (instance is not None) == (head[1] is not None), "MLX writes its kernels otherwise now"
    names = head[1].split(", ") if head[1] else []
    values = instance[1].split(", ") if instance else []
    constants = "".join(_constant(name, value) for name, value in zip(names, values, strict=True))
    body = text[head.end() : instance.start() if instance else None]
    signature = re.sub(r"\[\[.*?\]\]", "", head[0].split("[[kernel]]")[1])
    return f"{text[: head.start()]}__kernel{signature}{constants}{body}"


def _constant(name: str, value: str) -> str:
    kind, name = name.split()
    if kind == "typename":
        return f" typedef {value} {name};"
    return f" constexpr {kind} {name} = {value}; (void){name};"


def too_much_threadgroup_memory(ir: str) -> list[str]:
    """From the variables in LLVM's address space 3, each rounded up to 16 bytes."""
    kinds = re.findall(r"^@.* addrspace\(3\) global (.*) undef", ir, flags=re.M)
    total = sum(-(-size(kind) // 16) * 16 for kind in kinds)
    return [f"{total} bytes of threadgroup memory, {LIMIT} at most"] if total > LIMIT else []


def size(kind: str) -> int:
    """Bytes of an LLVM type: float, i32, [64 x float], <4 x half>."""
    if match := re.fullmatch(r"[\[<](\d+) x (.*)[\]>]", kind):
        return int(match[1]) * size(match[2])
    return {"float": 4, "half": 2, "i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8}[kind]


def recursion(ir: str) -> list[str]:
    """Functions that reach themselves. Each instance of a template is a function of its own."""
    calls: dict[str, set[str]] = {}
    for name, body in re.findall(r"^define .*?@([\w.]+)\((.*?)^}", ir, flags=re.M | re.S):
        calls[name] = set(re.findall(r"\bcall\b.*?@([\w.]+)\(", body))
    return [f"a function reaches itself: {name!r}" for name in calls if name in _reached(calls, name)]


def _reached(calls: dict[str, set[str]], name: str) -> set[str]:
    seen: set[str] = set()
    ahead = set(calls[name])
    while ahead:
        seen |= ahead
        ahead = {after for one in ahead for after in calls.get(one, ())} - seen
    return seen
