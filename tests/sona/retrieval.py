"""How often an embedding finds the right one of 200 paragraphs by a question in other words.

    uv run python -m tests.sona.retrieval [--model MODEL] [--window TOKENS]

First: how much one word changes the embedding of a text of LONG tokens, and the time of 64 texts beside
their prefill. A model of BERT's kind (an encoder) has no such lines, and reads only the beginning of a text
that is too long for it. The paragraphs are of this project's documentation of November 2026
(paragraphs.json). Beside ours: the plain mean of the same hidden states; and, for a GGUF file where
llama-cpp-python is installed (--group oracle), its mean pooling of the same model.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from ruvmlx.errors import TextTooLong
from ruvmlx.models.config.encoder import EncoderConfig
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings
from ruvmlx.sona import embedding

LONG, CHANGED, OTHER = 4000, 16, "volcano"  # tokens of a text; words of it that are replaced; by this one
Embed = Callable[[str], np.ndarray]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="the starter model by default")
    parser.add_argument("--window", type=int, default=embedding.WINDOW, help="tokens read in one context")
    given = parser.parse_args()
    embedding.WINDOW = given.window
    data = json.loads((Path(__file__).parent / "paragraphs.json").read_text(encoding="utf-8"))
    paragraphs, questions = data["paragraphs"], data["questions"]
    # The whole documentation as texts of ten paragraphs: a question's answer is anywhere in one of them.
    chunks = ["\n\n".join(paragraphs[i : i + 10]) for i in range(0, len(paragraphs), 10)]
    asked, right = [q["text"] for q in questions], np.array([q["paragraph"] for q in questions])
    with Runtime.open(Settings(model=given.model, adapter="none", kv_disk=None), learn=False) as runtime:
        ways = {"ours": ours(runtime)}
        if not isinstance(runtime.model.shape, EncoderConfig):
            show_costs(runtime, " ".join(paragraphs))
            ways["plain mean"] = plain_mean(runtime)
        if runtime.model.format == "gguf" and find_spec("llama_cpp"):
            ways["llama.cpp"] = mean_of_llama_cpp(runtime.model.path)
        for name, embed in ways.items():
            begun = time.process_time()
            vectors = unit([embed(text) for text in asked])
            print(
                f"{name:<11}",
                shares("paragraph", vectors, unit([embed(t) for t in paragraphs]), right),
                end="",
            )
            print(";", shares("chunk", vectors, unit([embed(t) for t in chunks]), right // 10), end="")
            print(f"  ({time.process_time() - begun:.0f} s of processor time)", flush=True)


def show_costs(runtime: Runtime, text: str) -> None:
    change, tokens = least_change(runtime, text)
    print(f"a word of a text of {tokens} tokens changes its vector by {change:.1e} or more", flush=True)
    print(f"64 texts of 90 tokens take {cost_of_texts(runtime, text):.2f} times their prefill", flush=True)


def least_change(runtime: Runtime, text: str) -> tuple[float, int]:
    """(the smallest distance between the vector of a text of LONG tokens and that of the text with one other
    word, the text's tokens). The words lie at equal steps from the first to the last one."""
    encode, words = runtime.model.tokenizer.encode, text.split()
    count = next(n for n in range(LONG // 4, len(words), 10) if len(encode(" ".join(words[:n]))) >= LONG)
    words = words[:count]
    whole, distances = runtime.embed([" ".join(words)])[0], list[float]()
    for place in np.linspace(0, count - 1, CHANGED).astype(int):
        other = [*words[:place], OTHER, *words[place + 1 :]]
        distances.append(float(np.linalg.norm(runtime.embed([" ".join(other)])[0] - whole)))
    return min(distances), len(encode(" ".join(words)))


def cost_of_texts(runtime: Runtime, text: str) -> float:
    """The processor time of embedding 64 texts of 90 tokens, for each second of their prefill."""
    tokenizer, backend = runtime.model.tokenizer, runtime.backend
    ids = tokenizer.encode(text)
    texts = [tokenizer.decode(ids[90 * i : 90 * i + 90]) for i in range(64)]
    begun = time.process_time()
    runtime.embed(texts)
    embedded = time.process_time()
    for part in texts:
        backend.prefill(embedding.text_ids(runtime.model, part), backend.new_cache())
    return (embedded - begun) / (time.process_time() - embedded)


def ours(runtime: Runtime) -> Embed:
    def embed(text: str) -> np.ndarray:
        while True:
            try:
                return runtime.embed([text])[0]
            except TextTooLong:
                text = text[: len(text) // 2]

    return embed


def plain_mean(runtime: Runtime) -> Embed:
    """The mean of the final hidden states of all tokens, read in one context."""

    def embed(text: str) -> np.ndarray:
        return runtime.backend.embed(runtime.model.tokenizer.encode(text))

    return embed


def mean_of_llama_cpp(path: Path) -> Embed:
    """What llama.cpp's mean pooling makes of a text, read in one context."""
    import llama_cpp

    peer = llama_cpp.Llama(
        str(path), embedding=True, pooling_type=llama_cpp.LLAMA_POOLING_TYPE_MEAN,
        n_ctx=8192, n_batch=8192, n_ubatch=8192, n_threads=2, verbose=False,
    )  # fmt: skip
    return lambda text: np.array(peer.embed(text), np.float32)


def unit(vectors: Sequence[np.ndarray]) -> np.ndarray:
    found = np.array(vectors)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def shares(what: str, questions: np.ndarray, texts: np.ndarray, right: np.ndarray) -> str:
    """How often the right text is the nearest, and among the nearest five."""
    order = np.argsort(-(questions @ texts.T), axis=1)
    places = np.argmax(order == right[:, None], axis=1)
    first, five = np.mean(places == 0), np.mean(places < 5)
    return f"{what} of {len(texts)}: first {first:.0%}, of five {five:.0%}"


if __name__ == "__main__":
    main()
