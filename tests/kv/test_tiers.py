"""The table of tiers in Python, in C and in the GPU kernels: the same rows."""

import ctypes
import re
from pathlib import Path

import pytest

from ruvmlx.backends.mlx.kernels.pages import PARAMS, KernelParam, page_bytes
from ruvmlx.backends.mlx.kernels.source import folder
from ruvmlx.kernels.library import _load
from ruvmlx.kernels.paged_attention import head_page_bytes
from ruvmlx.kv.policy import TIERED, TierPolicy
from ruvmlx.tiers import EXAMPLE, LENGTHS, PAGE, TIERS, describe_tiers, fill_lengths

NEON = Path(__file__).parents[2] / "neon"


def rows(path: Path, macro: str) -> list[list[str]]:
    """The arguments of each row of an X-macro, `ROW(a, b, ..)`."""
    table = re.search(rf"#define {macro}\((?:.*\\\n)+.*\n", path.read_text())
    assert table
    found = [re.split(r",\s*", row) for row in re.findall(r"^ +\w+\((.*)\)", table[0], re.M)]
    assert found
    return found


def test_the_c_library_has_the_same_rows():
    found = rows(NEON / "include" / "rvm_pages.h", "RVM_CODE_TIERS")
    assert found == [[t.name.upper(), str(t.bits), str(int(t.rotated)), str(t.terms)] for t in TIERS[:-1]]


def test_the_gpu_kernels_have_the_same_rows():
    found = [row[1:] for row in rows(folder() / "pages.h", "TIERS")]
    ours = [[t.name.upper(), t.name, str(t.bits), str(t.rotated).lower(), str(t.cost)] for t in TIERS]
    assert found == ours


def test_the_library_that_runs_was_built_with_these_rows():
    lib = _load()
    lib.rvm_tier_name.restype, lib.rvm_tier_name.argtypes = ctypes.c_char_p, [ctypes.c_size_t]
    names = [lib.rvm_tier_name(tier) for tier in range(len(TIERS) + 1)]
    assert names == [tier.name.upper().encode() for tier in TIERS] + [None]
    for tier in range(len(TIERS)):  # a multiple of 32 needs no padding: as many bytes in both orders
        assert head_page_bytes(tier, 128) == page_bytes(tier, 128)


def test_tiers_rise_in_precision_and_cost():
    """Kernels rely on it: pages of a lower width are the oldest ones."""
    assert [t.bits for t in TIERS] == sorted(t.bits for t in TIERS) and TIERS[-1].bits == 16
    assert [t.cost for t in TIERS] == sorted(t.cost for t in TIERS) and TIERS[0].cost == 1
    assert not TIERS[-1].rotated and {t.bits for t in TIERS} <= {4, 8, 16}


def test_a_kernels_parameters_lie_where_the_header_says():
    names = re.search(
        r"enum \{\n    N_TOKENS = N_TIERS,(.*?)PARAMS = (\d+)", (folder() / "pages.h").read_text(), re.S
    )
    assert names and int(names[2]) == PARAMS
    after = re.findall(r"^    ([A-Z_]+),", names[1], re.M)
    assert [param.name for param in KernelParam] == ["N_TOKENS", *after]
    assert (
        list(KernelParam) == list(range(len(TIERS), len(TIERS) + len(KernelParam)))
        and max(KernelParam) < PARAMS
    )


def test_names_and_lengths_follow_from_the_table():
    assert (LENGTHS, EXAMPLE, TIERED.lengths) == (("hot", "warm"), "256,1024", (256, 2048))
    assert describe_tiers() == "f16, then 8 bits, then 4 bits"


@pytest.mark.parametrize("lengths", [(64,), (64, 128, 192), (0, 64), (128, 64), (64, 100)])
def test_other_lengths_are_refused(lengths):
    with pytest.raises(ValueError, match="must be multiples of 64, hot <= warm"):
        TierPolicy("tiered", lengths)


def test_lengths_from_before_a_tier_was_added_leave_it_empty():
    assert fill_lengths((64,)) == (64,) * len(LENGTHS) and fill_lengths((64, 512)[: len(LENGTHS)]) == (
        64,
        512,
    )
    assert TierPolicy("tiered", fill_lengths((64,))).counts(1000)[0] == (1001 - 64) // PAGE
