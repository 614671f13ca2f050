"""Models that are trained to embed texts: how they are known, and what their vectors are."""

import json

import numpy as np
import pytest

from ruvmlx.backends.reference import ReferenceBackend
from ruvmlx.engine import GenerationRequest
from ruvmlx.errors import UsageError
from ruvmlx.models.find.local import survey
from ruvmlx.models.load import load_model
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings
from ruvmlx.sona import embedding
from tests.models.encoder_models import EncoderShape, encoder_weights, make_encoder
from tests.models.gguf_writer import u32, write_gguf
from tests.models.make_gguf import gguf_metadata, gguf_tensors
from tests.models.make_models import make_safetensors_model, safetensors_bytes
from tests.models.shapes import Shape, random_weights
from tests.oracles.encoder import vector_ref

SHAPE = {"family": "qwen3", "max_context": 900}


def make_embedder(folder, pooling=None, saved_whole=True, **shape):
    """A random folder. pooling: of 1_Pooling/config.json. saved_whole: with an output head."""
    shape = SHAPE | shape
    make_safetensors_model(folder, **shape)
    if not saved_whole:
        weights = random_weights(Shape(**shape).config(), 0)
        bare = {name.removeprefix("model."): w for name, w in weights.items() if "lm_head" not in name}
        half = {name: w.astype(np.float16) for name, w in bare.items()}
        (folder / "model.safetensors").write_bytes(safetensors_bytes(half))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


LAST = {"pooling_mode_lasttoken": True}
MEAN = {"pooling_mode_lasttoken": False, "pooling_mode_mean_tokens": True}


@pytest.mark.parametrize(
    ("name", "pooling", "family", "embeds"),
    [
        ("m", LAST, "qwen3", True),
        ("m", LAST, "qwen2", True),
        ("m", MEAN, "qwen3", False),
        ("m", None, "qwen3", False),
        ("Qwen3-Embedding-0.6B-4bit", None, "qwen3", True),
        ("Qwen3-Embedding-0.6B-4bit", MEAN, "qwen3", False),
        ("m", LAST, "llama", False),
    ],
)
def test_folders(tmp_path, name, pooling, family, embeds):
    folder = make_embedder(tmp_path / name, pooling, family=family)
    assert survey(name, folder).embeds is embeds
    assert load_model(str(folder)).embeds is embeds


@pytest.mark.parametrize(
    ("pooling", "embeds"),
    [(u32(3), True), (u32(1), False), (np.array([3, 3], np.int32), False), (None, False)],
)
def test_gguf_files(tmp_path, pooling, embeds):
    made, file = Shape(**SHAPE), tmp_path / "m.gguf"
    metadata = gguf_metadata(made) | ({} if pooling is None else {"qwen3.pooling_type": pooling})
    write_gguf(file, metadata, gguf_tensors(made, "Q8_0"))
    assert survey("m", file).embeds is load_model(str(file)).embeds is embeds


@pytest.fixture
def open_model(tmp_path, monkeypatch):
    """opened(folder) -> a runtime."""
    monkeypatch.setenv("RUVMLX_HOME", str(tmp_path / "home"))
    return lambda folder: Runtime.open(
        Settings(model=str(folder), backend="native", threads=1, adapter="none", kv_disk=None), learn=False
    )


def test_the_vector_is_the_state_of_the_end_behind_the_text(tmp_path, open_model, monkeypatch):
    """In one context, also in several slices; of length 1."""
    monkeypatch.setattr(embedding, "SLICE", 0.0)
    text = "the sea and the wind " * 50
    with open_model(make_embedder(tmp_path / "m", LAST)) as runtime:
        [vector] = runtime.embed([text])
        ids = runtime.model.tokenizer.encode(text, add_bos=False)
        assert len(ids) > embedding.WINDOW
        state = ReferenceBackend(runtime.model).hidden_states([*ids, 0])[-1]
        assert vector @ state / np.linalg.norm(state) > 0.9995
        assert vector.shape == (64,) and np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)
        assert "trained for it" in embedding.method_of(runtime.model)


def test_a_model_that_was_saved_without_a_head(tmp_path, open_model):
    """Its tensors have no prefix, and its config says that the head is not tied. The vectors are the same."""
    found = []
    for name, whole in (("whole", True), ("bare", False)):
        with open_model(make_embedder(tmp_path / name, LAST, saved_whole=whole)) as runtime:
            found.append(runtime.embed(["hello and the sea"])[0])
    np.testing.assert_array_equal(*found)


def test_a_text_longer_than_the_context_is_refused(tmp_path, open_model):
    with open_model(make_embedder(tmp_path / "m", LAST)) as runtime:
        assert len(runtime.embed(["a" * 899])) == 1
        with pytest.raises(UsageError, match="more than 899 tokens"):
            runtime.embed(["a" * 900])


def test_what_the_tokenizer_puts_behind_a_text_is_there_once(tmp_path):
    """Qwen's tokenizers end each text themselves, as a post processor says."""
    folder = make_embedder(tmp_path / "m", LAST)
    file = folder / "tokenizer.json"
    data = json.loads(file.read_text())
    end = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    known = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}
    single = [{"Sequence": {"id": "A", "type_id": 0}}, end]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    data["post_processor"] = {
        "type": "Sequence",
        "processors": [
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
            {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": known},
        ],
    }
    file.write_text(json.dumps(data))
    ids = embedding.text_ids(load_model(str(folder)), "hello")
    assert ids.count(0) == 1 and ids[-1] == 0


@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "nomic_bert"])
def test_a_runtime_holds_an_encoder(tmp_path, open_model, family):
    """It has no adapter, learns nothing, and refuses to write; its memory is planned."""
    shape = EncoderShape(family)
    with open_model(make_encoder(tmp_path / "m", shape, "mean")) as runtime:
        texts = ["the sea and the wind", "hello"]
        ids = [embedding.text_ids(runtime.model, text) for text in texts]
        wanted = [vector_ref(shape, encoder_weights(shape), each, "mean") for each in ids]
        np.testing.assert_allclose(runtime.embed(texts), wanted, atol=3e-5)
        assert embedding.method_of(runtime.model) == "mean of the states, by m, an encoder"
        assert runtime.learner is None and runtime.adapters() == [] and not runtime.learning.is_due()
        planned = {row.name: row.planned for row in runtime.memory_purposes()}
        assert planned["kv"] == planned["learning"] == 0 < planned["scratch"]
        assert planned["weights"] == runtime.backend.nbytes
        with pytest.raises(UsageError, match="m embeds texts and writes none"):
            list(runtime.writer.generate(GenerationRequest(prompt="hello", max_new_tokens=1)))
        with pytest.raises(UsageError, match="m embeds texts and writes none"):
            runtime.chats.check_chat(runtime.chats.new_chat(None))


def test_a_setting_for_an_adapter_changes_nothing_of_an_encoder(tmp_path, monkeypatch):
    monkeypatch.setenv("RUVMLX_HOME", str(tmp_path / "home"))
    settings = Settings(model=str(make_encoder(tmp_path / "m", EncoderShape())), adapter="mine")
    with Runtime.open(settings) as runtime:
        assert runtime.learner is None and len(runtime.embed(["sea"])[0]) == 40


def test_the_longest_text_of_an_encoder_has_room_for_its_two_tokens(tmp_path, open_model):
    with open_model(make_encoder(tmp_path / "m", EncoderShape())) as runtime:
        assert len(runtime.embed(["sea " * 35])) == 1
        with pytest.raises(UsageError, match="more than 35 tokens"):
            runtime.embed(["sea " * 36])
        with pytest.raises(UsageError, match="empty"):
            runtime.embed([" "])


def test_a_slice_is_about_as_long_as_asked(monkeypatch):
    """What yields often yields to other work only when a slice of time has passed."""
    now = iter(np.arange(0, 10, 0.02))
    monkeypatch.setattr(embedding.time, "perf_counter", lambda: next(now))

    def steps():
        for _ in range(30):
            yield
        return "done"

    pauses, work = 0, embedding.slices(steps())
    with pytest.raises(StopIteration, match="done"):
        while True:
            next(work)
            pauses += 1
    assert pauses == 10
