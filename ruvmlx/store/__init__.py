"""This package keeps the user's data in one SQLite file: chats, replies, ratings, preferences, adapters, and
the witness log (a log that shows later changes of the tables).

The package reads and writes the tables of this file. The package imports `platform`, `tiers`, `text`,
`errors` and `ratings`, but no package that computes with a model. Start with `store.py`: `Store` opens the
file and lists the parts (store.chats, store.replies, ..). Each part owns a few tables. `schema.py` has the
tables.
"""

from .adapters import NamedRow
from .anchors import AnchorRow
from .bases import Attempt
from .chats import SessionRow
from .deep_runs import DeepRun
from .kv import KVChoiceRow, KVMeasured, KVObservation, SpeedRow
from .messages import MessageRow
from .preferences import PreferenceLabel, PreferenceRow
from .ratings import RatedReply, RatingRow
from .replies import ReplyRow, ReplyWords
from .responses import ResponseRow
from .routes import ModelChoiceRow, RatedModelChoice, RatedRoute, RouteRow
from .search import ChatHit
from .signals import SignalGroup, SignalRow
from .store import Store
from .tunings import OptimizerAction, Tuning
from .versions import HeadMoved, VersionRow

__all__ = [
    "AnchorRow",
    "Attempt",
    "ChatHit",
    "DeepRun",
    "HeadMoved",
    "KVChoiceRow",
    "KVMeasured",
    "KVObservation",
    "MessageRow",
    "ModelChoiceRow",
    "NamedRow",
    "OptimizerAction",
    "PreferenceLabel",
    "PreferenceRow",
    "RatedModelChoice",
    "RatedReply",
    "RatedRoute",
    "RatingRow",
    "ReplyRow",
    "ReplyWords",
    "ResponseRow",
    "RouteRow",
    "SessionRow",
    "SignalGroup",
    "SignalRow",
    "SpeedRow",
    "Store",
    "Tuning",
    "VersionRow",
]
