"""llama.cpp as an oracle: its quantiser, and its logits."""

from pathlib import Path

import numpy as np
import pytest

# llama_ftype -> what it stores most matrices as
FILE_TYPES = {
    "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K_M": 12, "Q4_K_M": 15,
    "Q5_K_M": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30, "MXFP4": 38,
}  # fmt: skip


def library():
    return pytest.importorskip("llama_cpp", reason="needs llama-cpp-python, the oracle (--group oracle)")


def requantise(source: Path, target: Path, file_type: str, pure: bool = False) -> Path:
    """The model in another type, by llama.cpp's own quantiser. pure: all matrices alike."""
    lib = library()
    lib.llama_log_set(_silent(lib), None)
    params = lib.llama_model_quantize_default_params()
    params.ftype, params.nthread = FILE_TYPES[file_type], 2
    params.allow_requantize, params.pure = True, pure
    assert lib.llama_model_quantize(str(source).encode(), str(target).encode(), params) == 0
    return target


_kept = []


def _silent(lib):
    if not _kept:
        _kept.append(lib.llama_log_callback(lambda *_: None))
    return _kept[0]


def logits(path: Path, tokens: list[int]) -> np.ndarray:
    """After every token: float32 [T, V]."""
    judge = library().Llama(
        str(path), n_ctx=len(tokens) + 8, n_batch=512, n_threads=2, logits_all=True, verbose=False
    )
    judge.eval(tokens)
    return np.array(judge.scores[: len(tokens)])
