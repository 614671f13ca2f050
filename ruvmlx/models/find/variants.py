"""This module groups the GGUF files of one repository or folder into models. The module finds which files
form one model, which quantisation type each model has, and which model suits this machine."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ...errors import ModelNotFound, RuvmlxError
from ...text import size
from ..files.error_text import one_line
from ..files.gguf_split import PART

# the maximum fraction of the memory limit that weights may take; the KV cache and other data need the last
# third
WEIGHTS_SHARE = 2 / 3
# The quantisation types in the order of preference, the best type last. The types without quantisation come
# first (as the worst), because the program chooses an unquantised file only if no quantised file of these
# types fits into the memory.
_ORDER = str.split(
    "F32 F16 BF16 Q2_K_S Q2_K Q2_K_L Q3_K_S Q3_K_M Q3_K_L Q3_K_XL IQ4_XS Q4_0 MXFP4 IQ4_NL Q4_1 Q4_K_S "
    "Q4_K_M Q4_K_L Q5_0 Q5_1 Q5_K_S Q5_K_M Q5_K_L Q6_K Q6_K_L Q8_0"
)
_RANKS = {name: rank for rank, name in enumerate(_ORDER)}
_TYPE = re.compile(
    r"(?:^|[-._])(?P<type>(?:UD-)?I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP4(?:_MOE)?|BF16|FP?16|FP?32)$",
    re.IGNORECASE | re.ASCII,
)
# words in names of GGUF files that are no language models: parts for images, statistics for quantisation
_BESIDE = re.compile(r"mmproj|imatrix", re.IGNORECASE)
# The pattern of the names of GGUF files that are not hidden. On an exFAT disk, macOS puts a file ._NAME with
# the attributes of NAME beside each file.
GGUF_FILES = "[!.]*.gguf"


@dataclass(frozen=True)
class GGUFVariant:
    """One model in one GGUF file or in several part files.

    files: the paths in the repository, the first part first
    type: the quantisation type such as "Q4_K_M"; "" if the file name has no type
    bytes: the size of all files
    """

    files: tuple[str, ...]
    type: str
    bytes: int

    def is_called(self, wanted: str) -> bool:
        """Return True if `wanted` is the type of this model or the path of one of its files."""
        return wanted.upper() == self.type or wanted in self.files

    @property
    def line(self) -> str:
        """Return one line for the user with type, size and file name, such as "Q4_K_M 4.9 GB
        model-Q4_K_M.gguf"."""
        return f"{self.type or '?':<8} {size(self.bytes):>8}  {one_line(self.files[0])}"


@dataclass(frozen=True)
class FileChoice:
    """The choice of one GGUF model of a repository. chosen: the model to download. found: all GGUF models of
    the repository. why: the reason of the choice, as the end of a sentence."""

    name: str
    chosen: GGUFVariant
    found: tuple[GGUFVariant, ...]
    why: str

    @property
    def bytes(self) -> int:
        return self.chosen.bytes

    @property
    def lines(self) -> list[str]:
        """Return lines for the user: the chosen file with the reason, then one line for each other model."""
        first = f"{self.name}: {one_line(self.chosen.files[0])} ({size(self.bytes)}), {self.why}."
        others = [f"  or  {variant.line}" for variant in self.found if variant != self.chosen]
        return [first, *others]


def variants(sizes: Mapping[str, int]) -> tuple[GGUFVariant, ...]:
    """Return the GGUF models that a repository's files form, the smallest model first. sizes:
    {path in the repository: bytes}.

    The function leaves out files that are no complete models (mmproj, imatrix) and split models with missing
    parts.
    """
    wholes: dict[tuple[str, int], list[str]] = {}
    for file in sorted(sizes):
        if file.endswith(".gguf") and not _BESIDE.search(PurePosixPath(file).name):
            wholes.setdefault(_whole(file), []).append(file)
    found = [
        GGUFVariant(tuple(files), _type(name), sum(sizes[file] for file in files))
        for (name, count), files in wholes.items()
        if len(files) == count
    ]
    return tuple(sorted(found, key=lambda variant: (variant.bytes, variant.files)))


def variants_in(folder: Path) -> tuple[GGUFVariant, ...]:
    """Return the GGUF models that the files in a folder and its subfolders form, without hidden files
    (`GGUF_FILES`); none if the folder cannot be read."""
    try:
        files = [path for path in folder.rglob(GGUF_FILES) if path.is_file()]
        return variants({path.relative_to(folder).as_posix(): path.stat().st_size for path in files})
    except OSError:
        return ()


def variant_names(name: str, found: Sequence[GGUFVariant], alone: bool = True) -> list[str]:
    """Return a unique name of each GGUF model of the repository `name`: the repository's name if it has only
    this model, else name:TYPE if the type is unique, else name/file. alone: True if the repository has no
    safetensors model."""
    if len(found) == 1 and alone:
        return [name]
    types = [variant.type for variant in found]
    return [
        f"{name}:{variant.type}"
        if variant.type and types.count(variant.type) == 1
        else _by_file(name, variant)
        for variant in found
    ]


def _by_file(name: str, variant: GGUFVariant) -> str:
    return f"{name}/{variant.files[0]}"


def named_variant(name: str, found: Sequence[GGUFVariant], wanted: str) -> FileChoice:
    """Return the choice of the model whose type or file is `wanted`. Raises ModelNotFound if not exactly one
    model matches."""
    matches = [variant for variant in found if variant.is_called(wanted)]
    if len(matches) == 1:
        return FileChoice(name, matches[0], tuple(found), "as named")
    if matches:
        listed = ", ".join(_by_file(name, variant) for variant in matches[:3])
        raise ModelNotFound(f"{len(matches)} files of {name} are of type {wanted}; name one: {listed}.")
    listed = ", ".join(variant_names(name, found)[:6]) or "none"
    raise ModelNotFound(f"{name} has no GGUF file {wanted!r}; it has: {listed}.")


def choose_variant(name: str, found: Sequence[GGUFVariant], limit: int) -> FileChoice:
    """Return the choice of the model with the best type whose weights take at most two thirds of the memory;
    the KV cache and other data need the last third. Files of unknown types are left out if there is more than
    one file. Raises an error if no model remains. limit: the memory limit in bytes."""
    if not found:
        raise ModelNotFound(f"{name} has no whole GGUF model among its files; name another repository.")
    known = [variant for variant in found if variant.type in _RANKS] or (found if len(found) == 1 else [])
    if not known:
        listed = ", ".join(variant_names(name, found)[:6])
        raise ModelNotFound(
            f"no file of {name} says in its name that it has a known type; name one: {listed}."
        )
    room = int(limit * WEIGHTS_SHARE)
    best = best_variant(known, limit)
    if best is None:
        raise _nothing_fits(name, found, room, limit)
    why = f"the best that leaves a third of {size(limit)} for the cache and for work"
    return FileChoice(name, best, tuple(found), why)


def best_variant(found: Sequence[GGUFVariant], limit: int) -> GGUFVariant | None:
    fitting = [variant for variant in found if variant.bytes <= limit * WEIGHTS_SHARE]
    return max(fitting, key=lambda variant: (_RANKS.get(variant.type, -1), -variant.bytes), default=None)


def _nothing_fits(name: str, found: Sequence[GGUFVariant], room: int, limit: int) -> RuvmlxError:
    smallest = found[0]
    called = variant_names(name, found)[0] if len(found) > 1 else _by_file(name, smallest)
    return RuvmlxError(
        f"no GGUF file of {name} fits: the smallest, {one_line(smallest.files[0])}, has "
        f"{size(smallest.bytes)}; there is room for {size(room)} of weights (two thirds of "
        f"{size(limit)}). Choose a smaller model, or fetch it all the same by naming it: {called}."
    )


def _whole(file: str) -> tuple[str, int]:
    """Return (the path without the suffix .gguf and without the part number, the number of part files of the
    model)."""
    stem = file.removesuffix(".gguf")
    part = PART.fullmatch(stem)
    return (part["name"], int(part["count"])) if part else (stem, 1)


def _type(name: str) -> str:
    found = _TYPE.search(PurePosixPath(name).name)
    spelt = found["type"].upper() if found else ""
    return {"FP16": "F16", "FP32": "F32"}.get(spelt, spelt)
