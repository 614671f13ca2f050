"""`config`: shows and changes settings."""

import click

from ruvmlx import settings
from ruvmlx.errors import RuvmlxError

from .completion_values import complete_setting_names, complete_setting_values
from .output import json_option, log, print_json, show, show_facts
from .verb import VerbGroup


@click.group(cls=VerbGroup)
def config() -> None:
    """Show and change settings."""


@config.command("show")
@click.option("--origin", is_flag=True, help="Say where each value comes from.")
@json_option
def show_settings(origin: bool, as_json: bool) -> None:
    """Show all settings as they apply here."""
    found = settings.resolve()
    values = {k: settings.written(s.value) for k, s in found.items()}
    if as_json:
        print_json({k: {"value": values[k], "origin": s.origin} for k, s in found.items()})
        return
    shown = {k: "-" if value is None else value for k, value in values.items()}
    show_facts({k: f"{v}  ({found[k].origin})" if origin else v for k, v in shown.items()})


@config.command("set", context_settings={"ignore_unknown_options": True})  # -1 is a value
@click.argument("name", shell_complete=complete_setting_names)
@click.argument("value", shell_complete=complete_setting_values)
def set_setting(name: str, value: str) -> None:
    """Save one value in your settings file."""
    show(f"{name} = {value} in {settings.save(name, value)}")
    note_setting(name, value)


def note_setting(name: str, value: str) -> None:
    """Record a setting in the witness log if it affects learning or caches."""
    from ruvmlx.store import Store

    if not settings.SPECS[name].witnessed:
        return
    try:
        Store(settings.store_file()).witness.note("setting", {"name": name, "value": value})
    except RuvmlxError as e:  # the setting is saved already
        log(f"note: the witness log could not be written: {e}")


@config.command("path")
@json_option
def paths(as_json: bool) -> None:
    """Show where your data and settings are."""
    facts = {"data": settings.home(), "settings": settings.user_file(), "store": settings.store_file()}
    if as_json:
        print_json(facts)
    else:
        show_facts(facts)


VERBS = [config]
