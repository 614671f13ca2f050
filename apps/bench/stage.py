"""This module runs the players of a benchmark (players.py) in separate processes, and lets them take turns: A
B C, A B C, ... If the machine is slow for a minute, all players are slow in this minute."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from ruvmlx.errors import RuvmlxError


class PlayerError(RuvmlxError):
    """The error of a player. public: the error message without the parts that can contain text of the
    user."""

    def __init__(self, message: str, public: str):
        super().__init__(message)
        self.public = public


class OnStage:
    """A player (ruvmlx, or another program that the benchmark measures) in a separate process. `call` runs
    one of the player's methods."""

    def __init__(self, kind: str, **settings: Any):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ruvmlx.apps.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._kind = kind
        self.facts = self._require_answer({"kind": kind, "settings": settings})

    def call(self, method: str, *arguments: Any) -> Any:
        return self._require_answer([method, *arguments])

    def _require_answer(self, question: Any) -> Any:
        answer = self._ask(question)
        if isinstance(answer, dict) and "public" in answer:
            raise PlayerError(f"{self._kind} cannot be measured: {answer['error']}", answer["public"])
        return answer

    def _ask(self, question: Any) -> Any:
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise RuvmlxError("a benchmark process ended early; run `ruvmlx doctor`, then try again.")
        return json.loads(answer)

    def leave(self) -> None:
        self._process.kill()
        self._process.wait()


def take_turns(players: dict[str, OnStage], play: Callable[[OnStage], Any], rounds: int) -> dict[str, list]:
    """Let the players take turns. Return {player: its results in `rounds` rounds}. An additional round comes
    first, so that caches are warm; its results are dropped.

    play: a function that measures a player once and returns the result
    """
    results: dict[str, list] = {name: [] for name in players}
    for i in range(rounds + 1):
        for name, player in players.items():
            result = play(player)
            if i:
                results[name].append(result)
    return results
