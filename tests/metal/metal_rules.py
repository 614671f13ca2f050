"""Rules of Metal's that C++ for OpenCL does not have, looked for in preprocessed text."""

import re
from pathlib import Path

NAMES = Path(__file__).parent / "library_names.txt"
LIBRARY = {
    name for line in NAMES.read_text().splitlines() for name in line.split() if not line.startswith("#")
}
SPACES = {"device", "constant", "threadgroup", "thread"}
TYPES = r"void|bool|(?:char|uchar|short|ushort|int|uint|half|float)[234]?|u?long|u?int\d+_t|b?float16_t"
LEFT_OUT = "goto", "register", "thread_local", "dynamic_cast", "typeid", "noexcept"


def broken(code: str) -> list[str]:
    """What Metal would refuse in preprocessed code; [] if nothing."""
    code = re.sub(r"^\s*#.*$", "", code, flags=re.M)  # pragmas
    found = pointers_without_space(code), constants_in_functions(code), library_functions(code)
    return [line for lines in (*found, left_out(code)) for line in lines]


def pointers_without_space(code: str) -> list[str]:
    """C++ for OpenCL takes these as pointers to thread memory."""
    named = "".join(f"|{name}" for name in re.findall(r"\b(?:struct|typename|class) (\w+)", code))
    pointer = rf"(?:\b(?:{TYPES}{named})|\b\w+<[\w\s,:]*>)\s*(?:const\s*)?([*&]|\(\s*[*&])"
    said = []
    for match in re.finditer(pointer, code):
        start = max(code.rfind(c, 0, match.start()) for c in "(){};,<")
        if not SPACES & set(code[start + 1 : match.start()].split()):
            kind = "reference" if "&" in match[1] else "pointer"
            said.append(f"{kind} type must have explicit address space qualifier: {match[0]!r}")
    return said


def constants_in_functions(code: str) -> list[str]:
    """C++ for OpenCL takes them in a kernel. Pointers to constants may be anywhere."""
    return [
        f"automatic variable qualified with an address space: {match[0]!r}"
        for match in re.finditer(r"\bconstant\b[^*&;(){}]*[=;]", code)
        if code.count("{", 0, match.start()) > code.count("}", 0, match.start())
    ]


def library_functions(code: str) -> list[str]:
    """Functions at program scope with a name of Metal's library; the prelude declares few of that."""
    while (outside := re.sub(r"\{[^{}]*\}", ";", code)) != code:
        code = outside
    return _of_the_library(re.findall(r"[\w>*&]\s+[*&]?(\w+)\s*\(", code))


def library_macros(text: str) -> list[str]:
    """The same of macros, in text that is not preprocessed."""
    return _of_the_library(re.findall(r"#\s*define (\w+)\(", text))


def _of_the_library(names: list[str]) -> list[str]:
    return [f"{name!r} is a function of Metal's library" for name in names if name in LIBRARY]


def left_out(code: str) -> list[str]:
    """C++14 that Metal leaves out, most of it up to version 4, and that clang does not refuse by itself."""
    # A bracket after a name, a parenthesis or another bracket is a subscript or an attribute.
    lambdas = re.findall(r"(?:(?<![\w)\]\[\s])|\breturn)\s*(\[[^\[\]]*\]\s*[({].*)", code)
    derived = re.findall(r"(?<!enum )\b(?:struct|class) \w+\s*:[^:;{]*", code)
    words = re.findall(rf"\b(?:{'|'.join(LEFT_OUT)})\b", code)
    return [f"not in Metal: {found!r}" for found in (*lambdas, *derived, *words)]
