"""tekken.json against mistral-common: ids, texts, special tokens and rendered conversations."""

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest

from ruvmlx.errors import CorruptFile, RuvmlxError, UnsupportedModel
from ruvmlx.models.config.model import Message
from ruvmlx.models.load import load_model
from ruvmlx.models.text.mistral_template import VERSIONS
from ruvmlx.models.text.tekken import TekkenTokenizer
from ruvmlx.models.text.tokenizer_json import folder_tokenizer
from ruvmlx.models.weights.hf_write import write_companions

from .make_models import make_safetensors_model
from .mistral_data import conversations, encoder, mistral_file, tekken_of_version, tools
from .texts import varied_texts

SMALL_SPECIALS = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[THINK]", "[/THINK]", "[SYSTEM_PROMPT]",
                  "[/SYSTEM_PROMPT]"]  # fmt: skip


def small_tekken(**changes: Any) -> dict[str, Any]:
    """A tekken.json of 12 special tokens, 256 bytes and a few words."""
    words = [bytes([b]) for b in range(256)] + [b"th", b"the", b" t", b" the", b"he"]
    vocab = [
        {"rank": i, "token_bytes": base64.b64encode(word).decode(), "token_str": None}
        for i, word in enumerate(words)
    ]
    config = {
        "pattern": r" ?\p{L}+|\s+|[^\s\p{L}]+",
        "num_vocab_tokens": len(words),
        "default_vocab_size": len(words) + 12,
        "default_num_special_tokens": 12,
        "version": "v13",
    }
    special = [{"rank": i, "token_str": t, "is_control": True} for i, t in enumerate(SMALL_SPECIALS)]
    return {"config": config | changes.pop("config", {}), "vocab": vocab, "special_tokens": special} | changes


def write_tekken(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tekken.json").write_text(json.dumps(small_tekken(**changes)))
    return folder


# Without mistral-common -----------------------------------------------------------------------------


def test_a_folder_with_only_tekken_json(tmp_path):
    """Its tokenizer reads, writes and ends; [THINK] is text, everything else that is special is not."""
    tokenizer = folder_tokenizer(write_tekken(tmp_path / "m"), [7])
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eos_ids) == (1, 2, {2, 7})
    assert tokenizer.vocab_size == 273
    assert tokenizer.encode("the") == [1, 12 + 257]
    for text in varied_texts(SMALL_SPECIALS[:5]):
        ids = tokenizer.encode(text, add_bos=False)
        assert tokenizer.decode(ids) == text and min(ids, default=12) >= 12
    assert tokenizer.encode("[THINK]the[/THINK]", add_bos=False) == [5, 12 + 257, 6]
    assert tokenizer.token_bytes(5) == b"[THINK]" and tokenizer.token_bytes(2) == b""
    assert tokenizer.token_bytes(11) == b""  # kept for a special token that the file does not name


def test_the_lowest_rank_is_merged_first(tmp_path):
    """ "th" (256) before "he" (260), though "he" would also be a token."""
    tokenizer = folder_tokenizer(write_tekken(tmp_path / "m"))
    assert tokenizer.encode("thex", add_bos=False) == [12 + 257, 12 + ord("x")]
    assert tokenizer.encode("hex the", add_bos=False) == [12 + 260, 12 + ord("x"), 12 + 259]


def test_a_model_opens_with_it(tmp_path):
    """A whole folder without tokenizer.json; one with chat_template.jinja has its own form."""
    folder = make_safetensors_model(tmp_path / "m", vocab_size=300)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    write_tekken(folder)
    chat = [Message("system", "S"), Message("user", "the")]
    ids = load_model(str(folder)).tokenizer.encode_chat(chat)
    assert ids == [1, 7, 12 + ord("S"), 8, 3, 12 + 257, 4]
    (folder / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    assert load_model(str(folder)).tokenizer.encode_chat(chat[1:]) == [1, 12 + 257]


def test_it_goes_with_a_written_model(tmp_path):
    """`adapters fuse` writes the files beside the weights into another folder."""
    folder = make_safetensors_model(tmp_path / "m", vocab_size=300)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    write_tekken(folder)
    (tmp_path / "out").mkdir()
    write_companions(load_model(str(folder)), tmp_path / "out")
    assert (tmp_path / "out" / "tekken.json").read_bytes() == (folder / "tekken.json").read_bytes()


def test_tokenizer_json_goes_first(tmp_path):
    """A converted folder often keeps both."""
    folder = make_safetensors_model(tmp_path / "m", vocab_size=300)
    write_tekken(folder)
    assert not isinstance(load_model(str(folder)).tokenizer, TekkenTokenizer)


def broken_files() -> dict[str, dict[str, Any]]:
    good = small_tekken()
    swapped = [good["vocab"][1], good["vocab"][0], *good["vocab"][2:]]
    twice = [*good["vocab"][:-1], good["vocab"][-2] | {"rank": 260}]
    junk = [*good["vocab"][:-1], {"rank": 260, "token_bytes": "!"}]
    special = good["special_tokens"]
    return {
        "no config": {"config": None},
        "no sizes": {"config": {"default_vocab_size": None}},
        "text for a size": {"config": {"default_vocab_size": "many"}},
        "more special tokens than tokens": {"config": {"default_num_special_tokens": 260}},
        "no special tokens": {"config": {"default_num_special_tokens": 0}},
        "endless": {"config": {"default_vocab_size": 10**12}},
        "no pattern": {"config": {"pattern": None}},
        "bad pattern": {"config": {"pattern": "(("}},
        "no vocab": {"vocab": None},
        "short vocab": {"vocab": good["vocab"][:-1]},
        "out of order": {"vocab": swapped},
        "a token twice": {"vocab": twice},
        "not base64": {"vocab": junk},
        "not objects": {"vocab": [1] * 261},
        "no bytes": {"vocab": [{"rank": i} for i in range(261)]},
        "a special token twice": {"special_tokens": [*special, special[0]]},
        "a rank twice": {"special_tokens": [*special, {"rank": 3, "token_str": "x"}]},
        "a rank too high": {"special_tokens": [*special, {"rank": 12, "token_str": "x"}]},
        "special tokens in no list": {"special_tokens": {"a": 1}},
        "no end": {"special_tokens": special[:2]},
        "an effort nobody knows": {
            "model_settings_builder": {"reasoning_effort": {"values": ["{{ 1 }}"], "default": "{{ 1 }}"}}
        },
    }


@pytest.mark.parametrize("case", sorted(broken_files()))
def test_a_broken_file_is_one_line(case, tmp_path):
    """Whatever is wrong with the file."""
    changes = broken_files()[case]
    if changes == {"config": None}:
        (tmp_path / "tekken.json").write_text(json.dumps(small_tekken() | changes))
    else:
        write_tekken(tmp_path, **changes)
    with pytest.raises(CorruptFile, match=r"tekken\.json") as caught:
        folder_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_mutants_load_or_are_one_line(tmp_path):
    """1,000 damaged files: bytes changed, cut out or doubled."""
    rng, whole = random.Random(4), json.dumps(small_tekken()).encode()
    spots = [i for word in (b"config", b"special_tokens", b"token_bytes") for i in [whole.index(word)]]
    loaded = 0
    for _ in range(1000):
        at, data = rng.choice(spots) + rng.randrange(300), bytearray(whole)
        data[at : at + rng.randrange(4)] = rng.choice(
            [b"", b"9", b"-1", b"null", b'"', b"{}", data[at : at + 9]]
        )
        (tmp_path / "tekken.json").write_bytes(data)
        try:
            tokenizer = folder_tokenizer(tmp_path)
            assert tokenizer.decode(tokenizer.encode("the end", add_bos=False)) is not None
            loaded += 1
        except RuvmlxError as error:
            assert "\n" not in str(error)
    assert 0 < loaded < 1000


def test_an_unknown_form_needs_a_template(tmp_path):
    """A version that we have no form for is refused, unless the folder has a template."""
    folder = write_tekken(tmp_path, config={"version": "v99"})
    with pytest.raises(UnsupportedModel, match=r"version 'v99'.*chat_template\.jinja"):
        folder_tokenizer(folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert folder_tokenizer(folder).encode_chat([Message("user", "the")]) == [1, 12 + 257]


# Against mistral-common -----------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["tekken_240718.json", "tekken_240911.json"])
def pair(request):
    """mistral-common's reader and ours of a real file."""
    tekken = pytest.importorskip(
        "mistral_common.tokens.tokenizers.tekken", reason="mistral-common is the oracle"
    )
    path = mistral_file(request.param)
    return tekken.Tekkenizer.from_file(path), TekkenTokenizer(path)


def test_same_ids_and_text_as_mistral_common(pair):
    """A thousand texts; special tokens in them stay text."""
    theirs, ours = pair
    for text in varied_texts(ours.special_tokens):
        want = theirs.encode(text, bos=False, eos=False)
        assert ours.encode(text, add_bos=False) == want, repr(text)
        assert ours.decode(want) == theirs.decode(want) == text
    assert ours.encode("a") == theirs.encode("a", bos=True, eos=False)


def test_every_token_has_mistral_commons_bytes(pair):
    """All 131,072 of them; and the special tokens have the same ids."""
    theirs, ours = pair
    assert ours.vocab_size == theirs.n_words
    assert [ours.token_bytes(i) for i in range(theirs.n_words)] == [
        theirs.id_to_byte_piece(i) for i in range(theirs.n_words)
    ]
    for text, i in ours.special_tokens.items():
        assert theirs.get_special_token(text) == i
    assert ours.eos_ids == {theirs.eos_id} and ours.bos_id == theirs.bos_id


def test_any_bytes_decode_alike(pair):
    """Ids in any order, also those whose bytes are no UTF-8."""
    theirs, ours = pair
    rng = random.Random(3)
    for _ in range(200):
        ids = [rng.randrange(1000, theirs.n_words) for _ in range(rng.randrange(1, 12))]
        assert ours.decode(ids) == theirs.decode(ids)


@pytest.fixture(scope="module", params=VERSIONS)
def chatting(request, tmp_path_factory):
    """mistral-common's encoder of conversations, and our tokenizer, of a file of each version."""
    pytest.importorskip("mistral_common", reason="mistral-common is the oracle")
    path = tekken_of_version(request.param, tmp_path_factory.mktemp("v") / "tekken.json")
    return request.param, encoder(path), TekkenTokenizer(path)


def test_conversations_are_mistral_commons(chatting):
    """System texts, several turns, thoughts, spaces at ends, special tokens in what was typed."""
    version, theirs, ours = chatting
    for name, messages in conversations(version).items():
        assert ours.encode_chat(messages) == theirs(messages), name


def test_tools_are_mistral_commons(chatting):
    """Definitions, calls with and without text, results: where each version has them, and how."""
    version, theirs, ours = chatting
    for name, messages in conversations(version, with_tools=True).items():
        assert ours.encode_chat(messages, tools=tools()) == theirs(messages, tools()), name


def test_efforts_are_mistral_commons(tmp_path):
    """v15: thinking asks for the most or the least effort; without a wish the file's default holds."""
    pytest.importorskip("mistral_common", reason="mistral-common is the oracle")
    efforts = {"type": "enum", "values": ["none", "high"], "accepts_none": True, "default": "none"}
    path = tekken_of_version(
        15, tmp_path / "tekken.json", model_settings_builder={"reasoning_effort": efforts}
    )
    theirs, ours = encoder(path), TekkenTokenizer(path)
    for messages in conversations(15).values():
        for thinking, effort in ((None, None), (True, "high"), (False, "none")):
            want = theirs(messages, reasoning_effort=effort)
            assert ours.encode_chat(messages, thinking=thinking) == want
