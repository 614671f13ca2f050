"""Models in several GGUF files: any part opens all of them; what is missing or foreign is named."""

import numpy as np
import pytest

from ruvmlx.errors import CorruptFile, ModelNotFound
from ruvmlx.models.files.gguf_writer import Typed
from ruvmlx.models.load import load_model

from .gguf_writer import u32, write_gguf
from .make_gguf import gguf_metadata, gguf_tensors, make_gguf_model
from .shapes import Shape


def split(folder, count=3, *, empty_first=False, **changed):
    """The model of `make_gguf_model` in parts; changed: keys of the last part."""
    made = Shape()
    tensors = list(gguf_tensors(made, "Q4_1").items())
    starts = np.linspace(0, len(tensors), count + 1 - empty_first).astype(int).tolist()
    starts = [0] * empty_first + starts
    paths = []
    for i in range(count):
        keys = {
            "split.no": Typed(2, i),
            "split.count": Typed(2, count),
            "split.tensors.count": u32(len(tensors)),
        }
        keys = (gguf_metadata(made) if i == 0 else {}) | keys | (changed if i == count - 1 else {})
        path = folder / f"tiny-{i + 1:05}-of-{count:05}.gguf"
        paths.append(write_gguf(path, keys, dict(tensors[starts[i] : starts[i + 1]])))
    return paths


@pytest.mark.parametrize("empty_first", [False, True])
def test_any_part_opens_the_whole_model(tmp_path, empty_first):
    """Weights, name, bytes and fingerprint are those of the model in one file."""
    whole = load_model(str(make_gguf_model(tmp_path / "tiny.gguf", quant="Q4_1")))
    want = dict(whole.load_weights())
    (tmp_path / "parts").mkdir()
    parts = split(tmp_path / "parts", empty_first=empty_first)
    for name in [*parts, tmp_path / "parts"]:
        model = load_model(str(name))
        got = dict(model.load_weights())
        assert got.keys() == want.keys()
        assert all(np.array_equal(got[k], want[k]) for k in want)
        assert (model.name, model.bytes, model.path) == ("tiny", whole.bytes, parts[0])
        assert model.fingerprint == whole.fingerprint


@pytest.mark.parametrize("gone", [[0], [1], [0, 2]])
def test_missing_parts_are_named(tmp_path, gone):
    """Whichever of them is named."""
    parts = split(tmp_path)
    for i in gone:
        parts[i].unlink()
    left = next(p for p in parts if p.is_file())
    with pytest.raises(ModelNotFound) as caught:
        load_model(str(left))
    for i in range(3):
        assert (parts[i].name in str(caught.value).partition("missing")[2]) == (i in gone)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"split.no": Typed(2, 1)}, "part 1 of 3"),
        ({"split.count": Typed(2, 4)}, "part 2 of 4"),
        ({"split.count": Typed(4, 1 << 30)}, "part 2 of 1073741824"),
        ({"split.no": np.array([2, 2], np.int32)}, r"part \[2 2\] of 3"),
        ({"split.count": np.array([3, 3], np.int32)}, r"part 2 of \[3 3\]"),
    ],
)
def test_a_part_of_another_model_is_refused(tmp_path, keys, words):
    parts = split(tmp_path, **keys)
    with pytest.raises(CorruptFile, match=words):
        load_model(str(parts[0]))


def test_a_tensor_too_many_or_too_few_is_refused(tmp_path):
    """Two parts with the same tensor; fewer tensors than the first part promises."""
    parts = split(tmp_path)
    tensors = gguf_tensors(Shape(), "Q4_1")
    keys = {"split.no": Typed(2, 2), "split.count": Typed(2, 3)}
    write_gguf(parts[2], keys, {"token_embd.weight": tensors["token_embd.weight"]})
    with pytest.raises(CorruptFile, match=r"in both tiny-00001-of-00003.gguf and tiny-00003-of-00003.gguf"):
        load_model(str(parts[0]))
    write_gguf(parts[2], keys, {})
    with pytest.raises(CorruptFile, match=r"were expected"):
        load_model(str(parts[0]))


def test_a_list_as_the_number_of_tensors_is_refused(tmp_path):
    """The first part has the number of the tensors of all parts."""
    counts = {"split.count": Typed(2, 2), "split.tensors.count": np.array([9, 9], np.int32)}
    tensors = gguf_tensors(Shape(), "Q4_1")
    first = tmp_path / "tiny-00001-of-00002.gguf"
    write_gguf(first, gguf_metadata(Shape()) | {"split.no": Typed(2, 0)} | counts, tensors)
    write_gguf(tmp_path / "tiny-00002-of-00002.gguf", {"split.no": Typed(2, 1)} | counts, {})
    with pytest.raises(CorruptFile, match=r"\[9 9\] were expected"):
        load_model(str(first))
