"""This module lists, finds and describes models and adapters, for the app and plain mode."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruvmlx.errors import RuvmlxError, UsageError, error_line
from ruvmlx.memory import proposals
from ruvmlx.memory.load_plan import Plan
from ruvmlx.models.config.model import Model
from ruvmlx.models.find.hub import offline
from ruvmlx.models.find.local import list_local_models
from ruvmlx.progress import Progress, parameters
from ruvmlx.runtime import Runtime
from ruvmlx.settings import AUTO, parse, resolve_one, settings_file
from ruvmlx.text import did_you_mean, one_line, size

from .arguments import parse_number
from .user_files import HERE, UserFiles

NO_ADAPTER = "none"


@dataclass(frozen=True)
class PickerEntry:
    """An entry of the list from which the user picks a model or an adapter, with text that is safe for the
    terminal.

    name: the name that opens the model or adapter. aloud: the facts in words, or "" if a screen reader can
    read `facts`. problem: the reason why the user cannot choose the entry, or "".
    """

    name: str
    facts: str
    in_use: bool = False
    problem: str = ""
    aloud: str = ""

    @property
    def words(self) -> str:
        """The entry as a line that a screen reader can read aloud."""
        facts = self.aloud or self.facts.replace(" · ", ", ")
        return ", ".join(filter(None, (self.name, "in use" if self.in_use else "", facts, self.problem)))


def _facts(form: str, bits: float | None, numbers: int | None, nbytes: int, more: str = "") -> list[str]:
    """Return the facts of a model file: "gguf", "5.7 bits", "135 M", "97 MB". If the program could not read
    the bits, leave out the bits and the number of parameters."""
    read = [f"{bits:.1f} bits", parameters(numbers or 0) + more] if bits else []
    return [form, *read, size(nbytes)]


def _words(model: Model) -> str:
    return ", ".join(_facts(model.format, model.bits, model.parameters, model.bytes, " parameters"))


def models(in_use: Model, proposes: bool = False, auto: bool | None = None) -> list[PickerEntry]:
    """Return one entry for each model that `ruvmlx ls` lists and that can write. If the model in use is in
    another folder, it has an entry, too. The function reads the headers of files, so do not
    call it in the app's thread. proposes: True if the list also has models that ruvmlx proposes to download,
    unless the program is offline. auto: True if a selector chooses the model, False if not; None: the list
    has no entry "auto"."""
    rows = [row for row in list_local_models() if not row["embeds"] or row["path"] == str(in_use.path)]
    entries = [_entry(row, not auto and row["path"] == str(in_use.path)) for row in rows]
    if auto or (auto is not None and sum(not entry.problem for entry in entries) > 1):
        entries.append(PickerEntry(AUTO, "chooses one for each question", bool(auto)))
    if proposes and not offline():
        entries += [_offer_entry(offer) for offer in proposals.proposals()]
    if any(entry.in_use for entry in entries):
        return entries
    own = _facts(in_use.format, in_use.bits, in_use.parameters, in_use.bytes)
    return [PickerEntry(str(in_use.path), " · ".join(own), True, aloud=_words(in_use)), *entries]


def _offer_entry(offer: proposals.ModelOffer) -> PickerEntry:
    speed = f"about {offer.tps_expected:.0f} tokens/s"
    return PickerEntry(offer.name, f"to fetch · {size(offer.size)} · {speed} · {offer.licence}")


def is_proposal(name: str) -> bool:
    """Return True if `name` is a model of the table of proposals that fits this machine and is not on it."""
    return any(offer.name == name for offer in proposals.proposals(few=99))


def remember(name: str) -> None:
    """Save a model's name as the default for the next start. If the settings file cannot be written, raise no
    error, so that the chat continues."""
    path = Path(name).expanduser()
    with contextlib.suppress(RuvmlxError):
        settings_file.save("model", str(path.resolve()) if name != AUTO and path.exists() else name)


def remember_adapter(name: str | None) -> str:
    """Save an adapter's name (None: no adapter) as the default for the next start. Return a sentence that
    says so, or that another source of the setting or an error is in the way."""
    wanted = name or NO_ADAPTER
    try:
        settings_file.save("adapter", wanted)
        found = resolve_one("adapter")
    except RuvmlxError as error:
        return f"The next start does not keep this: {error_line(error)}"
    if found.value != wanted:
        return f"The next start uses {found.value}, which {found.origin} names."
    return "The next start uses it, too." if name else "The next start uses none either."


def _entry(row: dict[str, Any], in_use: bool) -> PickerEntry:
    known = (row["format"], row["bits"], row["parameters"], row["bytes"])
    short, aloud = " · ".join(_facts(*known)), ", ".join(_facts(*known, " parameters"))
    return PickerEntry(row["name"], short, in_use, one_line(row["problem"]), aloud)


def model_lines(listed: Sequence[PickerEntry]) -> list[str]:
    """Return the lines that /models prints for the entries in `listed`."""
    return [f"{n}. {one_line(entry.words)}" for n, entry in enumerate(listed, 1)]


def find_model(argument: str, in_use: Model, files: UserFiles = HERE, listed: Sequence[str] = ()) -> str:
    """Return the name of the model that the user names. argument: the model's number in the list ("2"), or a
    name as for --model.

    listed: the names in the order in which the user saw the numbered models; if `listed` is empty, the
    numbers mean the present list of models.
    """
    if not argument.isdigit():
        return argument if argument == AUTO else files.model(argument)
    names = listed or [entry.name for entry in models(in_use)]
    number = parse_number(argument, len(names), "model")
    assert number is not None
    return names[number - 1]


def adapters(runtime: Runtime) -> list[PickerEntry]:
    """Return entries for "none" (no adapter), for the adapters of the model in use, and for the adapters of
    other models, which the user cannot choose."""
    label = runtime.learning.label
    in_use = label.rpartition("@")[0] if label else NO_ADAPTER
    mine = {row.name: f"version {row.version} · {size(row.bytes)}" for row in runtime.adapters()}
    if in_use not in mine and in_use != NO_ADAPTER:
        mine = {in_use: "version 0"} | mine
    own = {row.fingerprint for row in runtime.adapters()}
    others = [row for row in runtime.store.adapters.all() if row.fingerprint not in own]
    return [
        PickerEntry(NO_ADAPTER, "the original model; nothing is learned", in_use == NO_ADAPTER),
        *[PickerEntry(name, facts, name == in_use) for name, facts in mine.items()],
        *[
            PickerEntry(r.name, f"version {r.version}", problem=f"belongs to {one_line(r.model)}")
            for r in others
        ],
    ]


def find_adapter(argument: str, runtime: Runtime) -> str | None:
    """Return the name of the adapter that the user names, or None for "none". Raise UsageError for an unknown
    name, unless the word "new" follows the name and asks for a new adapter. The error does not propose the
    name "none", because that name turns learning off."""
    name, _, new = argument.partition(" ")
    known = [NO_ADAPTER, "default", *(row.name for row in runtime.adapters())]
    if name not in known and new.strip() != "new":
        raise UsageError(
            f"there is no adapter {name[:40]!r}.{did_you_mean(name, known[1:])} "
            f"To begin it: /adapter {name[:40]} new"
        )
    return None if name == NO_ADAPTER else name


def new_adapter_line(word: str) -> str:
    """Return the picker's line for a typed word that is no listed adapter's exact name, or "" if no adapter
    can have this name."""
    try:
        is_name = parse("adapter", word, "/adapter") == word != NO_ADAPTER and " " not in word
    except UsageError:
        return ""
    return f"Start a new one: {word}" if is_name else ""


def adapter_lines(runtime: Runtime) -> list[str]:
    """Return the lines that /adapters prints."""
    return [f"{entry.words}." for entry in adapters(runtime)]


def switch_text(runtime: Runtime) -> str:
    """Return the message that tells the user which model the chat uses after a switch."""
    if runtime.is_auto:
        return "Model: auto. A line says which model writes each reply, and why."
    model = runtime.model
    label = runtime.learning.label
    learns = f"adapter {label}" if label else "no adapter"
    return f"Model: {one_line(model.name)} ({_words(model)}; {learns}). It reads this chat again."


def in_use_line(in_use: Model) -> str:
    """Return the line about the model in use that /model prints in plain mode."""
    return f"Model: {one_line(in_use.name)} ({_words(in_use)}). /models lists others."


def opening_line(what: Plan | Progress) -> str:
    """Return one line about the opening of a model: its plan, or the progress of the opening."""
    return one_line(what.line if isinstance(what, Progress) else f"Opening {what.facts.name}…")
