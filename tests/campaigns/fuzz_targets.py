"""What is fuzzed: for each kind of input its seeds, how it is used, and how mutants of it are made."""

import json
import random
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from ruvmlx.chats import chat_file
from ruvmlx.engine import grammar
from ruvmlx.engine.grammar import Constraint, Vocabulary, compiled_matcher
from ruvmlx.lora import interchange, interchange_reader
from ruvmlx.lora.base_lora import BaseLoRA, place_shape
from ruvmlx.models.config.model import Message
from ruvmlx.models.files.safetensors_file import read_safetensors
from ruvmlx.models.load import load_gguf, load_model
from ruvmlx.models.text.chat_template import ChatTemplate
from ruvmlx.models.text.tokenizer_json import folder_tokenizer
from ruvmlx.models.text.tokenizer_process import ProcessTokenizer
from ruvmlx.models.weights.safetensors_model import open_folder
from ruvmlx.store import Store
from ruvmlx.store.backup import back_up, restore

from ..models import template_mutants
from ..models.gguf_writer import gguf_bytes
from ..models.make_gguf import gguf_metadata, gguf_tensors
from ..models.make_models import make_safetensors_model, safetensors_bytes
from ..models.test_gguf_fuzz import TINY, exercise, spm_metadata
from ..models.vocabularies import CHAT_TEMPLATE
from .mutation import Mutator, byte_mutant, frame, framed_mutant, header_mutant, json_mutant, parts


@dataclass(frozen=True)
class Target:
    """run: uses an input. It may raise a RuvmlxError of one line; anything else is a finding."""

    seeds: list[bytes]
    run: Callable[[bytes], object]
    mutant: Mutator
    close: Callable[[], object] = lambda: None


# -- models ------------------------------------------------------------------------------------------


def gguf(folder: Path) -> Target:
    seeds = [
        gguf_bytes(metadata, gguf_tensors(TINY, kind))
        for metadata, kind in ((gguf_metadata(TINY), "Q4_0"), (spm_metadata(), "Q8_0"))
    ]

    def run(data: bytes) -> None:
        path = folder / "m.gguf"
        path.unlink(missing_ok=True)  # an older mapping keeps its file
        path.write_bytes(data)
        exercise(load_gguf(path))

    return Target(seeds, run, header_mutant(seeds[0].index(b"output_norm.weight") + 400))


def safetensors(folder: Path) -> Target:
    arrays = {"one": np.ones((3, 5), "<f2"), "two": np.zeros((7,), "<f4"), "three": np.ones((2, 4), "<u4")}

    def run(data: bytes) -> None:
        path = folder / "m.safetensors"
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        for tensor in read_safetensors(path).values():
            assert tensor.array().tobytes() == data[tensor.offset : tensor.offset + tensor.nbytes]

    return Target([safetensors_bytes(arrays)], run, header_mutant(260))


def _folder_target(file: str, use: Callable[[Path], object], folder: Path) -> Target:
    """One JSON file of a model's folder."""
    model = make_safetensors_model(folder / "tiny", max_context=512)

    def run(data: bytes) -> None:
        (model / file).write_bytes(data)
        use(model)

    return Target([(model / file).read_bytes()], run, json_mutant)


def _encode(tokenizer: object) -> None:
    for text in ("Hello, world! é 漢字 <|im_end|>", ""):
        ids = tokenizer.encode(text) + tokenizer.encode(text, special=True)
        assert all(0 <= i < tokenizer.vocab_size for i in ids)
        tokenizer.decode(ids)


def tokenizer_settings(folder: Path) -> Target:
    """tokenizer_config.json, beside a sound tokenizer.json: read in this process."""
    return _folder_target("tokenizer_config.json", lambda path: _encode(folder_tokenizer(path)), folder)


def tokenizer(folder: Path) -> Target:
    """tokenizer.json, in a child with limits for each input, as models are opened."""

    def use(path: Path) -> None:
        made = ProcessTokenizer(path)
        try:
            _encode(made)
        finally:
            made._process.close()

    return _folder_target("tokenizer.json", use, folder)


def template(folder: Path) -> Target:
    makers = [template_mutants.Maker(random.Random(seed)) for seed in range(20)]
    seeds = [CHAT_TEMPLATE.encode(), *(maker.template().encode() for maker in makers)]
    said = [Message("system", "Be brief."), Message("user", "a <|im_end|>"), Message("assistant", "b")]

    def run(data: bytes) -> None:
        ChatTemplate(data.decode(errors="replace"), ["<|im_end|>"], "<s>", "</s>").render(said)

    def mutant(data: bytes, rng: random.Random) -> bytes:
        if rng.random() < 0.3:
            return template_mutants.Maker(rng).template().encode()
        at, other = rng.randrange(len(data) + 1), rng.choice(seeds)
        start = rng.randrange(len(other))
        return data[:at] + other[start : start + rng.randrange(60)] + data[at + rng.randrange(30) :]

    return Target(seeds, run, mutant)


# -- what users import -------------------------------------------------------------------------------


def chat(folder: Path) -> Target:
    store = Store(folder / "chats.db")
    rows = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "created": 1.6e9}]
    whole = {"title": "t", "system": "s", "model": "m", "created": 1.6e9, "updated": 1.6e9, "head": 2}
    tree = [row | {"id": n + 1, "parent": n or None} for n, row in enumerate(rows)]
    seeds = [json.dumps(value).encode() for value in (rows, whole | {"messages": tree})]

    def run(data: bytes) -> None:
        found = chat_file.import_once(store, data, "f.json")
        again = json.dumps(chat_file.as_json(store, found.session_id)).encode()
        chat_file.as_markdown(store, found.session_id)
        assert not chat_file.import_once(store, again, "g.json").is_new
        store.chats.delete(found.session_id)

    return Target(seeds, run, json_mutant)


def adapter(folder: Path) -> Target:
    config = load_model(str(make_safetensors_model(folder / "tiny", max_context=512))).config
    rng, pairs, seeds = np.random.default_rng(0), {}, []
    for module in ("q_proj", "down_proj", "embed_tokens"):
        n_in, n_out = place_shape(config, module, 0)
        b = rng.standard_normal((2, n_out)).astype(np.float32)
        pairs[module, 0] = rng.standard_normal((n_in, 2)).astype(np.float32), b
    out = folder / "adapter"
    names = {
        kind: (interchange.CONFIG, interchange.PACKED if bits == 4 else interchange.FILES[kind])
        for kind, bits in (("mlx-lm", 32), ("peft", 32))
    }
    for kind, files in names.items():
        interchange.export(BaseLoRA(pairs, 0.5), config, out, kind, 32)
        seeds.append(bytes([len(seeds)]) + frame(*((out / name).read_bytes() for name in files)))
        shutil.rmtree(out)

    def run(data: bytes) -> None:
        files = list(names.values())[data[0] % len(names)] if data else next(iter(names.values()))
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        for name, part in zip(files, parts(data[1:]), strict=True):
            (out / name).write_bytes(part)
        for pair in interchange_reader.load(out, config).pairs.values():
            assert all(np.isfinite(w).all() for w in pair)

    return Target(seeds, run, lambda data, rng: data[:1] + framed_mutant(data[1:], rng))


def backup(folder: Path) -> Target:
    source, store, given = folder / "source.db", folder / "home" / "ruvmlx.db", folder / "given.db"
    with closing(Store(source)) as made:
        talk = made.chats.new("m", title="t")
        made.messages.add_user(talk, "some words")
    back_up(source, folder / "seed.db")

    def run(data: bytes) -> None:
        given.write_bytes(data)
        shutil.rmtree(store.parent, ignore_errors=True)
        restore(store, given)
        with closing(Store(store)) as opened:
            assert opened.integrity() == "ok"
            opened.chats.all()

    return Target([(folder / "seed.db").read_bytes()], run, byte_mutant)


# -- requests ----------------------------------------------------------------------------------------


def schema(folder: Path) -> Target:
    """Compiled in a child with limits, as the server does it."""
    from llguidance import LLTokenizer

    special = {"<|end|>": 3}
    tokens = LLTokenizer(grammar._Bytes(300, special), slices=LLTokenizer.json_slices())
    vocabulary = Vocabulary(tokens, 300, special)
    texts = [
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a+$", "maxLength": 9}}},
        {"anyOf": [{"type": "integer", "minimum": 0, "multipleOf": 7}, {"enum": ["x", None, 2.5]}]},
        {
            "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1}},
            "$ref": "#/$defs/n",
        },
        {"allOf": [{"required": ["b"]}, {"additionalProperties": {"type": "number"}}], "type": "object"},
    ]

    def run(data: bytes) -> None:
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            return  # the server refuses what is no JSON; that is the target `http`
        compiled_matcher(vocabulary, Constraint.json_schema(found))

    return Target([json.dumps(text).encode() for text in texts], run, json_mutant)


PATHS = [
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages",
    "/v1/messages/count_tokens", "/api/chat", "/api/generate", "/api/embed", "/infill", "/v1/rerank",
    "/v1/ratings", "/tokenize", "/detokenize", "/v1/markdown", "/v1/chats",
]  # fmt: skip


def http(folder: Path) -> Target:
    """A body for an endpoint, which is the first byte. A status of 500 or an internal error is a finding."""
    from ruvmlx.apps.server.access import Access
    from ruvmlx.apps.server.limits import ServerLimits

    from ruvmlx.backends.native.backend import NativeBackend
    from ruvmlx.runtime import Runtime
    from ruvmlx.settings import Settings

    from ..server.conftest import run_server

    tiny = load_model(str(make_safetensors_model(folder / "tiny", max_context=256)))

    def open_it() -> Runtime:
        chosen = Settings(kv_disk=None, adapter="none")
        return Runtime(Store(folder / "http.db"), tiny, NativeBackend(tiny, threads=1), chosen, False)

    server = run_server(open_it, Access([], [], [], []), ServerLimits())
    few = {"model": server.model, "max_tokens": 2, "temperature": 0}
    talk = [{"role": "user", "content": "hi"}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    bodies = [
        few | {"messages": talk, "tools": [tool], "stop": ["x"], "logprobs": True, "stream": True},
        few | {"prompt": ["a", "b"], "logprobs": 1, "echo": False},
        {"model": server.model, "input": ["a", [1, 2]], "encoding_format": "base64"},
        {"model": server.model, "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]}
        | {"max_output_tokens": 2, "text": {"format": {"type": "text"}}},
        few | {"messages": talk, "system": [{"type": "text", "text": "s"}], "thinking": {"type": "disabled"}},
        few | {"messages": talk},
        {"model": server.model, "messages": talk, "options": {"num_predict": 2}, "stream": False},
        {"model": server.model, "prompt": "a", "options": {"num_predict": 2, "seed": 1}, "stream": False},
        {"model": server.model, "input": "a"},
        {"input_prefix": "a", "input_suffix": "b", "n_predict": 2},
        {"model": server.model, "query": "a", "documents": ["b", {"text": "c"}], "top_n": 1},
        {"id": "a", "rating": "up", "note": "n"},
        {"content": "hello", "add_special": True, "with_pieces": True},
        {"tokens": [1, 2, 3]},
        {"text": "# a\n\n* b"},
        {"title": "t"},
    ]

    def run(data: bytes) -> None:
        path = PATHS[data[0] % len(PATHS)] if data else PATHS[0]
        answer = server.ask("POST", path, data[1:])
        log = server.log.getvalue()
        server.log.seek(0)
        server.log.truncate()
        assert answer.status != 500 and b"internal" not in answer.body, (path, answer.body[:300])
        assert "Traceback" not in log and "internal error" not in log, log[-2000:]

    seeds = [bytes([n]) + json.dumps(body).encode() for n, body in enumerate(bodies)]
    return Target(seeds, run, lambda data, rng: data[:1] + json_mutant(data[1:], rng), server.stop)


TARGETS: dict[str, Callable[[Path], Target]] = {
    "gguf": gguf,
    "safetensors": safetensors,
    "config": partial(_folder_target, "config.json", partial(open_folder, name="m")),
    "tokenizer-settings": tokenizer_settings,
    "tokenizer": tokenizer,
    "template": template,
    "chat": chat,
    "adapter": adapter,
    "backup": backup,
    "schema": schema,
    "http": http,
}
