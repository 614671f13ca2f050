"""This module has the table of the GGUF tensor types that ruvmlx can read."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from . import gguf_codes
from .gguf_codes import Codes


@dataclass(frozen=True)
class TensorType:
    """One GGUF tensor type. gguf_codes.py explains codes and lows.

    block: the number of weights in one block; 1 for a type that is not quantised
    nbytes: the number of bytes in one block
    codes: the function that extracts the codes from blocks of this type
    bits: the number of bits of a code q that `codes` returns
    group: the number of weights that share a scale
    zero: the code of the weight 0, for a type without lows
    halves: the byte positions of the float16 numbers in a block
    wide: True if float16 cannot hold the scales exactly, so that the scales are float32
    uneven: True if the values of the codes have unequal distances (floats)
    mode: MLX's name for the type if MLX computes with this type directly; else ""
    """

    name: str
    id: int
    block: int
    nbytes: int
    codes: Callable[[np.ndarray], Codes] | None = None
    bits: int = 0
    group: int = 0
    zero: int = 0
    halves: tuple[int, ...] = ()
    wide: bool = False
    uneven: bool = False
    mode: str = ""

    def widen_to_8_bits(self) -> "TensorType":
        """Return a type whose `codes` function gives 8-bit codes for the same blocks. If the type stores no
        lows (numbers that are subtracted), the new code of the weight 0 is 128."""

        def codes(blocks: np.ndarray) -> Codes:
            assert self.codes is not None
            found = self.codes(blocks)
            shift = np.uint8(128 - self.zero if found.lows is None else 0)
            return found._replace(q=found.q + shift)

        return replace(self, codes=codes, bits=8, zero=128)

    @property
    def affine(self) -> bool:
        """Return True if MLX's affine layout, which has groups of 32, 64 or 128 weights, can hold the weights
        of this type without a change of the groups."""
        return 32 <= self.group <= 128 and not self.uneven

    @property
    def affine_group(self) -> int:
        """Return the number of weights that share a scale after the conversion to MLX's affine layout."""
        return min(128, max(32, self.group))

    @property
    def affine_bits(self) -> int:
        """Return the number of bits of a code after the conversion to MLX's affine layout. The number is 8
        for types with groups of fewer than 32 weights, because the conversion rounds their weights to 8
        bits."""
        return self.bits if self.group >= 32 else 8


ROWS = (
    TensorType("F32", 0, 1, 4),
    TensorType("F16", 1, 1, 2),
    TensorType("BF16", 30, 1, 2),
    TensorType("Q4_0", 2, 32, 18, gguf_codes.q4_0, bits=4, group=32, zero=8, halves=(0,)),
    TensorType("Q4_1", 3, 32, 20, gguf_codes.q4_1, bits=4, group=32, halves=(0, 2)),
    TensorType("Q5_0", 6, 32, 22, gguf_codes.q5_0, bits=5, group=32, zero=16, halves=(0,)),
    TensorType("Q5_1", 7, 32, 24, gguf_codes.q5_1, bits=5, group=32, halves=(0, 2)),
    TensorType("Q8_0", 8, 32, 34, gguf_codes.q8_0, bits=8, group=32, zero=128, halves=(0,)),
    TensorType("Q2_K", 10, 256, 84, gguf_codes.q2_k, bits=2, group=16, halves=(80, 82)),
    TensorType("Q3_K", 11, 256, 110, gguf_codes.q3_k, bits=3, group=16, zero=4, halves=(108,)),
    TensorType("Q4_K", 12, 256, 144, gguf_codes.q4_k, bits=4, group=32, halves=(0, 2), wide=True),
    TensorType("Q5_K", 13, 256, 176, gguf_codes.q5_k, bits=5, group=32, halves=(0, 2), wide=True),
    TensorType("Q6_K", 14, 256, 210, gguf_codes.q6_k, bits=6, group=16, zero=32, halves=(208,)),
    TensorType("Q8_K", 15, 256, 292, gguf_codes.q8_k, bits=8, group=256, zero=128, wide=True),
    TensorType("IQ4_NL", 20, 32, 18, gguf_codes.iq4_nl, bits=8, group=32, zero=128, halves=(0,)),
    TensorType("IQ4_XS", 23, 256, 136, gguf_codes.iq4_xs, bits=8, group=32, zero=128, halves=(0,), wide=True),
    TensorType("MXFP4", 39, 32, 17, gguf_codes.mxfp4, bits=5, group=32, zero=16, wide=True),
)
TENSOR_TYPES = {row.id: row for row in ROWS}
SUPPORTED = ", ".join(row.name for row in ROWS)

_NAMES = str.split(  # ggml's names; the index of a name is the type id
    "F32 F16 Q4_0 Q4_1 - - Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S "
    "IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16 - - - TQ1_0 TQ2_0 - - - MXFP4 NVFP4"
)


def name_of(id: int) -> str | None:
    """Return ggml's name of a type, also for a type that ruvmlx cannot read; None for an unknown id."""
    return _NAMES[id] if id < len(_NAMES) and _NAMES[id] != "-" else None


# The names in llama.cpp of the values of `general.file_type`. A value says how the whole file was quantised.
# The file can have tensors of other types, too.
FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S",
    12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K",
    19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL",
    26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16",
}  # fmt: skip
