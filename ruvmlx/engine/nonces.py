"""What agents put before their system prompt for a service's accounts, not for the model."""

import re

# "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch=eb6c6;", then a line's end or the prompt
_HEADER = re.compile(r"\s*x-anthropic-[a-z-]+:(?:[ \t]*[\w.-]+=[^;\n]*;)*[ \t]*\n*", re.IGNORECASE)


def without_nonces(system: str) -> str:
    """A system prompt without the `x-anthropic-...` headers at its start.

    One of their values changes with every request. It says nothing to the model, but all tokens after it
    would be new to the cache at every turn. Only the header's own `name=value;` pairs go: text that follows
    them on the same line stays, and so does the same text anywhere else.
    """
    while found := _HEADER.match(system):
        system = system[found.end() :]
    return system
