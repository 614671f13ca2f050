"""WordPiece and Unigram: the same ids from tokenizer.json, from a GGUF file, and from the library itself."""

import pytest

from ruvmlx.models.load import load_model
from ruvmlx.sona.embedding import text_ids

from .encoder_models import EncoderShape, make_encoder, make_gguf_encoder
from .encoder_vocabularies import PIECES, UNIGRAM, unigram_tokenizer, word_piece_tokenizer

TEXTS = [
    "hello", "The SEA, and the wind!", "singing rivers", "Ünïcödé sea", "海 and 海海", "  two   spaces\n",
    "a" * 90, "sea" * 40, "1,234.5", "don't", "\x00the\u200bsea", "[river]", "🙂 sea", "x", "\u00a0the",
]  # fmt: skip
SPECIALS = ["[CLS] sea [SEP]", "[MASK]", "[PAD][UNK]", "<s> sea </s>", "<mask>"]


@pytest.fixture(scope="module", params=["bert", "xlm-roberta"])
def three(request, tmp_path_factory):
    """(the library's tokenizer, the folder's model, the GGUF file's model)"""
    folder, shape = tmp_path_factory.mktemp("m"), EncoderShape(request.param, context=4000)
    library = unigram_tokenizer() if shape.unigram else word_piece_tokenizer()
    paths = make_encoder(folder / "m", shape), make_gguf_encoder(folder / "m.gguf", shape)
    return library, *(load_model(str(path)) for path in paths)


@pytest.mark.parametrize("text", TEXTS)
def test_ids(three, text):
    """With the tokens before and behind a text that the post-processor of tokenizer.json puts there."""
    library, folder, file = three
    wanted = library.encode(text).ids
    assert len(wanted) > 2
    assert text_ids(folder, text) == wanted
    assert text_ids(file, text) == wanted


@pytest.mark.parametrize("text", SPECIALS)
def test_a_user_types_no_special_token(three, text):
    """The library would find them in any text."""
    _, *models = three
    for model in models:
        first, *ids, last = text_ids(model, text)
        unknown = {PIECES.index("[UNK]"), [piece for piece, _ in UNIGRAM].index("<unk>")}
        allowed = set(range(len(PIECES) + len(UNIGRAM))) - (
            set(model.tokenizer.special_tokens.values()) - unknown
        )
        assert ids and set(ids) <= allowed
        assert {first, last} <= set(model.tokenizer.special_tokens.values())


def test_what_is_unknown_is_one_token(three):
    _, *models = three
    for model in models:
        ids = text_ids(model, "🙂")[1:-1]
        unknown = model.tokenizer.special_tokens[
            "<unk>" if "<unk>" in model.tokenizer.special_tokens else "[UNK]"
        ]
        assert unknown in ids and len(ids) <= 2


def test_ids_become_text_again(three):
    _, *models = three
    for model in models:
        ids = model.tokenizer.encode("singing the sea", add_bos=False)
        assert model.tokenizer.decode(ids) == "singing the sea"


def test_a_vocabulary_with_capitals_keeps_them(tmp_path, monkeypatch):
    """GGUF has no key for this; llama.cpp makes all letters small."""
    from . import encoder_vocabularies

    monkeypatch.setattr(encoder_vocabularies, "PIECES", [*PIECES, "Sea"])
    file = make_gguf_encoder(tmp_path / "m.gguf", EncoderShape())
    tokenizer = load_model(str(file)).tokenizer
    assert tokenizer.encode("Sea", add_bos=False) == [len(PIECES)]
    assert tokenizer.encode("sea", add_bos=False) == [PIECES.index("sea")]
