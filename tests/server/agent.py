"""An agent's pattern through the server: a long system prompt with tools, two conversations in turns, a
restart in the middle. As tests/kv/agent.py, but with texts, over HTTP."""

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

from tests.kv.agent import NEW, Figures
from tests.kv.texts import TEXTS, read

from .clients import CHAT, Answer, Wire, request

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name.capitalize()} a file of the project, by its path.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
                "required": ["path"],
            },
        },
    }
    for name in ("read", "write", "search")
]


class HttpAgent:
    """start: starts a server on the same data folder. system, reply: tokens."""

    def __init__(self, start: Callable[[], Any], tokenizer: Any, system: int, reply: int):
        self.start, self.tokenizer, self.reply = start, tokenizer, reply
        self.running, self.figures, self._rng = start(), Figures(), random.Random(0)
        self.shared = 0
        self._words = "\n".join(read(name) for name in TEXTS).split()
        instructions = {"role": "system", "content": self._text(system)}
        self.conversations = [[instructions, self._user(20)] for _ in range(2)]

    def _text(self, tokens: int) -> str:
        at = self._rng.randrange(len(self._words) - tokens)
        ids = self.tokenizer.encode(" ".join(self._words[at : at + tokens]))
        return self.tokenizer.decode(ids[:tokens])

    def _user(self, tokens: int) -> dict[str, str]:
        return {"role": "user", "content": self._text(tokens)}

    def ask(self, conversation: list[dict[str, str]], **more: Any) -> tuple[Answer, float]:
        """(answer, milliseconds to the first piece of text)"""
        body = {
            "model": self.running.model, "messages": conversation, "tools": TOOLS, "temperature": 0,
            "max_tokens": self.reply, "stream": True, "stream_options": {"include_usage": True}, **more,
        }  # fmt: skip
        return asyncio.run(self._ask(body))

    async def _ask(self, body: dict[str, Any]) -> tuple[Answer, float]:
        async with await Wire.open(self.running.port) as wire:
            begun, first = time.perf_counter(), 0.0
            await wire.send(b"".join(request(CHAT, body)))
            answer = await wire.head()
            async for piece in wire.pieces(answer):
                answer.body += piece
                if not first and _text_of(Answer(200, {}, piece)):
                    first = 1e3 * (time.perf_counter() - begun)
        assert answer.status == 200 and first, answer.body
        return answer, first

    def run(self, turns: int) -> Figures:
        known = [0, 0]  # tokens of each conversation that a request has held
        for turn in range(turns):
            if turn == turns // 2:
                self._restart()
            for i, conversation in enumerate(self.conversations):
                answer, first = self.ask(conversation)
                usage = answer.events[-1]["usage"]
                prompt, cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
                new = prompt - known[i]
                if turn == 0:
                    self.shared = cached  # at last: by the second conversation with the first
                else:
                    self.figures.prefilled += prompt - cached
                    self.figures.new += new
                    if new <= NEW and turn not in (0, turns // 2):
                        self.figures.first_ms.append(first)
                if turn == turns // 2:
                    self.figures.restart_ms.append(first)
                known[i] = prompt + usage["completion_tokens"] - 1  # the last token is not read
                conversation.append({"role": "assistant", "content": _text_of(answer)})
                conversation.append(self._user(self._rng.randrange(4, 16) if turn % 3 else 130))
        return self.figures

    def _restart(self) -> None:
        """Another server on the same folder, which also reads a conversation again for another user."""
        begun = time.perf_counter()
        self.running.stop()
        self.figures.kept_s = time.perf_counter() - begun
        self.running = self.start()
        self.figures.again_ms.append(self.ask(self.conversations[0], user="somebody else")[1])


def _text_of(answer: Answer) -> str:
    choices = [choice for event in answer.events for choice in event["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)
