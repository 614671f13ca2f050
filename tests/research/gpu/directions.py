"""Compute the directions of the starter's measures from tens of thousands of replies, on a GPU:

    python3 -m tests.research.gpu.directions STARTER.gguf DATA OUT [--rounds 4]

A round has 64 replies to each of the 98 questions. More rounds give surer directions. For 1, 2, 4 .. rounds,
the program prints the mean correlation of the predicted changes with the measures, on replies to 64 other
questions. The file `directions.npz` in OUT gets the head's directions, the style basis, and what `ship` needs
besides.
"""

import argparse
import importlib.util
import pickle
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

EACH = 64  # replies to each question in a round
BATCH, GRADIENTS = 1024, 256  # sequences that are written, and differentiated, at once
HEAD_RIDGE, BODY_RIDGE = 3.0, 2.0  # the best of 1, 3, 10 and of 0.5, 2, 8 on questions that are left out
LEFT_OUT = 999  # the number of the round of replies to the questions that are left out


def measures() -> ModuleType:
    """Return ruvmlx's module of measures. Its package needs libraries that the GPU's machine lacks, but the
    module itself needs NumPy alone."""
    path = Path(__file__).parents[3] / "ruvmlx" / "sona" / "taste_measures.py"
    spec = importlib.util.spec_from_file_location("taste_measures", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["taste_measures"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure(reply: tuple[str, bool]) -> np.ndarray:
    found = sys.modules.get("taste_measures") or measures()
    return found.measure_text(*reply).astype(np.float32)


@dataclass(frozen=True)
class Bank:
    """n replies: the index of each one's question [n], its measures [n, M] and number of tokens [n], and its
    gradients by the head's lora_b [n, A] and by all lora_b of the style basis [n, P]."""

    question: np.ndarray
    measures: np.ndarray
    tokens: np.ndarray
    head: np.ndarray
    body: np.ndarray

    def cut(self, count: int) -> "Bank":
        return Bank(*(getattr(self, name)[:count] for name in self.__dataclass_fields__))


class Sampler:
    """Writes replies to prompts in batches, and differentiates them."""

    def __init__(self, gguf: Path, data: dict[str, Any]):
        from .llama import PROMPT, Inputs, Llama

        self._data, self._places = data, PROMPT
        self.llama = Llama(gguf, Inputs.of(data))

    def round(self, prompts: Sequence[Sequence[int]], number: int) -> Bank:
        """Write EACH replies to each prompt."""
        parts = list(self._batches(prompts, number))
        questions, replies, head, body = (
            [row for part in parts for row in part[i]] if i == 1 else np.concatenate([p[i] for p in parts])
            for i in range(4)
        )
        with ProcessPoolExecutor(mp_context=get_context("forkserver")) as pool:
            found = np.stack(
                list(pool.map(measure, [(text, ended) for text, ended, _ in replies], chunksize=256))
            )
        return Bank(questions, found, np.array([count for *_, count in replies]), head, body)

    def _batches(self, prompts: Sequence[Sequence[int]], number: int) -> Iterator[tuple]:
        import jax

        at_once, eos = max(1, BATCH // EACH), set(self._data["eos"])
        for begin in range(0, len(prompts), at_once):
            some = list(range(begin, min(len(prompts), begin + at_once)))
            filled = some + [some[-1]] * (at_once - len(some))
            tokens = np.stack([np.pad(prompts[i], (0, self._places - len(prompts[i]))) for i in filled])
            length = np.array([len(prompts[i]) for i in filled])
            state, k, v = self.llama.read(tokens.astype(np.int32), length, EACH)
            tokens, length = np.repeat(tokens, EACH, 0), np.repeat(length, EACH)
            key = jax.random.PRNGKey(number * 1000 + begin)
            drawn, written, ended, head, slope = self.llama.write(state, k, v, length, key)
            body = [
                np.asarray(
                    self.llama.reply_gradients(
                        *(array[i : i + GRADIENTS] for array in (tokens, length, drawn, slope))
                    ),
                    np.float16,
                )
                for i in range(0, len(some) * EACH, GRADIENTS)
            ]
            drawn, written, ended = np.asarray(drawn), np.asarray(written), np.asarray(ended)
            replies = []
            for row in range(len(some) * EACH):
                ids = [int(t) for t in drawn[row][written[row] > 0] if int(t) not in eos]
                text = b"".join(self._data["bytes"][i] for i in ids).decode("utf-8", "replace")
                replies.append((text, bool(ended[row]), len(ids)))
            count = len(replies)
            yield (
                np.repeat(some, EACH),
                replies,
                np.asarray(head[:count], np.float16),
                np.concatenate(body)[:count],
            )


def centre(rows: np.ndarray, question: np.ndarray) -> np.ndarray:
    """Return rows [n, k] in float32, minus their means over the replies to each question."""
    rows = np.array(rows, np.float32)
    for one in np.unique(question):
        rows[question == one] -= rows[question == one].mean(axis=0)
    return rows


def head_directions(bank: Bank) -> np.ndarray:
    """Return the coefficients [M, A] of the ridge regression of the measures on the head's gradients."""
    import jax.numpy as jnp

    gradients, values = (jnp.asarray(centre(rows, bank.question)) for rows in (bank.head, bank.measures))
    gram = gradients.T @ gradients
    ridge = HEAD_RIDGE * jnp.trace(gram) / len(gradients)
    return np.asarray(jnp.linalg.solve(gram + ridge * jnp.eye(len(gram)), gradients.T @ values)).T


def body_directions(bank: Bank, prose: np.ndarray, rows: int) -> np.ndarray:
    """Return the style basis's directions [M, P] (style_basis.py). prose: [m, P], gradients of prose; rows:
    the number of rows of all lora_b."""
    import jax.numpy as jnp

    square = (bank.body[:6000].astype(np.float32) ** 2).mean(axis=0).reshape(rows, -1).mean(axis=1)
    weight = jnp.asarray(np.repeat(1 / np.maximum(square, 1e-12), prose.shape[1] // rows).astype(np.float32))
    gradients, values = (jnp.asarray(centre(rows, bank.question)) for rows in (bank.body, bank.measures))
    kernel, count = (gradients * weight) @ gradients.T, len(gradients)
    size = jnp.trace(kernel) / count
    found = (
        (jnp.linalg.solve(kernel / size + BODY_RIDGE * jnp.eye(count), values).T @ gradients) * weight / size
    )
    outside = jnp.asarray(prose) * weight
    changes = outside @ jnp.asarray(prose).T
    changes += 1e-6 * jnp.trace(changes) / len(changes) * jnp.eye(len(changes))
    return np.asarray(found - jnp.linalg.solve(changes, jnp.asarray(prose) @ found.T).T @ outside)


def correlation(rise: np.ndarray, values: np.ndarray) -> float:
    """Return the mean over the measures of the correlation of rise [n, M] with values [n, M]."""
    both = np.sqrt(np.maximum((rise**2).sum(axis=0) * (values**2).sum(axis=0), 1e-12))
    return float(((rise * values).sum(axis=0) / both).mean())


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("gguf", type=Path)
    ask.add_argument("data", type=Path)
    ask.add_argument("out", type=Path)
    ask.add_argument("--rounds", type=int, default=4)
    given, started = ask.parse_args(), time.time()
    import jax

    data = pickle.loads(given.data.read_bytes())
    sampler = Sampler(given.gguf, data)
    texts = data["prose"]
    prose = np.concatenate(
        [np.asarray(sampler.llama.prose_gradients(texts[i : i + 8])) for i in range(0, len(texts), 8)]
    )
    left_out = sampler.round(data["left_out"], LEFT_OUT)
    banks = []
    for number in range(given.rounds):
        banks.append(sampler.round(data["prompts"], number))
        print(f"round {number}: {len(banks[-1].question)} replies, {time.time() - started:.0f} s", flush=True)
    bank = Bank(*(np.concatenate([getattr(b, n) for b in banks]) for n in Bank.__dataclass_fields__))
    values, per_round = centre(left_out.measures, left_out.question), len(banks[0].question)
    rows = data["lora_a"].shape[0] * data["lora_a"].shape[2]
    with jax.default_matmul_precision("highest"):
        for rounds in sorted({min(2**i, given.rounds) for i in range(given.rounds)}):
            some = bank.cut(rounds * per_round)
            head, body = head_directions(some), body_directions(some, prose, rows)
            rises = [
                centre(gradients, left_out.question) @ found.T
                for gradients, found in ((left_out.head, head), (left_out.body, body))
            ]
            print(
                f"{rounds * EACH} replies to each question: correlation with the measures "
                f"{correlation(rises[0], values):.3f} (head), {correlation(rises[1], values):.3f} (style "
                f"basis), {time.time() - started:.0f} s",
                flush=True,
            )
    np.savez(
        given.out / "directions.npz", movable=data["movable"], head=head, lora_a=data["lora_a"],
        body=body.astype(np.float16), rise=rises[1], measures=values, tokens=left_out.tokens,
    )  # fmt: skip


if __name__ == "__main__":
    main()
