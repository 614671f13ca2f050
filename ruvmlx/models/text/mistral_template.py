"""Mistral's instruct forms as a chat template, for files that name only the form's version, or nothing.

    v3    the system text stands in the last user turn; tools before it
    v7    [SYSTEM_PROMPT]; results of tools with the id of their call
    v11   each call of a tool as name, id and arguments
    v13   tools before the first user turn; calls and results without ids
    v15   model settings before the first user turn: how much the model is to think

Text follows special tokens without a space, because SentencePiece puts a space before every run of text.
`gap` is for tokenizers that put a space only before the whole text. (mistral-common's encoder is the oracle
of the tests.)
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass

VERSIONS = (3, 7, 11, 13, 15)
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True)
class Efforts:
    """The values of EFFORTS that a model has, and its default."""

    values: tuple[str, ...]
    default: str

    def expression(self) -> str:
        """Return a Jinja expression. The variable enable_thinking selects the most or the least effort."""
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
    """Return the template.

    version: one of VERSIONS
    efforts: for v15
    gap: the text between a special token and other text
    """
    effort = efforts.expression() if efforts else "none"
    values = {"version": version, "effort": effort, "gap": json.dumps(gap)}
    return "\n".join([*(f"{{%- set {name} = {value} %}}" for name, value in values.items()), _FORM])


def version_of(special_tokens: Iterable[str]) -> int:
    """Return the newest version whose special tokens a vocabulary has. Used if nothing else names the
    version."""
    found = set(special_tokens)
    needed = {11: {"[SYSTEM_PROMPT]", "[ARGS]", "[CALL_ID]"}, 7: {"[SYSTEM_PROMPT]"}}
    return next((version for version, tokens in needed.items() if tokens <= found), 3)
