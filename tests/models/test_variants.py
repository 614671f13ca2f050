"""Which GGUF file of a repository is taken: what is a choice, what suits a machine, what a name means."""

import pytest

from ruvmlx.errors import ModelNotFound, RuvmlxError
from ruvmlx.models.files.gguf_types import TENSOR_TYPES
from ruvmlx.models.find.variants import choose_variant, named_variant, variant_names, variants, variants_in

GB = 10**9
SEVEN = {  # a 7B model's usual files
    "M-Q2_K.gguf": 2.7, "M-Q3_K_M.gguf": 3.5, "M-Q4_0.gguf": 4.1, "M-Q4_K_S.gguf": 4.14, "M-Q4_K_M.gguf": 4.4,
    "M-Q4_1.gguf": 4.6, "M-Q5_K_M.gguf": 5.1, "M-Q6_K.gguf": 5.9, "M-Q8_0.gguf": 7.7, "M-F16.gguf": 14.5,
}  # fmt: skip


def of(sizes):
    return variants({file: int(size * GB) for file, size in sizes.items()})


def chosen_type(sizes, limit):
    return choose_variant("o/n", of(sizes), int(limit * GB)).chosen.type


@pytest.mark.parametrize(
    ("limit", "type_name"),
    [
        (64, "Q8_0"), (11.6, "Q8_0"), (11.5, "Q6_K"), (8.8, "Q5_K_M"), (7.6, "Q4_K_M"),
        (6.5, "Q4_K_S"), (6.2, "Q4_0"), (5.9, "Q3_K_M"), (4.1, "Q2_K"),
    ],
)  # fmt: skip
def test_the_best_that_leaves_a_third(limit, type_name):
    """7.7 GB are two thirds of 11.55 GB; F16 is never needed; Q4_1 is larger than Q4_K_M, not better."""
    assert chosen_type(SEVEN, limit) == type_name


def test_plain_files_where_there_are_no_others():
    assert chosen_type({"m-F32.gguf": 4, "m-bf16.gguf": 2}, 10) == "BF16"
    assert chosen_type({"m-fp16.gguf": 2}, 10) == "F16"
    assert chosen_type({"model.gguf": 2}, 10) == ""


@pytest.mark.parametrize("kind", [kind for kind in TENSOR_TYPES.values() if kind.name != "Q8_K"])
def test_every_type_that_is_read_can_be_chosen(kind):
    """Files of K-quants are named with a letter for their mixture. Q8_K is for llama.cpp's activations."""
    name = f"{kind.name}{'_S' if kind.name in ('Q3_K', 'Q4_K', 'Q5_K') else ''}"
    assert chosen_type({f"m-{name}.gguf": 1, "m-IQ1_S.gguf": 0.5}, 64) == name


def test_types_that_are_not_read_are_never_chosen():
    """But can be named."""
    found = of({"m-IQ2_XS.gguf": 1, "m-UD-Q4_K_XL.gguf": 2, "m-TQ1_0.gguf": 1, "m-Q2_K.gguf": 1.5})
    assert choose_variant("o/n", found, 64 * GB).chosen.type == "Q2_K"
    assert named_variant("o/n", found, "ud-q4_k_xl").chosen.files == ("m-UD-Q4_K_XL.gguf",)
    with pytest.raises(ModelNotFound, match=r"no file of o/n says.*name one: o/n:IQ2_XS, o/n:TQ1_0\."):
        choose_variant("o/n", of({"m-IQ2_XS.gguf": 1, "m-TQ1_0.gguf": 2}), 64 * GB)


@pytest.mark.parametrize(
    ("file", "type_name"),
    [
        ("Llama-3.2-1B-Instruct-Q4_K_M.gguf", "Q4_K_M"), ("mistral-7b.Q5_K_S.gguf", "Q5_K_S"),
        ("ggml-model-q4_0.gguf", "Q4_0"), ("M.i1-IQ4_XS.gguf", "IQ4_XS"), ("gpt-mxfp4.gguf", "MXFP4"),
        ("Q8_0/M-Q8_0-00001-of-00001.gguf", "Q8_0"), ("Qwen3-8B.gguf", ""), ("M-Q4_K_M-fixed.gguf", ""),
    ],
)  # fmt: skip
def test_types_in_file_names(file, type_name):
    assert variants({file: 1})[0].type == type_name


def test_split_files_are_one_choice_and_incomplete_ones_none():
    """In subfolders, too; the first part first."""
    parts = {f"Q6_K/M-Q6_K-0000{i}-of-00003.gguf": 2 for i in (3, 1, 2)}
    (whole,) = of(parts)
    assert whole.files == tuple(sorted(parts)) and whole.bytes == 6 * GB and whole.type == "Q6_K"
    assert whole.is_called("Q6_K/M-Q6_K-00002-of-00003.gguf")
    parts.pop("Q6_K/M-Q6_K-00002-of-00003.gguf")
    assert of(parts) == ()


def test_what_is_no_model_of_its_own():
    """Whatever its size and spelling."""
    beside = {"mmproj-M-Q8_0.gguf": 1, "M.mmproj-f16.gguf": 1, "M-imatrix.gguf": 1, "M.IMATRIX-Q8_0.gguf": 1}
    assert [v.type for v in of({**beside, "M-Q4_0.gguf": 1, "README.md": 1})] == ["Q4_0"]
    with pytest.raises(ModelNotFound, match="no whole GGUF model"):
        choose_variant("o/n", of(beside), GB)


def test_names_are_the_shortest_that_say_which():
    found = of({"a-Q4_0.gguf": 1, "b-Q4_0.gguf": 2, "a-Q8_0.gguf": 3, "c.gguf": 4})
    assert variant_names("o/n", found) == ["o/n/a-Q4_0.gguf", "o/n/b-Q4_0.gguf", "o/n:Q8_0", "o/n/c.gguf"]
    assert variant_names("o/n", found[:1]) == ["o/n"]
    with pytest.raises(
        ModelNotFound, match=r"2 files of o/n are of type Q4_0; name one: o/n/a-Q4_0\.gguf, o/n/b"
    ):
        named_variant("o/n", found, "Q4_0")
    with pytest.raises(ModelNotFound, match=r"no GGUF file 'Q5_K_M'; it has: o/n/a-Q4_0\.gguf, .*o/n:Q8_0"):
        named_variant("o/n", found, "Q5_K_M")


@pytest.mark.parametrize("sizes", [SEVEN, {"M-Q2_K.gguf": 2.7}])
def test_nothing_fits_is_one_line_with_the_smallest(sizes):
    with pytest.raises(
        RuvmlxError, match=r"smallest, M-Q2_K\.gguf, has 2\.7 GB; .* 2\.0 GB of weights"
    ) as caught:
        choose_variant("o/n", of(sizes), 3 * GB)
    assert "\n" not in str(caught.value) and "M-Q2_K.gguf" in str(caught.value)


def test_the_choice_is_told_in_lines():
    """One for the chosen file, one for each other."""
    lines = choose_variant("o/n", of(SEVEN), 8 * GB).lines
    assert lines[0] == (
        "o/n: M-Q5_K_M.gguf (5.1 GB), the best that leaves a third of 8.0 GB for the cache and for work."
    )
    assert len(lines) == len(SEVEN) and lines[1] == "  or  Q2_K       2.7 GB  M-Q2_K.gguf"
    assert named_variant("o/n", of(SEVEN), "q2_k").lines[0].endswith("(2.7 GB), as named.")


def test_a_folder_that_is_not_there(tmp_path):
    assert variants_in(tmp_path / "nowhere") == ()
    (tmp_path / "a-Q4_0.gguf").symlink_to(tmp_path / "gone")
    assert variants_in(tmp_path) == ()


def test_what_macos_puts_beside_a_file_is_no_model(tmp_path):
    for name in ("a-Q4_0.gguf", "._a-Q4_0.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert [variant.files for variant in variants_in(tmp_path)] == [("a-Q4_0.gguf",)]
