"""This module makes the configuration of each program (client) that `connect` supports. A client uses a
running `ruvmlx serve`."""

import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ruvmlx.errors import UsageError

from .written_files import text_of

PART = 4  # a reply can take at most 1 / PART of the context
MAX_REPLY_TOKENS = 32_000  # the maximum number of tokens of a reply that clients request by default
CLAUDE_LEAST = 100_000  # Claude Code's smallest context window in tokens
CLAUDE_PROMPT, CODEX_PROMPT = 20_000, 9_000  # about the number of tokens of the first prompt (docs/serve.md)
# Codex asks again after this time without an event. Its default is 300,000. It does not count the comments
# that the server sends to keep the connection. This value is ServerLimits.reply_seconds.
CODEX_IDLE_MS = 3_600_000
# the share of the tokens beside the reply that a client's prompt can take; below 1, because clients count
# with another model's tokenizer
MARGIN = 0.95
# the name `ruvmlx` of a model in llm's YAML file: plain or in quotes, in a line that is no comment
_LLM_MODEL = re.compile(
    r"""^(?![ \t]*#).*(?<![\w-])model_id["']?[ \t]*:[ \t]*(["']?)ruvmlx\1[ \t]*(?:[,}\r]|[ \t]#|$)""",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Served:
    """A running server and its model. url: the server's address without /v1. key: the API key. model: the
    name of the model. context: the maximum number of tokens of the prompt and the reply together."""

    url: str
    key: str
    model: str
    context: int

    @property
    def reply(self) -> int:
        """The maximum number of tokens of a reply for this model."""
        return max(1, min(MAX_REPLY_TOKENS, self.context // PART))

    @property
    def prompt(self) -> int:
        """The number of prompt tokens from which a client should shorten the conversation."""
        return int(MARGIN * (self.context - self.reply))


@dataclass(frozen=True)
class ClientFile:
    """The configuration of a client. path: the client's configuration file, or None if the client reads no
    file. text: the configuration. use: a sentence with the user's next step. merge: a function that takes the
    old content of the file and returns it with the new configuration."""

    path: Path | None
    text: str
    use: str
    merge: Callable[[str], str] = lambda before: before

    def merged_text(self) -> str:
        assert self.path is not None
        return self.merge(text_of(self.path) or "")


def names() -> list[str]:
    """Return the names of the clients that `connect` supports."""
    return list(_CLIENTS)


def client_of(name: str, served: Served) -> ClientFile:
    """Return the configuration with which the client `name` uses this server."""
    return _CLIENTS[name](served)


def path_of(name: str) -> Path | None:
    """Return the path of the client's configuration file, or None if the client reads no file. The path is
    the same for all servers."""
    return client_of(name, Served("", "", "", 1)).path


def _start(command: str, prompt: int, served: Served) -> str:
    """Return the sentences that tell the user to start a client. If the client's first prompt, of about
    `prompt` tokens, does not fit into the model's context, the sentences say so."""
    if prompt < served.context:
        return f"Start `{command}`."
    return (
        f"The program `{command.split()[0]}` first sends about {prompt:,} tokens, but the model "
        f"{served.model} reads at most {served.context:,}, so the server will refuse them. Serve a model "
        f"with a longer context, or let the program send less (see docs/serve.md). Then start `{command}`."
    )


def _claude(served: Served) -> ClientFile:
    """Return the configuration of Claude Code, which accepts no context window below CLAUDE_LEAST. The
    configuration also sets the percentage of this window from which Claude Code summarises the conversation,
    so that the prompt fits into the model's context."""
    window = max(CLAUDE_LEAST, served.context)
    share = 100 * served.prompt // (window - min(served.reply, 20_000))
    variables = {
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_API_KEY": served.key,
        "ANTHROPIC_MODEL": served.model,
        **{f"ANTHROPIC_DEFAULT_{kind}_MODEL": served.model for kind in ("HAIKU", "SONNET", "OPUS", "FABLE")},
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(served.reply),
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(window),
        "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": str(max(1, min(95, share))),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return _json_client(
        _home("CLAUDE_CONFIG_DIR", ".claude") / "settings.json",
        {"env": variables},
        _start("claude", CLAUDE_PROMPT, served),
    )


def _codex(served: Served) -> ClientFile:
    """Return a profile of Codex. The profile has a file of its own, so the user's own settings of Codex stay
    the same."""
    text = f"""\
model = {_quote_text(served.model)}
model_provider = "ruvmlx"
model_context_window = {served.context}
model_auto_compact_token_limit = {served.prompt}

[model_providers.ruvmlx]
name = "ruvmlx"
base_url = {_quote_text(f"{served.url}/v1")}
wire_api = "responses"
experimental_bearer_token = {_quote_text(served.key)}
stream_idle_timeout_ms = {CODEX_IDLE_MS}
"""
    path = _home("CODEX_HOME", ".codex") / "ruvmlx.config.toml"
    return ClientFile(path, text, _start("codex --profile ruvmlx", CODEX_PROMPT, served), lambda before: text)


def _quote_text(text: str) -> str:
    """Return a text in quotes, for TOML and YAML. Neither of them reads JSON's two escapes of one character
    beyond U+FFFF."""
    return json.dumps(text, ensure_ascii=False)


def _continue(served: Served) -> ClientFile:
    text = f"""\
name: ruvmlx
version: 1.0.0
schema: v1
models:
  - name: ruvmlx
    provider: openai
    model: {_quote_text(served.model)}
    apiBase: {_quote_text(f"{served.url}/v1")}
    apiKey: {_quote_text(served.key)}
    defaultCompletionOptions:
      contextLength: {served.context}
      maxTokens: {served.reply}
"""
    path = Path.home() / ".continue" / "configs" / "ruvmlx.yaml"
    return ClientFile(path, text, "Choose `ruvmlx` in Continue.", lambda before: text)


def _zed(served: Served) -> ClientFile:
    model = {
        "name": served.model,
        "max_tokens": served.context,
        "max_output_tokens": served.reply,
        "capabilities": {"tools": True, "images": False},
    }
    provider = {"api_url": f"{served.url}/v1", "available_models": [model]}
    # Zed does not read XDG_CONFIG_HOME on macOS
    moved = None if sys.platform == "darwin" else os.environ.get("XDG_CONFIG_HOME")
    base = Path(moved or Path.home() / ".config")
    wanted = {"language_models": {"openai_compatible": {"ruvmlx": provider}}}
    use = f"Set RUVMLX_API_KEY={served.key}, and choose the model in the agent panel."
    return _json_client(base / "zed" / "settings.json", wanted, use)


def _open_webui(served: Served) -> ClientFile:
    text = f"OPENAI_API_BASE_URL={served.url}/v1\nOPENAI_API_KEY={served.key}\nENABLE_OLLAMA_API=false\n"
    return ClientFile(None, text, "Start `open-webui serve` with them.")


def _llm(served: Served) -> ClientFile:
    text = f"""\
- model_id: ruvmlx
  model_name: {_quote_text(served.model)}
  api_base: {_quote_text(f"{served.url}/v1")}
  api_key_name: ruvmlx
  supports_schema: true
  supports_tools: true
"""
    # llm takes its folder from click, too: it differs on macOS, and XDG_CONFIG_HOME moves it on Linux.
    folder = os.environ.get("LLM_USER_PATH") or click.get_app_dir("io.datasette.llm")
    path = Path(folder) / "extra-openai-models.yaml"

    def add_model(before: str) -> str:
        if _LLM_MODEL.search(before):
            raise UsageError(f"{path} has a model `ruvmlx` already; take it out first.")
        return before + ("\n" if before and not before.endswith("\n") else "") + text

    return ClientFile(
        path, text, f"Run `llm keys set ruvmlx --value {served.key}`, then `llm -m ruvmlx`.", add_model
    )


_CLIENTS: dict[str, Callable[[Served], ClientFile]] = {
    "claude": _claude,
    "codex": _codex,
    "continue": _continue,
    "zed": _zed,
    "open-webui": _open_webui,
    "llm": _llm,
}


def _home(variable: str, folder: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / folder)


def _json_client(path: Path, wanted: Mapping[str, Any], use: str) -> ClientFile:
    def merge_json(before: str) -> str:
        try:
            found = json.loads(before or "{}")
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise UsageError(f"{path} is not plain JSON (it may have comments); add these lines yourself.")
        return json.dumps(_merge_settings(found, wanted), indent=2, ensure_ascii=False) + "\n"

    return ClientFile(path, json.dumps(wanted, indent=2) + "\n", use, merge_json)


def _merge_settings(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of `found` and `wanted` together. If both have a value for a setting, take the
    value of `wanted`; if both values are dicts, merge them in the same way."""
    joined = dict(found)
    for name, value in wanted.items():
        own = joined.get(name)
        joined[name] = (
            _merge_settings(own, value) if isinstance(own, dict) and isinstance(value, dict) else value
        )
    return joined
