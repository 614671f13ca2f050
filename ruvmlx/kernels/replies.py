"""This module describes kernel calls that run for several replies in parallel, one token of each reply, on
the threads of a decoder (neon/src/replies.c)."""

import ctypes as C
from collections.abc import Callable

DRAW, TRACE = 0, 1  # ReplyStruct.what: draw a token, or add one token to a trace

_P, _N, _D = C.c_void_p, C.c_size_t, C.c_double


class Drawing(C.Structure):
    """This is the C struct rvm_drawing: the parameters with which a token is drawn."""

    _fields_ = [("temperature", _D), ("top_p", _D), ("min_p", _D), ("u", _D), ("top_k", _N)]


class ReplyStruct(C.Structure):
    """This is the C struct rvm_reply: one kernel call for one reply."""

    _fields_ = [
        ("what", C.c_int),
        ("status", C.c_int),
        ("token", C.c_int32),
        ("scale", C.c_float),
        *((name, _P) for name in ("hidden", "logits", "lora_a", "lora_b", "e_a", "e_b", "scratch")),
        *((name, _N) for name in ("dim", "vocab", "rank")),
        ("drawing", Drawing),
        ("logprob", _D * 2),
    ]


class ReplyWork:
    """One kernel call for one reply.

    fields: the arguments of the call; after the call, also its results
    done: a function that reads the results from the fields; it raises an exception if the call failed
    held: the arrays that the fields point to; the references here prevent Python from freeing their memory
    """

    def __init__(self, fields: ReplyStruct, done: Callable[[ReplyStruct], None], *held: object):
        self.fields, self._done, self._held = fields, done, held

    def finish(self) -> None:
        """Give the results of the call to the reply. Raises an exception if the call failed."""
        self._done(self.fields)
