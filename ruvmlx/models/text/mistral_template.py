"""This module writes Mistral's chat forms as Jinja templates, for models whose files have no chat template.

A model's tekken.json can name the version of its chat form. The versions differ in these points:

    v3    the last user turn has the system text; the list of tools is before this turn
    v7    [SYSTEM_PROMPT] has the system text; a tool result has the id of its tool call
    v11   a tool call has a name, an id and arguments
    v13   the list of tools is before the first user turn; tool calls and results have no ids
    v15   the reasoning effort is before the first user turn

The templates write no space after a special token, because most SentencePiece tokenizers put a space before
every run of text. For tokenizers that put a space only before the whole text, the template writes the space
itself (`gap`). The tests compare the result with mistral-common's encoder.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass

VERSIONS = (3, 7, 11, 13, 15)
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True)
class Efforts:
    """The reasoning efforts that a model supports (values of EFFORTS), and the model's default effort. The
    reasoning effort says how long the model thinks before its answer."""

    values: tuple[str, ...]
    default: str

    def expression(self) -> str:
        """Return a Jinja expression whose value is the reasoning effort. If the template's variable
        enable_thinking is true, the value is the highest supported effort; if false, the lowest; if not
        defined, the default effort."""
        most, least = (json.dumps(pick(self.values, key=EFFORTS.index)) for pick in (max, min))
        asked = f"{most} if enable_thinking else {least}"
        return f"({asked}) if enable_thinking is defined else {json.dumps(self.default)}"


_FORM = """\
{{- bos_token }}
{%- set turns = namespace(first=-1, last=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' and (loop.previtem or {}).role != 'user' %}
        {%- set turns.first = loop.index0 if turns.first < 0 else turns.first %}
        {%- set turns.last = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- set systems = messages | selectattr('role', 'equalto', 'system') | map(attribute='content') %}
{%- set system = systems | join('\\n\\n') %}
{%- for m in messages %}
    {%- if m.role == 'system' %}
        {%- if version >= 7 %}
            {{- '[SYSTEM_PROMPT]' + gap + m.content + '[/SYSTEM_PROMPT]' }}
        {%- endif %}
    {%- elif m.role == 'user' %}
        {%- if (loop.previtem or {}).role == 'user' %}
            {{- '\\n\\n' }}
        {%- else %}
            {%- if tools and loop.index0 == (turns.first if version >= 13 else turns.last) %}
                {{- '[AVAILABLE_TOOLS]' + gap + tools | tojson + '[/AVAILABLE_TOOLS]' }}
            {%- endif %}
            {%- if effort and loop.index0 == turns.first %}
                {{- '[MODEL_SETTINGS]' + gap + {'reasoning_effort': effort} | tojson + '[/MODEL_SETTINGS]' }}
            {%- endif %}
            {{- '[INST]' + gap }}
            {%- if version < 7 and system and loop.index0 == turns.last %}
                {{- system + '\\n\\n' }}
            {%- endif %}
        {%- endif %}
        {{- m.content }}
        {%- if (loop.nextitem or {}).role != 'user' %}
            {{- '[/INST]' }}
        {%- endif %}
    {%- elif m.role == 'assistant' %}
        {{- gap + m.content.rstrip(' ') if m.content else '' }}
        {%- if m.tool_calls and version < 11 %}
            {{- '[TOOL_CALLS]' + gap + '[' }}
            {%- for call in m.tool_calls %}
                {{- '{"name": ' + call.function.name | tojson }}
                {{- ', "arguments": ' + call.function.arguments | tojson }}
                {{- ', "id": ' + call.id | tojson + '}' }}
                {{- '' if loop.last else ', ' }}
            {%- endfor %}
            {{- ']' }}
        {%- else %}
            {%- for call in m.tool_calls or [] %}
                {{- '[TOOL_CALLS]' + gap + call.function.name }}
                {{- '[CALL_ID]' + gap + call.id if version < 13 else '' }}
                {{- '[ARGS]' + gap + call.function.arguments | tojson }}
            {%- endfor %}
        {%- endif %}
        {{- eos_token }}
    {%- elif version < 7 %}
        {{- '[TOOL_RESULTS]' + gap + '{"content": ' }}
        {{- m.content if m.content[:1] in ['{', '['] else m.content | tojson }}
        {{- ', "call_id": ' + m.tool_call_id | tojson + '}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- '[TOOL_RESULTS]' + gap }}
        {{- m.tool_call_id + '[TOOL_CONTENT]' + gap if version < 13 else '' }}
        {{- m.content + '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""


def mistral_template(version: int, efforts: Efforts | None = None, gap: str = "") -> str:
    """Return Mistral's chat template of one version.

    version: one of VERSIONS
    efforts: the reasoning efforts that the model supports; None if its files name none
    gap: "" or " ", the text between a special token and other text
    """
    effort = efforts.expression() if efforts else "none"
    values = {"version": version, "effort": effort, "gap": json.dumps(gap)}
    return "\n".join([*(f"{{%- set {name} = {value} %}}" for name, value in values.items()), _FORM])


def version_of(special_tokens: Iterable[str]) -> int:
    """Return the newest of the versions 11, 7 and 3 of Mistral's chat form whose special tokens are all in
    the vocabulary. The result is a guess for models of which no file names the version."""
    found = set(special_tokens)
    needed = {11: {"[SYSTEM_PROMPT]", "[ARGS]", "[CALL_ID]"}, 7: {"[SYSTEM_PROMPT]"}}
    return next((version for version, tokens in needed.items() if tokens <= found), 3)
