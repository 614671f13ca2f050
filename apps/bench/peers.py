"""This module runs the peers: the other runtimes with which ruvmlx is compared, llama.cpp and mlx-lm. All
runtimes have the same weights, and the benchmark measures them in turns."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ruvmlx.errors import RuvmlxError
from ruvmlx.lora.base_lora import BaseLoRA
from ruvmlx.lora.fuse import fuse
from ruvmlx.models.load import load_model

from .stage import OnStage

NAMES = ("llama.cpp", "mlx-lm")
# llama.cpp is measured with several settings, because its fastest setting depends on the processor and the
# build.
LAYOUTS: dict[str, dict[str, Any]] = {"": {}, " without repacking": {"repack": False}}
CACHES: dict[str, dict[str, Any]] = {
    "": {},
    " flash": {"flash": True},
    " flash q8_0": {"flash": True, "kv": "q8_0"},
}
# llama.cpp can store the KV caches of several sequences separately, or in one buffer.
BUFFERS: dict[str, dict[str, Any]] = {"": {}, " unified": {"unified": True}}


class Peers:
    """The peers that the user asked for. absent: {name of a peer: the reason why the peer is not
    measured}."""

    def __init__(self, wanted: Sequence[str], model: str, threads: int, folder: Path):
        self.absent = {name: "not asked for" for name in NAMES if name not in wanted}
        self._model, self._threads, self._folder = model, threads, folder

    @contextmanager
    def on_stage(self, context: int, caches: bool = False) -> Iterator[dict[str, OnStage]]:
        """Yield {name: player} of the peers, with KV caches for `context` tokens. caches: True to run
        llama.cpp with each of its kinds of caches (CACHES); False to run it with each of its layouts of the
        weights (LAYOUTS)."""
        room = {"threads": self._threads, "context": context}
        with _leave_at_end(dict[str, OnStage]()) as players:
            for name, more in (CACHES if caches else LAYOUTS).items():
                self._join(players, "llama.cpp", name, self._gguf, room | more)
            self._join(players, "mlx-lm", "", self._mlx, {})
            yield players

    @contextmanager
    def in_parallel(self, sequences: int, context: int) -> Iterator[dict[str, OnStage]]:
        """Yield {name: player} of llama.cpp, with KV caches for `sequences` sequences of `context` tokens
        each. Each layout of the weights and kind of buffers has one player."""
        room = {"threads": self._threads, "sequences": sequences, "context": sequences * context}
        with _leave_at_end(dict[str, OnStage]()) as players:
            for layout, how in LAYOUTS.items():
                for buffers, more in BUFFERS.items():
                    self._join(players, "llama.cpp", layout + buffers, self._gguf, room | how | more)
            yield players

    def _join(
        self,
        players: dict[str, OnStage],
        kind: str,
        suffix: str,
        model: Callable[[], str],
        settings: dict[str, Any],
    ) -> None:
        if kind in self.absent:
            return
        try:
            players[kind + suffix] = OnStage(kind, model=model(), **settings)
        except RuvmlxError as e:
            if not suffix:  # leave out llama.cpp only if its default setting fails
                self.absent[kind] = str(e)

    def _gguf(self) -> str:
        if not self._model.endswith(".gguf"):
            raise RuvmlxError("it reads only GGUF files")
        return self._model

    def _mlx(self) -> str:
        """Return the path of a model folder for mlx-lm, which reads only folders. If the model is a GGUF
        file, write its weights to a new folder."""
        if not self._model.endswith(".gguf"):
            return self._model
        folder = self._folder / "mlx-lm"
        if not folder.exists():
            fuse(load_model(self._model), BaseLoRA({}, 1.0), folder)
        return str(folder)


@contextmanager
def _leave_at_end(players: dict[str, OnStage]) -> Iterator[dict[str, OnStage]]:
    """Yield `players`, to which the caller adds players. At the end of the with-block, end all players'
    processes."""
    try:
        yield players
    finally:
        for player in players.values():
            player.leave()


@contextmanager
def peers(wanted: Sequence[str], model: str, threads: int) -> Iterator[Peers]:
    with tempfile.TemporaryDirectory(prefix="ruvmlx-bench-") as folder:
        yield Peers(wanted, model, threads, Path(folder))
