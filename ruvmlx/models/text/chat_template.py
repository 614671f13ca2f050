"""This module renders chat templates in a sandbox. A chat template is Jinja code from a model's files.

Text from a user cannot become a special token. In users' text (messages, tools, variables), the module puts
the mark U+FDD0 (a noncharacter) after each character that begins a special token's string; typed_text.py has
the exceptions. The tokenizer searches the rendered text for the strings of special tokens. A special token
that a user typed has a mark inside, so the search does not find it. After this search, the tokenizer removes
the marks from the text. The text of the template itself has no marks, so its special tokens match.

If a model has no template, its vocabulary decides the form of the rendered chat: ChatML with <|im_start|> and
<|im_end|>, Llama 3's form with <|start_header_id|> and <|eot_id|>, Mistral's form with [INST] and [/INST],
else lines of "User: ..." and "Assistant: ..." with an empty line between turns.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from ...errors import UnsupportedModel, UsageError
from ..config.model import Message, Tools
from ..files.error_text import one_line
from .mistral_template import mistral_template, version_of
from .typed_text import ESCAPED_GUARD, GUARD, THOUGHT_TAGS, Guard

if TYPE_CHECKING:
    from .template_time import TimeLimit

Turns = list[dict[str, Any]]
Run = Callable[[Turns], str]  # turns -> the text of the template

_TOOLS = re.compile(r"\btools\b")
ROLES = ("system", "user", "assistant", "tool")
CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m['role'] | capitalize + ': ' + m['content'] + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


class ChatTemplate:
    """A chat template that renders conversations. The class puts marks into users' text, so that the rendered
    text contains special tokens only from the template.

    source: the Jinja code; None: a built-in template, chosen by the vocabulary's special tokens
    bos, eos: the values of the template's variables bos_token and eos_token
    gap: "" or " ", the text between a special token and other text in the built-in template for Mistral's
        form
    """

    def __init__(
        self, source: str | None, special_tokens: Iterable[str], bos: str = "", eos: str = "", gap: str = ""
    ):
        specials = [text for text in special_tokens if text]
        self.source = (source or _fallback(specials, gap)).replace(GUARD, "")
        self._names = {"bos_token": bos, "eos_token": eos}
        self._guard = Guard(specials)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        thinking: bool | None = None,
        tools: Tools = (),
        values: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the conversation as the template writes it, with U+FDD0 marks in users' text. If the
        template accepts no system message, the system text goes into a user turn (`fold_system`).

        values: more variables for the template; they do not replace the variables that this class sets
        """
        more = {name: self._guard.inside(value) for name, value in (values or {}).items()}
        asked: dict[str, object] = {**more, "add_generation_prompt": add_generation_prompt}
        if thinking is not None:
            asked["enable_thinking"] = thinking
        asked["tools"] = [self._guard.inside(tool) for tool in tools] if tools else None
        if tools and not _TOOLS.search(self.source):
            raise UsageError("the model's chat template has no place for tools; ask without them.")
        turns = [self._turn(message) for message in messages]
        if not turns:
            raise UsageError("an empty conversation cannot be rendered; give at least one message.")
        from .template_time import TimeLimit

        try:
            return _run_with_later(partial(self._run, asked, TimeLimit()), turns)
        except UnsupportedModel as error:
            if not values:
                raise
            raise UsageError(f"with the variables of this request, {error}") from None

    def begin_reply(self, prompt: str, opening: str) -> str:
        """Return `prompt` (a rendered conversation) with `opening`, the text with which the reply must begin,
        after it.

        If the prompt ends with the tag that begins a thought, and `opening` begins with this tag, the tag
        occurs only once in the result. If the prompt ends with the tag and `opening` has no thought, the
        method writes the tag that ends the thought before `opening`."""
        bare = prompt.rstrip()
        tag = next((tag for tag in THOUGHT_TAGS if bare.endswith(tag)), None)
        if tag is None:
            return prompt + self._guard(opening)
        if opening.startswith(tag):
            return bare.removesuffix(tag) + self._guard(opening)
        return f"{bare}\n{THOUGHT_TAGS[tag]}\n\n{self._guard(opening)}"

    def _turn(self, message: Message) -> dict[str, Any]:
        if message.role not in ROLES:
            raise UsageError(
                f"message role {message.role[:20]!r} is not known; known are {', '.join(ROLES)}."
            )
        keys = ("tool_calls", "tool_call_id", "name")
        more = {key: self._guard.inside(getattr(message, key)) for key in keys if getattr(message, key)}
        return {"role": message.role, "content": self._guard(message.content), **more}

    def _run(self, asked: Mapping[str, object], limit: "TimeLimit", turns: Turns) -> str:
        from .sandbox import Refused, run

        compiled, names = self._compiled_template, {**asked, **self._names, "messages": turns}
        try:
            text = run(compiled, {**names, "documents": None}, limit)
        except Refused as error:
            raise UsageError(
                f"the model's chat template refuses this conversation: {one_line(error)}."
            ) from None
        except Exception as error:  # noqa: BLE001 - a template can raise any exception
            raise UnsupportedModel(f"the model's chat template fails: {one_line(error)}.") from None
        return text.replace(ESCAPED_GUARD, GUARD)

    @cached_property
    def _compiled_template(self):
        from .sandbox import compile_template

        try:
            return compile_template(self.source)
        except Exception as error:  # noqa: BLE001 - to compile bad code can raise any exception
            raise UnsupportedModel(f"the model's chat template cannot be read: {one_line(error)}.") from None


def _run_with_later(run: Run, turns: Turns) -> str:
    """Run the template. Some templates allow system text only at the beginning. If the template refuses or
    leaves out system text after the first turn, put this text into other turns (`fold_later`) and run the
    template again."""
    later = [turn["content"].strip() for turn in turns[1:] if turn["role"] == "system"]
    if not any(later):
        return _run_with_first(run, turns)
    try:
        text = _run_with_first(run, turns)
    except (UsageError, UnsupportedModel):
        return _run_with_first(run, fold_later(turns))
    if all(system in text for system in later):
        return text
    return _run_with_first(run, fold_later(turns))


def _run_with_first(run: Run, turns: Turns) -> str:
    """Run the template. Some templates refuse a system turn at the beginning, and some ignore it without an
    error. If the template refuses or ignores the system turn, put the system text into a user turn
    (`fold_system`) and run the template again. If the new text does not have the system text either, return
    the first text."""
    if turns[0]["role"] != "system":
        return run(turns)
    system = turns[0]["content"].strip()
    try:
        text = run(turns)
    except (UsageError, UnsupportedModel):
        return run(fold_system(turns))
    if system in text:
        return text
    folded = run(fold_system(turns))
    return folded if system in folded else text


def fold_system(turns: Turns) -> Turns:
    """Return the turns without the first, a system turn. The text of the removed system turn and an empty
    line are put at the beginning of the next turn if this is a user turn; else the text becomes a user
    turn."""
    system, rest = turns[0]["content"], [dict(turn) for turn in turns[1:]]
    if rest and rest[0]["role"] == "user":
        rest[0]["content"] = f"{system}\n\n{rest[0]['content']}"
        return rest
    return [{"role": "user", "content": system}, *rest]


def fold_later(turns: Turns) -> Turns:
    """Remove the system turns after the first turn. Add the text of each removed turn to the end of the turn
    before it; if the turn before is a reply of the assistant, to the beginning of the turn after it; if no
    turn or a reply follows, make the text a user turn."""
    folded, waiting = [turns[0]], list[str]()
    for turn in turns[1:]:
        if turn["role"] == "system" and (waiting or folded[-1]["role"] == "assistant"):
            waiting.append(turn["content"])
        elif turn["role"] == "system":
            last = folded.pop()
            folded.append({**last, "content": "\n\n".join([last["content"], turn["content"]])})
        elif turn["role"] == "assistant":
            folded += _as_user(waiting)
            folded.append(turn)
            waiting = []
        else:
            folded.append({**turn, "content": "\n\n".join([*waiting, turn["content"]])})
            waiting = []
    return folded + _as_user(waiting)


def _as_user(texts: Sequence[str]) -> Turns:
    return [{"role": "user", "content": "\n\n".join(texts)}] if texts else []


def _fallback(specials: Sequence[str], gap: str) -> str:
    found = set(specials)
    if {"<|im_start|>", "<|im_end|>"} <= found:
        return CHATML
    if {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"} <= found:
        return LLAMA3
    return mistral_template(version_of(found), gap=gap) if {"[INST]", "[/INST]"} <= found else PLAIN


def pick(templates: str | list | Mapping | None) -> str | None:
    """Return the template from the value of the field chat_template, which is one template, or several
    templates with names. With several templates, the result runs the template "default" (else the first) for
    requests without tools, and "tool_use" (if there is one) for requests with tools."""
    if isinstance(templates, str) or templates is None:
        return templates
    if isinstance(templates, list):
        templates = {t.get("name"): t.get("template") for t in templates if isinstance(t, dict)}
    found = templates.get("default") or next(iter(templates.values()), None)
    with_tools = templates.get("tool_use")
    if isinstance(found, str) and isinstance(with_tools, str) and found != with_tools:
        return _choice(with_tools, found)
    return found if isinstance(found, str) else None


def _choice(with_tools: str, without: str) -> str:
    """Join two templates into one with a Jinja `if`. The plus signs stop Jinja from removing the line ends
    beside the `if`."""
    first, second = (source.removesuffix("\n") for source in (with_tools, without))
    return f"{{%+ if tools +%}}{first}{{%+ else +%}}{second}{{%+ endif %}}"
