"""The command `ruvmlx learn router` shows and trains the router, which chooses how a reply is written, and
the model selector, which chooses the model that writes it (`--model auto`)."""

import threading
from typing import TYPE_CHECKING, Any

import click

from ruvmlx import settings as config
from ruvmlx.errors import UsageError

from .interrupt import ctrl_c_sets
from .options import load_model, model_options, resolve, with_one_model
from .output import json_option, print_json
from .text_output import TableColumn, count, hint, say, table
from .verb import Verb

if TYPE_CHECKING:
    from ruvmlx.settings import Settings
    from ruvmlx.sona.optional.router import Router
    from ruvmlx.sona.optional.selector import ModelSelector

ROUTER_WORDS = {
    "on": "It learns from your ratings and from the time that replies take.",
    "off": "So every reply uses what was learned; `ruvmlx config set router on` lets it choose.",
}
ARM_WORDS = {"adapter": "what was learned", "plain": "the original model"}  # words for the router's choices


@click.command("router", cls=Verb)
@click.option(
    "--train", is_flag=True, help="First train the network that reads conversations; Ctrl-C stops it."
)
@model_options
@json_option
def router_arms(train: bool, as_json: bool, **flags: Any) -> None:
    """Show the router's choices: how often each was made, and its mean reward from ratings and latency.

    Switch it on with --router on, or `ruvmlx config set router on`. With --model auto: also the models.
    """
    settings = resolve(flags, selects=True)
    selector = _selector(settings, not train)
    settings = with_one_model(settings)
    router = router_of(settings, not train)
    report, cancel = dict[str, Any](), threading.Event()
    if train:
        with ctrl_c_sets(cancel):
            report = router.train(cancel)
            if selector is not None:
                selector.train(cancel)
    facts: dict[str, Any] = {"router": config.setting_text(settings.router), **router.status().facts}
    if report:
        facts["training"] = report
    if selector is not None:
        facts["models"] = selector.status().facts
    if as_json:
        print_json(facts)
    else:
        _show(facts)
    if cancel.is_set():
        raise KeyboardInterrupt


def _show(facts: dict[str, Any]) -> None:
    say("The router chooses for each reply whether what was learned is used.")
    say(f"The router is {facts['router']}. {ROUTER_WORDS[facts['router']]}")
    show_router(facts)
    if "models" in facts:
        say("The selector chooses for each question which model answers.")
        show_router(facts["models"])
    hint(
        "CHOSEN and RATED count only replies for which it chose. A reward is a rating from 0 to 1, lower for "
        "a slow reply; the chances follow from the rewards."
    )


def router_of(settings: "Settings", reading: bool) -> "Router":
    """Return the router of the adapter that the settings choose. The function does not load weights. reading:
    True if the caller changes nothing, so that a read-only folder is no error."""
    from ruvmlx.engine.model_identity import identify
    from ruvmlx.sona.adapter_history import AdapterHistory
    from ruvmlx.sona.optional.router import Router
    from ruvmlx.store import Store

    name = settings.adapter_name
    if name is None:
        raise UsageError("--adapter none leaves the router nothing to choose; name an adapter.")
    store = Store(config.store_file(), reading)
    fingerprint = identify(store, load_model(settings.model), not reading).fingerprint
    return Router(store, AdapterHistory(store, fingerprint, name), fingerprint, settings.examples > 0)


def _selector(settings: "Settings", reading: bool) -> "ModelSelector | None":
    """Return the selector of the models of `auto`, without loading weights. Return None if the model is not
    `auto`, or if there is only one model."""
    if settings.model != config.AUTO:
        return None
    from ruvmlx.auto_runtime import selector_models
    from ruvmlx.memory.candidates import find_candidates
    from ruvmlx.sona.optional.selector import ModelSelector
    from ruvmlx.store import Store

    store = Store(config.store_file(), reading)
    models = selector_models(store, find_candidates(settings), settings, not reading)
    return ModelSelector(store, [model for _, model in models]) if len(models) > 1 else None


def show_router(facts: dict[str, Any]) -> None:
    """Print a table of the router's choices. Before the first rated choice, no chances are shown, because
    they would be guesses."""
    rows, is_rated = [], any(arm["rated"] for arm in facts["arms"])
    for arm in facts["arms"]:
        mean = "-" if arm["mean_reward"] is None else f"{arm['mean_reward']:.3f}"
        chance = f"{arm['best']:.0%}" if is_rated else "-"
        rows.append((_arm_words(arm["arm"]), str(arm["chosen"]), str(arm["rated"]), mean, chance))
    names = ("CHOSEN", "RATED", "MEAN REWARD", "CHANCE TO BE BEST")
    table([TableColumn("REPLIES WITH"), *(TableColumn(name, right=True) for name in names)], rows)
    if facts["training"]:
        trained = facts["training"]
        say(
            f"The network that reads conversations: {trained['reason']} "
            f"({count(trained['ratings'], 'rated choice')})."
        )


def _arm_words(arm: str) -> str:
    """Return the words for an arm: a way to generate a reply, or the name of a model."""
    learned, _, examples = arm.partition("+")
    if learned not in ARM_WORDS:
        return arm
    return ARM_WORDS[learned] + (" and liked replies as examples" if examples else "")
