"""All kernels, with the template values that the tests use. A new kernel gets a row here."""

from ruvmlx.kernels.metal import append, decode, demote, lora, micro, prefill
from ruvmlx.kernels.metal.pages import HOT, WARM

DIMS, GROUPS = (64, 80, 128), (1, 3, 4, 8)
RANKS = [(1, 1), (8, 2), (16, 1), (3, 2)]

KERNELS = {
    decode.ATTEND: [(d, g) for d in DIMS for g in (*GROUPS, 6)],
    decode.MATRIX: [(d, g) for d in (64, 128) for g in (*GROUPS, 6)],
    decode.MERGE: [(d,) for d in DIMS],
    prefill.PREFILL: [(d,) for d in DIMS],
    append.APPEND: [(d, traditional) for d in DIMS for traditional in (0, 1)],
    demote.DEMOTE_WARM: [(d,) for d in DIMS],
    demote.DEMOTE_COLD: [(d, source) for d in DIMS for source in (WARM, HOT)],
    lora.PROJECT: RANKS,
    lora.ADD: RANKS,
    micro.UPDATE: [()],
}
CUDA_ONLY = {decode.MATRIX}
