"""The command `ruvmlx config` shows and changes settings."""

from collections.abc import Sequence

import click

from ruvmlx import settings
from ruvmlx.errors import RuvmlxError, error_line
from ruvmlx.settings import settings_file

from .completion_values import complete_setting_names, complete_setting_values
from .output import json_option, log, print_json
from .text_output import TableColumn, facts, hint, say, short_path, table
from .verb import VerbGroup


@click.group(cls=VerbGroup)
def config() -> None:
    """Show and change settings."""


@config.command("show")
@click.option("--origin", is_flag=True, help="Say where each value comes from, instead of what it means.")
@json_option
def show_settings(origin: bool, as_json: bool) -> None:
    """Show all settings as they apply here. A value in brackets is a default: nothing sets another value."""
    found = settings.resolve()
    if as_json:
        values = {k: settings.setting_text(s.value) for k, s in found.items()}
        print_json({k: {"value": values[k], "origin": s.origin} for k, s in found.items()})
        return
    rows = [
        (k, _table_value(k, s), short_path(s.origin) if origin else settings.SPECS[k].doc)
        for k, s in found.items()
    ]
    hint("A value in brackets is a default: nothing sets another value.")
    say("")
    _show_groups("FROM" if origin else "MEANING", rows)
    hint("A size may be typed as 500MB or 2GB.")
    hint("`ruvmlx config set NAME VALUE` changes a setting for good.")
    hint("`ruvmlx config unset NAME` takes that back.")


def _show_groups(last: str, rows: Sequence[tuple[str, str, str]]) -> None:
    """Print the settings as one table with a heading for each group. last: the name of the last column."""
    names, values = (max(map(len, column)) for column in list(zip(*rows, strict=True))[:2])
    columns = [
        TableColumn(""),  # the names stand two columns to the right of the headings
        TableColumn("SETTING", style="bold", least=names),
        TableColumn("VALUE", least=values),
        TableColumn(last, cut=last == "FROM", keep=False, style="dim"),
    ]
    table(columns, [])
    for heading, group in settings.GROUPS.items():
        say("")
        say(heading, "bold")
        table(columns, [("", *row) for row in rows if row[0] in group], header=False)
    say("")


def _table_value(name: str, found: settings.Resolved) -> str:
    """Return the value of a setting that applies, as text. A default is in brackets."""
    value = effective(name, found)
    return f"({value})" if found.origin == "default" and not value.startswith("(") else value


def effective(name: str, found: settings.Resolved) -> str:
    """Return the value of a setting that applies, as text. The text is in brackets if nothing sets a
    value, so that the program or the model decides."""
    if found.value in (None, ""):
        spec = settings.SPECS[name]
        return f"({spec.unset or 'none'})" if found.value is None else spec.nothing or "(none)"
    return settings.SPECS[name].display(found.value)


@config.command("set", context_settings={"ignore_unknown_options": True})  # permits the value -1
@click.argument("name", shell_complete=complete_setting_names)
@click.argument("value", shell_complete=complete_setting_values)
@json_option
def set_setting(name: str, value: str, as_json: bool) -> None:
    """Save one value in your settings file."""
    notes = [*_check_for_chat(name, value), *_missing_models(name, value)]
    path = settings_file.save(name, value)
    if as_json:
        saved = settings.setting_text(settings.parse(name, value, "the command line"))
        print_json({"name": name, "value": saved, "path": str(path)})
    else:
        say(f"{name} = {value}, in {short_path(path)}.")
    for note in notes:
        log(note)
    _warn_of_another(name)
    note_setting(name, value)


def _check_for_chat(name: str, value: str) -> list[str]:
    """Raise UsageError for keys and for a theme that the chat would refuse or would not find. Return notes
    about actions that lose their keys."""
    if name not in ("keys", "theme"):
        return []
    settings.parse(name, value, "the command line")
    from ..chat import keys, theme
    from ..chat.app import ChatApp

    if name == "theme":
        theme.check(value)
        return []
    screens = ChatApp.bindings_of_screens()
    lost = keys.lost_keys(keys.parse(value, screens), screens)
    return [f"note: {action} has no key now: {key} was its key." for action, key in lost.items()]


def _missing_models(name: str, value: str) -> list[str]:
    """Return a note about each model in the value of a setting that is not on this machine."""
    if name not in ("model", "auto_models", "draft_model"):
        return []
    from ruvmlx.models.find.resolve import find_local_model

    notes = []
    for model in (word.strip() for word in (value.split(",") if name == "auto_models" else [value])):
        try:
            if model not in ("", "none", settings.AUTO) and find_local_model(model) is None:
                notes.append(f"note: {model} is not on this machine; `ruvmlx pull {model}` fetches it.")
        except RuvmlxError as error:
            notes.append(f"note: {error_line(error)}")
    return notes


@config.command("unset")
@click.argument("name", shell_complete=complete_setting_names)
@json_option
def unset_setting(name: str, as_json: bool) -> None:
    """Remove one value from your settings file, so that the default applies again."""
    path = settings_file.remove(name)
    found = settings.resolve_one(name)
    value = effective(name, found)
    if as_json:
        now = settings.setting_text(found.value)
        print_json(
            {"name": name, "value": now, "path": str(settings.user_file()), "removed": path is not None}
        )
    elif path is None:
        say(f"Nothing to take back: your settings file has no {name}; its value is {value}.")
    else:
        say(f"{name} = {value} again. {short_path(path)} no longer has this setting.")
    if path is not None:
        note_setting(name, "unset")


def _warn_of_another(name: str) -> None:
    """Print a note if an environment variable, or a settings file in the working folder, overrides the value
    that was saved."""
    found = settings.resolve_one(name)
    if found.origin != str(settings.user_file()):
        log(f"note: {found.origin} says {name} = {effective(name, found)}, which overrides it here.")


def note_setting(name: str, value: str) -> None:
    """Record the change of a setting in the witness log, if the setting affects learning or caches."""
    from ruvmlx.store import Store

    if not settings.SPECS[name].witnessed:
        return
    try:
        Store(settings.store_file()).witness.note("setting", {"name": name, "value": value})
    except RuvmlxError as e:  # the setting is saved already, so this error is only a note
        log(f"note: the witness log could not be written: {e}")


@config.command("path")
@json_option
def paths(as_json: bool) -> None:
    """Show where your data and settings are."""
    found = {"data": settings.home(), "settings": settings.user_file(), "store": settings.store_file()}
    if as_json:
        print_json(found)
    else:
        facts([(name, str(path)) for name, path in found.items()])
        hint("The store has your chats, your ratings, your adapters and the log.")


VERBS = [config]
