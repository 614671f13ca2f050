"""This module defines the flags that several verbs (commands of `ruvmlx`) share. The module also opens the
model that the flags describe."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ruvmlx import settings as config
from ruvmlx.errors import UsageError
from ruvmlx.progress import Watch
from ruvmlx.settings import Settings
from ruvmlx.settings.setting_spec import SettingSpec
from ruvmlx.text import did_you_mean

from .completion_values import complete_adapters, complete_models
from .number_types import WholeNumber
from .output import log

if TYPE_CHECKING:
    from ruvmlx.backends.base import Backend
    from ruvmlx.models.config.model import Model
    from ruvmlx.runtime import Runtime
    from ruvmlx.store import Store

COMPLETED = {"model": complete_models, "adapter": complete_adapters}  # flags whose values the shell completes
F = TypeVar("F", bound=Callable[..., Any])

BUILT_IN = ("default", "none")  # names of adapters that the user does not have to make
_LONG = 1_000_000  # the help of a flag does not show a bound from here on
VERY_SIMILAR = 0.85  # the least similarity of a mistyped name to "none"
SERVER = "http://127.0.0.1:8642"  # the default address of `ruvmlx serve`
MODEL_SETTINGS = ("model", "auto_models", "backend", "threads", "max_context", "kv", "adapter", "router")
GUESSES = ("speculate", "draft_model")
REPLY_SETTINGS = ("max_tokens", "best_of", *config.SAMPLING, "system", "thinking", "examples", *GUESSES)


def require_new_file(option: str, file: Path) -> None:
    """Raise UsageError if `file` exists or if its folder does not exist, before the work takes minutes.
    option: the option that names the file."""
    if file.exists():
        raise UsageError(f"{option} {file}: this file exists already; give another name.")
    if not file.absolute().parent.is_dir():
        raise UsageError(
            f"{option} {file}: there is no folder {file.parent}; name a file in an existing one."
        )


def setting_option(name: str, help: str | None = None) -> Callable[[F], F]:
    """Return a decorator that adds the flag of one setting. The flag's name, type and help text come from the
    list of settings."""
    spec = config.SPECS[name]
    flags = spec.flag.split() or [f"--{name.replace('_', '-')}"]
    said, shown = help or f"{spec.doc[0].upper()}{spec.doc[1:]}.", COMPLETED.get(name)
    return click.option(*flags, name, type=_click_type(spec), help=said, shell_complete=shown)


def _click_type(spec: SettingSpec) -> click.ParamType:
    if spec.kind is bool or spec.choices:
        return click.Choice(spec.choices or ("on", "off"))
    if spec.word:
        return click.STRING  # `SettingSpec.parse` checks the value
    if spec.kind is int:
        if spec.least is None:
            return click.INT
        # `config.parse` checks a bound that is too large to help a reader of the flag's help
        most = spec.most if spec.most is not None and spec.most < _LONG else None
        return WholeNumber(int(spec.least), most)
    return click.FLOAT if spec.kind is float else click.STRING


def setting_options(*names: str) -> Callable[[F], F]:
    """Return a decorator that adds the flags of several settings in the order of `names`."""

    def decorate(function: F) -> F:
        for name in reversed(names):
            function = setting_option(name)(function)
        return function

    return decorate


model_options = setting_options(*MODEL_SETTINGS)
sampling_options = setting_options(*REPLY_SETTINGS)


def resolve(flags: dict[str, Any], selects: bool = False) -> Settings:
    """Return the settings that apply. Flags take priority, then environment variables, settings files and
    defaults. selects: True if the verb can choose a model for each question; False: with the model `auto`,
    the largest of its models takes its place. A settings file in the working folder can come from another
    person, so stderr names the settings that this file changes."""
    found = config.resolve({name: value for name, value in flags.items() if name in config.SPECS})
    file = str(config.project_file())
    if here := [name for name, one in found.items() if one.origin == file]:
        log(f"note: {file} in this folder sets {', '.join(here)}.")
    settings = Settings(**{name: one.value for name, one in found.items()})
    return settings if selects else with_one_model(settings)


def with_one_model(settings: Settings) -> Settings:
    """Return settings with one model. If the setting `model` is `auto`, choose the largest model of `auto`
    and print a note."""
    if settings.model != config.AUTO:
        return settings
    from ruvmlx.memory.candidates import single_model

    settings = single_model(settings)
    log(f"note: this command uses one model: {settings.model}, the largest of auto.")
    return settings


def load_model(name: str | None) -> "Model":
    """Load a model by its name. If the model is not on this machine, fetch it and show the progress on the
    terminal."""
    from ruvmlx.models.load import load_model as load

    from ..progress import watching

    with watching() as watch:
        return load(name, watch)


def unknown_adapter(name: str, known: Sequence[str]) -> str:
    """Return a sentence that says that the adapter does not exist. If a known adapter has a similar name, a
    second sentence proposes this name. The name "none" turns learning off, so this function proposes "none"
    only for a name that is very similar."""
    similar = did_you_mean(name, (*known, "default")) or did_you_mean(name.lower(), ["none"], VERY_SIMILAR)
    return f"there is no adapter {name!r}.{similar}"


def load_and_open(settings: Settings, context: int | None = None) -> "tuple[Model, Backend]":
    """Return a model and its backend, for verbs that need no store. context: the number of tokens of context
    for which memory is planned.

    Raise NotEnoughMemory before weights are fetched or read.
    """
    from ruvmlx.backends.select import describe, open_backend
    from ruvmlx.memory.load_plan import Planning

    from ..progress import watching

    choice = describe(settings.backend, settings.threads)
    with watching() as watch:
        planning = Planning(
            watch, choice, settings.model, settings.backend, context or settings.max_context,
            settings.memory_bytes,
        )  # fmt: skip
        model = planning.load(settings.model)
        weights = planning.watched_model(model)
        return model, open_backend(settings.backend, weights, settings.threads, watch=planning)


@contextmanager
def open_for_reading(settings: Settings) -> "Iterator[tuple[Store, Model, Backend]]":
    """Open the store, and the model without an adapter, for a verb that only reads. A disk that is full or
    read-only causes no error."""
    from ruvmlx.chats.lost_sides import note_sides
    from ruvmlx.engine.model_identity import identify
    from ruvmlx.store import Store

    with closing(Store(config.store_file(), reading=True)) as store:
        model, backend = load_and_open(settings)
        model = identify(store, model)
        try:
            yield store, model, backend
        finally:
            note_sides(store, backend, model.fingerprint)


def open_runtime(settings: Settings, watch: Watch | None = None, creates_adapter: bool = False) -> "Runtime":
    """Open the runtime, which takes seconds. watch: shows the progress; if `watch` is None, the terminal
    shows it. creates_adapter: True if the verb creates the adapter that the settings name."""
    from ..progress import watching

    with watching() if watch is None else nullcontext(watch) as shown:
        runtime = _open_runtime(settings, shown)
    if not creates_adapter:
        _note_empty_adapter(runtime, settings.adapter_name)
    return runtime


def _open_runtime(settings: Settings, watch: Watch) -> "Runtime":
    if settings.model == config.AUTO:
        from ruvmlx.auto_runtime import open_auto

        return open_auto(settings, watch)
    from ruvmlx.runtime import Runtime

    return Runtime.open(settings, watch=watch)


def _note_empty_adapter(runtime: "Runtime", name: str | None) -> None:
    """Print a note if the user named an adapter that has learned nothing. If an adapter with a similar name
    has learned something, the note proposes that name."""
    known = [row.name for row in runtime.adapters()]
    if name and name not in (*known, *BUILT_IN):
        meant = did_you_mean(name, known)
        log(f"note: adapter {name!r} has learned nothing: replies are the original model's.{meant}")
