"""Other runtimes to compare with: llama.cpp and mlx-lm, on the same weights, in the same turns."""

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
# llama.cpp is measured with several settings: which one is its fastest differs between processors and builds.
LAYOUTS: dict[str, dict[str, Any]] = {"": {}, " without repacking": {"repack": False}}
CACHES: dict[str, dict[str, Any]] = {
    "": {},
    " flash": {"flash": True},
    " flash q8_0": {"flash": True, "kv": "q8_0"},
}
# How it keeps the caches of several sequences: apart, or in one buffer.
BUFFERS: dict[str, dict[str, Any]] = {"": {}, " unified": {"unified": True}}


class Peers:
    """The peers that were asked for. absent: name -> why it is not measured."""

    def __init__(self, wanted: Sequence[str], model: str, threads: int, folder: Path):
        self.absent = {name: "not asked for" for name in NAMES if name not in wanted}
        self._model, self._threads, self._folder = model, threads, folder

    @contextmanager
    def on_stage(self, context: int, caches: bool = False) -> Iterator[dict[str, OnStage]]:
        """Players with room for `context` tokens. caches: llama.cpp with each of its caches, else with each
        of its layouts of the weights."""
        room = {"threads": self._threads, "context": context}
        with _left(dict[str, OnStage]()) as players:
            for name, more in (CACHES if caches else LAYOUTS).items():
                self._join(players, "llama.cpp", name, self._gguf, room | more)
            self._join(players, "mlx-lm", "", self._mlx, {})
            yield players

    @contextmanager
    def in_parallel(self, sequences: int, context: int) -> Iterator[dict[str, OnStage]]:
        """llama.cpp with room for so many sequences of `context` tokens, with each of its settings."""
        room = {"threads": self._threads, "sequences": sequences, "context": sequences * context}
        with _left(dict[str, OnStage]()) as players:
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
            if not suffix:  # if it only lacks a setting, the other settings are still measured
                self.absent[kind] = str(e)

    def _gguf(self) -> str:
        if not self._model.endswith(".gguf"):
            raise RuvmlxError("it reads only GGUF files")
        return self._model

    def _mlx(self) -> str:
        """mlx-lm reads only folders, so a GGUF file's weights are written as one."""
        if not self._model.endswith(".gguf"):
            return self._model
        folder = self._folder / "mlx-lm"
        if not folder.exists():
            fuse(load_model(self._model), BaseLoRA({}, 1.0), folder)
        return str(folder)


@contextmanager
def _left(players: dict[str, OnStage]) -> Iterator[dict[str, OnStage]]:
    """At the end all players leave."""
    try:
        yield players
    finally:
        for player in players.values():
            player.leave()


@contextmanager
def peers(wanted: Sequence[str], model: str, threads: int) -> Iterator[Peers]:
    with tempfile.TemporaryDirectory(prefix="ruvmlx-bench-") as folder:
        yield Peers(wanted, model, threads, Path(folder))
