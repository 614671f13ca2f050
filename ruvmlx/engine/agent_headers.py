"""This module removes the `x-anthropic-...` headers, for example for billing, that some agents put before
their system prompt."""

import re

# An example is "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch=eb6c6;", followed by the
# end of the line or of the prompt.
_HEADER = re.compile(r"\s*x-anthropic-[a-z-]+:(?:[ \t]*[\w.-]+=[^;\n]*;)*[ \t]*\n*", re.IGNORECASE)


def without_agent_headers(system: str) -> str:
    """Return a system prompt without the `x-anthropic-...` headers at its start.

    A value in such a header can change with every request. If the header stayed, a request could reuse the KV
    cache of an earlier request only for the tokens before the changed value. The model does not need the
    header. Only the header's name, its own `name=value;` pairs and the white space around them are removed.
    Text after the `name=value;` pairs on the same line stays. A header that is not at the start of the system
    prompt stays too.
    """
    while found := _HEADER.match(system):
        system = system[found.end() :]
    return system
