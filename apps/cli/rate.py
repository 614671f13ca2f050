"""The command `ruvmlx rate` stores the user's rating of a reply, or stores which of two replies the user
prefers."""

from typing import TYPE_CHECKING, Any

import click

from ruvmlx.errors import UsageError
from ruvmlx.ratings import REASONS, check_reason, with_reason

from ..learning_words import preference_line, rating_line, reply_line, with_flags
from .completion_values import complete_ratings, complete_replies
from .options import model_options, open_runtime, resolve
from .output import json_option, print_json
from .text_output import hint, say
from .verb import Verb

if TYPE_CHECKING:
    from ruvmlx.runtime import Runtime


@click.command(cls=Verb)
@click.argument("reply_id", required=False, shell_complete=complete_replies)
@click.argument("rating", metavar="[up|down|1..5]", required=False, shell_complete=complete_ratings)
@click.option("--note", default="", help="Your reason, kept with the rating.")
@click.option("--why", type=click.Choice([*REASONS]), help="Why a bad reply is bad. Facts teach nothing.")
@click.option("--better", metavar="REPLY_ID", help="Instead of a rating: the better of two replies.")
@click.option("--worse", metavar="REPLY_ID", help="The worse one. Both answer one question.")
@model_options
@json_option
def rate(
    reply_id: str | None, rating: str | None, note: str, why: str | None, better: str | None,
    worse: str | None, as_json: bool, **flags: Any,
) -> None:  # fmt: skip
    """Rate a reply (its id, or last), or say which of two is better: the weights change at once."""
    from ruvmlx.sona.objective import check_rating

    line, question = "", ""
    if better is not None and worse is not None:
        if reply_id or note or why:
            raise UsageError("--better and --worse take neither a rating nor a note or reason.")
        with open_runtime(resolve(flags)) as runtime:
            adapter = _writer_of(runtime, better, flags)
            result: Any = runtime.choices.prefer(better, worse, adapter)
        line = preference_line(result)
    else:
        from ..progress import watching

        if better or worse or reply_id is None or (rating is None and (why is None or note)):
            raise UsageError(
                "give a reply and its rating, as in `ruvmlx rate last up`; or both --better and --worse."
            )
        if rating is not None:
            note = with_reason(note, why) if why else note
            check_reason(check_rating(rating), note)
        with open_runtime(resolve(flags)) as runtime, watching() as watch:
            adapter = _writer_of(runtime, reply_id, flags)
            if rating is not None:
                result = runtime.rate(reply_id, rating, note, adapter, watch)
            else:
                assert why is not None
                result = runtime.choices.give_reason(reply_id, why, adapter)
            if reply_id == "last":
                question = runtime.store.replies.get(result.reply_id).prompt
        line = rating_line(result)
    if as_json:
        print_json(result)
        return
    line = with_flags(line, flags | {"adapter": adapter or flags["adapter"]})
    say(f"{line} {reply_line(question)}".rstrip())
    if flags["adapter"] and result.adapter_version == 1:
        hint(f"The adapter {flags['adapter']!r} is new: this is its first rating.")
    if adapter is not None:
        hint(f"The adapter {adapter!r} learned from it, because it wrote the reply.")


def _writer_of(runtime: "Runtime", reply_id: str, flags: dict[str, Any]) -> str | None:
    """Return the adapter that wrote a reply, if that is not the adapter in use. Return None if the adapter in
    use learns: it wrote the reply, the original model wrote the reply, or --adapter names it. Also return
    None if no adapter is in use."""
    if flags["adapter"] or runtime.learner is None:
        return None
    writer = runtime.store.replies.get(reply_id).adapter
    return None if writer == runtime.learner.history.name else writer


VERBS = [rate]
