"""This module prepares text for the web page: it turns Markdown into HTML, and describes what the model
learned."""

import asyncio
from functools import cache
from typing import Annotated

from markdown_it import MarkdownIt
from msgspec import Meta, Struct

from ruvmlx.runtime import Runtime
from ruvmlx.sona.adapter_history import other_adapters

from ..learning_words import status_facts, status_lines
from .endpoint import Answer, Call, Endpoint
from .errors import ApiError

# the maximum number of characters of all texts together; to turn so many characters into HTML takes tenths of
# a second
MOST_LETTERS = 262_144


class MarkdownBody(Struct, forbid_unknown_fields=True):
    """The body of POST /v1/markdown."""

    texts: Annotated[list[str], Meta(max_length=500, description="At most 262,144 characters together.")]


class MarkdownAnswer(Struct):
    """The given texts as HTML. HTML tags in a text are shown as plain text, and a picture becomes a link."""

    html: list[str]


class LearnedAnswer(Struct):
    """Sentences for the user about what the adapter in use has learned. adapter: the adapter's name; null if
    no adapter is in use."""

    adapter: str | None
    sentences: list[str]


@cache
def _parser() -> MarkdownIt:
    return MarkdownIt("gfm-like", {"html": False, "linkify": False, "breaks": True}).disable("image")


async def markdown(call: Call) -> Answer:
    """Return the given texts as HTML. The conversion to HTML runs in a separate thread, so the server answers
    other requests during the conversion."""
    texts = call.body.texts
    if sum(map(len, texts)) > MOST_LETTERS:
        raise ApiError(400, f"texts: more than {MOST_LETTERS} characters.", "texts")
    return MarkdownAnswer(await asyncio.to_thread(lambda: [_parser().render(text) for text in texts]))


async def show_learned(call: Call) -> Answer:
    """Return what the first model has learned with the adapter in use."""
    async with call.models.using(call.models.first) as serving:
        return await serving.host.call_between(_learned_answer)


def _learned_answer(runtime: Runtime) -> LearnedAnswer:
    learner = runtime.learner
    if learner is None:
        return LearnedAnswer(None, ["No adapter is in use, so ratings teach nothing."])
    history, taste = learner.history, learner.taste.status
    facts = status_facts(history.status()) | {
        "adapter": history.name,
        "others": other_adapters(history),
        "targets": runtime.settings.learn_targets,
        "taste": {"sentence": taste.sentence, "turned": taste.turned},
    }
    return LearnedAnswer(history.name, [line.replace("`", "") for line in status_lines(facts)])


ENDPOINTS = [
    Endpoint("POST", "/v1/markdown", markdown, "Turn Markdown into HTML.", MarkdownAnswer, body=MarkdownBody),
    Endpoint(
        "GET", "/v1/learned", show_learned, "What was learned, in words.", LearnedAnswer, is_private=True
    ),
]
