"""Chat templates with tools as Llama 3.1, Qwen 2.5, Qwen 3 and Mistral have them, written for the tests."""

LLAMA31 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- endif %}
{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = true %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length == 0 %}{{- raise_exception("Tools need a first user message") }}{%- endif %}
    {{- "<|start_header_id|>user<|end_header_id|>\\n\\nFunctions:\\n" }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
    {{- messages[0]['content']|trim + "<|eot_id|>" }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim }}
        {{- '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("Only single calls") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", ' }}
        {{- '"parameters": ' }}{{- call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

QWEN25 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}
    {%- else %}{{- 'You help.' }}{%- endif %}
    {{- "\\n\\n# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\nAnswer in {\\"name\\": <name>, \\"arguments\\": <args>}<|im_end|>\\n" }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first)
        or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

QWEN3 = """\
{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and message.content is string
        and not (message.content.startswith('<tool_response>') and message.content.endswith('</x>')) %}
        {%- set ns.multi_step = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for tool in tools or [] %}
    {%- for key, value in tool.function.items() | sort(attribute='0') %}
        {{- key ~ '=' ~ (value if value is string else value | tojson(sort_keys=true)) ~ '\\n' }}
    {%- endfor %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
            {%- set reasoning = reasoning.lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') }}
            {{- '\\n</think>\\n\\n' + content }}
        {%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if loop.first and content or not loop.first %}{{- '\\n' }}{%- endif %}
            {%- set call = call.function if call.function else call %}
            {{- '<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}
            {%- else %}{{- call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {%- set role = 'user' if message.role == 'tool' else message.role %}
        {{- '<|im_start|>' ~ role ~ '\\n' ~ content ~ '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

MISTRAL7 = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}{%- if system is defined %}{{- "[SYSTEM_PROMPT]" + system + "[/SYSTEM_PROMPT]" }}{%- endif %}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS][" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val|tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST]" + message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS][" }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function|tojson %}{{- out[:-1] }}
            {%- if not call.id is defined or call.id|length < 9 %}
                {{- raise_exception("Tool call IDs should have 9 characters") }}
            {%- endif %}
            {{- ', "id": "' + call.id + '"}' }}{{- ", " if not loop.last else "]" + eos_token }}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}{{- message["content"] + eos_token }}
    {%- else %}
        {%- set content = message.content %}
        {%- if message.content.content is defined %}{%- set content = message.content.content %}{%- endif %}
        {{- '[TOOL_RESULTS]{"content": ' + content|string + ', "call_id": "' + message.tool_call_id }}
        {{- '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""

OTHERS = """\
{%- macro kind(spec) -%}
    {%- if spec.type == 'string' %}str{% elif spec.type == 'integer' %}int
    {%- elif spec.type is iterable and spec.type is not string %}{{ spec.type | join(' | ') }}
    {%- else %}{{ spec.type | default('any', true) }}{% endif -%}
{%- endmacro -%}
{% for tool in tools or [] if tool['type'] == 'function' %}
  {% set parameters = tool.function.parameters.properties or {} %}
def {{ tool.function.name }}({% for name, spec in parameters | items %}
{{ name }}: {{ kind(spec) }}{{ ", " if not loop.last }}{% endfor %}):
    {{ (tool.function.description or 'none') | indent(4) }}
  {% if loop.index > 5 %}{% break %}{% endif %}
{% endfor %}
{% for message in messages %}
  {% if message.content | length == 0 %}{{ loop.index }}{% continue %}{% endif %}
  {% generation %}{% set inner = message.role | title %}{{ inner }}{% endgeneration %}
{{ inner is defined }}: {{ message.content | e if documents else message.content | replace('\\n', ' ') }}
  {% for call in message.tool_calls %}{{ call | tojson(separators=(',', ':')) }}{% endfor %}
  {{- {'k': [1, 2.5, none, true, 'é<>&\\u2028']} | tojson }}{{ 'é "x"' | tojson(ensure_ascii=true) }}
{% endfor %}
{{ messages | rejectattr('role', 'in', ['user', 'tool']) | map(attribute='role') | unique | list }}
{%- filter upper %}{{ eos_token }}{% endfilter %}
"""

TEMPLATES = {
    "llama 3.1": LLAMA31,
    "qwen 2.5": QWEN25,
    "qwen 3": QWEN3,
    "mistral 7": MISTRAL7,
    "others": OTHERS,
}
