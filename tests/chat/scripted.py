"""A runtime without a model: replies are scripted, ratings are counted. Only for tests."""

import itertools
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from ruvmlx.chats.conversations import ChatRoom
from ruvmlx.chats.summaries import ChatSummary
from ruvmlx.engine.types import Chunk, GenerationResponse, Sampling
from ruvmlx.errors import NotFound
from ruvmlx.kv.cache import KVStats
from ruvmlx.optimizer.monitor import PerformanceMonitor
from ruvmlx.platform.memory import MemoryUse
from ruvmlx.runtime import LearnStatus, RatingResult, Turn
from ruvmlx.store import NamedRow


class ScriptedRuntime:
    """Each `say` plays the next reply of `replies`: a list of pieces, or an exception to raise.

    With `gate` set, every piece after the first `free` waits until a test releases one.
    """

    is_auto = False

    def __init__(self, *replies, gate=False, free=2, max_context=8192):
        self.model = SimpleNamespace(
            name="SmolLM2-135M-Instruct",
            context=max_context,
            path=Path("/models/SmolLM2-135M-Instruct.gguf"),
            format="gguf",
            bits=5.74,
            parameters=134515008,
            bytes=96576768,
        )
        self.backend = SimpleNamespace(name="mlx", kernels="metal", caveat="")
        self.reasons: list[tuple[str, str, int]] = []  # (reply, reason, version), as ReasonHistory has them
        self.preferences: list[tuple[str, str, str]] = []  # (better, worse, kind), as the store has them
        self.store = SimpleNamespace(
            chats=SimpleNamespace(deletion_times=dict),
            search_index=SimpleNamespace(is_clean=lambda: True),
            preferences=SimpleNamespace(of_chat=lambda _: self.preferences),
            ratings=SimpleNamespace(of_chat=self._ratings_of_chat),
            messages=SimpleNamespace(place_of=self._place_of),
            replies=SimpleNamespace(get=self._reply),
        )
        history = SimpleNamespace(reasons=SimpleNamespace(in_force=lambda: self.reasons))
        self.learner = SimpleNamespace(history=history)
        self.engine = SimpleNamespace(sessions=SimpleNamespace(read_again=lambda session, pause: 0))
        self.settings = SimpleNamespace(best_of=1, max_tokens=1024)
        self.last_reply_id = None
        self.replies = list(replies)
        self.gate, self.free = gate, free
        self.released = threading.Semaphore(0)
        self.spoken: dict[str, list[Turn]] = {}
        self.ratings: list[tuple[str, str | None, str]] = []  # (reply, rating before, rating)
        self.said: list[str] = []
        self.settled = 0
        self.adapter = "default"
        self.closed = False
        self.threads: set[int] = set()
        self.noticed: list[tuple[str, str]] = []  # (reply, what the user did with it)
        self.monitor, self.in_force, self.log = PerformanceMonitor(), {}, SimpleNamespace(newest=None)
        self._ids = itertools.count(1)
        self._messages = itertools.count(1)

    @property
    def parts(self):
        """The runtime's parts: this object plays all of them."""
        return self

    chats = summaries = choices = learning = tiers = optimizer = writer = scheduler = parts

    def _note_call(self):
        self.threads.add(threading.get_ident())
        assert not self.closed

    def is_measured_for(self, _name):
        return True

    def new_chat(self, system=None):
        self._note_call()
        session = f"s{next(self._ids)}"
        self.spoken[session] = [Turn("system", system)] if system else []
        return session

    def last_chat(self):
        return list(self.spoken)[-1] if self.spoken else None

    def find_chat(self, beginning):
        return beginning

    def asked_before(self):
        return [turn.content for turns in self.spoken.values() for turn in turns if turn.role == "user"][::-1]

    def left_out(self, session_id, max_new_tokens):
        return frozenset()

    def of(self, session_id):
        return ChatSummary()

    def room(self, session_id, turns, max_new_tokens):
        left_out, count = self.left_out(session_id, max_new_tokens), self.of(session_id).count
        return ChatRoom(left_out, count, can_sum_up=len(left_out) > count)

    def count_tokens(self, text):
        return len(text.split())

    def template_system(self):
        return ""

    def prompt_text(self, session_id, max_new_tokens):
        return "".join(turn.content for turn in self.spoken[session_id])

    def set_system(self, session_id, system):
        self._note_call()
        rest = [turn for turn in self.spoken[session_id] if turn.role != "system"]
        self.spoken[session_id] = ([Turn("system", system)] if system else []) + rest

    def ratings_in_use(self, _reply_ids):
        return {}

    def _ratings_of_chat(self, session_id):
        return {turn.reply_id: turn.rating for turn in self.spoken[session_id] if turn.reply_id}

    def _place_of(self, reply_id):
        places = ((chat, turn) for chat, turns in self.spoken.items() for turn in turns)
        return next(((chat, turn.id) for chat, turn in places if turn.reply_id == reply_id), None)

    def _reply(self, reply_id):
        chat, _ = self._place_of(reply_id)
        before = itertools.takewhile(lambda turn: turn.reply_id != reply_id, self.spoken[chat])
        return SimpleNamespace(prompt=[turn.content for turn in before if turn.role == "user"][-1])

    def turns(self, session_id, newest=None):
        self._note_call()
        if session_id not in self.spoken:
            raise NotFound(f"no session {session_id!r}")
        head = [turn for turn in self.spoken[session_id] if turn.role == "system"]
        messages = [turn for turn in self.spoken[session_id] if turn.role != "system"]
        return head + messages[-(newest or 0) :]

    def say(self, session_id, text, *, sampling: Sampling | None, max_new_tokens: int, cancel):
        self._note_call()
        script = self.replies.pop(0) if self.replies else ["Fine."]
        if isinstance(script, Exception):
            raise script
        self.said.append(text)
        self.spoken[session_id].append(Turn("user", text, id=next(self._messages)))
        yield Chunk("", prefilled=16, prompt_tokens=32)
        yield Chunk("", prefilled=32, prompt_tokens=32)
        shown = []
        for n, piece in enumerate(script):
            if isinstance(piece, Exception):
                raise piece
            if self._must_stop(cancel, n):
                break
            shown.append(piece)
            yield Chunk(piece, generated=n + 1, prefilled=32, prompt_tokens=32)
        reason = "cancelled" if cancel.is_set() else "stop"
        yield Chunk("", len(shown), response=self._commit(session_id, shown, reason))

    def _must_stop(self, cancel, n):
        while self.gate and n >= self.free and not cancel.is_set():
            if self.released.acquire(timeout=0.005):
                break
        return cancel.is_set()

    def _commit(self, session_id, shown, reason):
        reply_id = f"r{next(self._ids)}"
        text = "".join(shown)
        self.spoken[session_id].append(Turn("assistant", text, reply_id, None, reason, next(self._messages)))
        self.last_reply_id = reply_id
        return GenerationResponse(
            reply_id,
            session_id,
            text,
            [],
            32,
            0,
            len(shown),
            reason,
            180.0,
            900.0,
            400.0,
            42.0,
            32 + len(shown),
            KVStats.all_f16("tiered", 32 + len(shown), 1 << 20, 1 << 20),
        )

    def rest(self):
        """The scheduler's: no LoRA is installed."""
        self._note_call()

    def settle(self, cancel=None, watch=None, unseen=None):
        self._note_call()
        self.settled += 1

    def rate(self, reply_id, rating, note="", watch=None):
        self._note_call()
        if reply_id == "last":
            reply_id = self.last_reply_id
        before = self._rating_of(reply_id)
        self._set_rating(reply_id, rating)
        self.ratings.append((reply_id, before, rating))
        n = len(self.ratings)
        sign = 1 if rating in ("up", "4", "5") else -1
        return RatingResult(
            reply_id, rating, True, 41.0, 800.0, -1.234, -1.234 + sign * 0.036, 0.004 * n, 0.1, 0.2, n
        )

    def first_summary(self):
        return None

    def give_reason(self, reply_id, reason):
        result = replace(self.rate(reply_id, self._rating_of(reply_id)), reason=reason)
        self.reasons.append((result.reply_id, reason, result.adapter_version))
        return replace(result, applied=reason != "facts")

    def _rating_of(self, reply_id):
        turns = (turn for chat in self.spoken.values() for turn in chat if turn.reply_id == reply_id)
        return next((turn.rating for turn in turns), None)

    def _set_rating(self, reply_id, rating):
        for turns in self.spoken.values():
            for i, turn in enumerate(turns):
                if turn.reply_id == reply_id:
                    turns[i] = replace(turn, rating=rating)
                    return
        raise NotFound(f"no reply {reply_id!r}")

    def rated_elsewhere(self, reply_id, rating):
        """Change the rating as another process would, without a call of this runtime."""
        self.ratings.append((reply_id, self._rating_of(reply_id), rating))
        self._set_rating(reply_id, rating)

    def undo(self):
        self._note_call()
        if not self.ratings:
            raise NotFound("there is no rating or preference to take back")
        reply_id, before, _ = self.ratings.pop()
        self._set_rating(reply_id, before)
        return self.status()

    def take_continuation(self, session_id):
        return None

    def newest_feedback(self):
        return self.ratings[-1][0] if self.ratings else None

    def notice(self, reply_id, what):
        self._note_call()
        self.noticed.append((reply_id, what))
        return True

    def is_due(self):
        """Is training, or a review of the tiers, due? Never."""
        self._note_call()
        return False

    def due_when_idle(self):
        return False

    def sampling(self, **given):
        return Sampling(**given)

    def memory_use(self):
        return MemoryUse(100 << 20, 50 << 20, 5 << 20, 400 << 20, 500 << 20, 8 << 30, 64 << 20)

    def status(self):
        n = len(self.ratings)
        return LearnStatus(
            ratings=n, updates=n, pending=n, consolidations=0, adapter_version=n,
            kl=0.004 * n, kl_cap=0.1, micro_norm=0.2 * n, versions=list(range(n + 1)), last=None,
        )  # fmt: skip

    @property
    def label(self):
        return self.adapter and f"{self.adapter}@{len(self.ratings)}"

    def use(self, name):
        self._note_call()
        self.adapter = name

    def adapters(self):
        return [NamedRow("work", "f", "m", 3, 1000)]

    def check_chat(self, session_id):
        self._note_call()

    def hand_over(self):
        return frozenset()

    def take_over(self, put_away):
        self._note_call()

    def close(self):
        self._note_call()
        self.closed = True
