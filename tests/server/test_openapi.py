"""The OpenAPI document is true: schemathesis makes requests from it and looks for answers that it denies."""

import os
import subprocess
import sys
from typing import get_args, get_type_hints

import pytest
from ruvmlx.apps.server.app import ENDPOINTS
from ruvmlx.apps.server.openapi import document

from .conftest import CHAT_KEY

pytest.importorskip("schemathesis", reason="the dependency group `clients` is not installed")


def test_every_endpoint_is_in_it():
    paths = document(ENDPOINTS, ["m"], [])["paths"]
    found = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert {(e.method, e.path.replace(":path", "")) for e in ENDPOINTS} == found
    assert ("POST", "/v1/chat/completions") in found and ("DELETE", "/v1/ratings/{id}") in found


def test_a_body_lists_its_fields_and_no_others(shared):
    schemas = shared.ask("GET", "/openapi.json").json["components"]["schemas"]
    body = schemas["ChatBody"]
    assert body["additionalProperties"] is False and body["required"] == ["model", "messages"]
    assert {"temperature", "stream", "seed", "logprobs", "adapter", "tools"} <= set(body["properties"])
    assert "audio" not in body["properties"] and "tools" not in schemas["CompletionBody"]["properties"]
    assert body["properties"]["model"]["enum"] == [
        shared.model,
        f"{shared.model}@default",
        f"{shared.model}@none",
    ]
    assert body["properties"]["adapter"]["enum"] == ["default", "none", None]


def test_a_name_may_be_null_where_the_body_takes_null():
    schemas = document(ENDPOINTS, ["m"], ["a"])["components"]["schemas"]
    for e in ENDPOINTS:
        for name in {"model", "adapter"} & {*getattr(e.body, "__struct_fields__", ())}:
            takes_null = type(None) in get_args(get_type_hints(e.body)[name])
            assert (None in schemas[e.body.__name__]["properties"][name]["enum"]) is takes_null, e.body


CHECKS = """
import schemathesis

ALLOWED = (None, "invalid_combination", "context_length_exceeded", "no_fim_tokens")

@schemathesis.check
def a_body_that_the_document_allows_is_understood(ctx, response, case):
    positive = case.meta is not None and case.meta.generation.mode == schemathesis.GenerationMode.POSITIVE
    if positive and response.status_code == 400:
        error = response.json()["error"]
        if isinstance(error, str):  # ollama's clients read no code
            assert "not supported" not in error and "unknown" not in error, error
        else:
            assert error["code"] in ALLOWED, error
"""
# 400 is also the answer to requests that no schema can tell from good ones: a prompt longer than the context.
CONFIG = """
[checks]
positive_data_acceptance.expected-statuses = ["2xx", "400", "404", "409"]
"""


def test_schemathesis(serve, full, tmp_path):
    running = serve(max_tokens=4)
    config = tmp_path / "schemathesis.toml"
    config.write_text(CONFIG)
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": "checks", "PYTHONPATH": str(tmp_path)}
    (tmp_path / "checks.py").write_text(CHECKS)
    command = [
        sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run",
        f"http://127.0.0.1:{running.port}/openapi.json", "--checks", "all", "--seed", "1",
        "--max-examples", "100" if full else "10", "--generation-database", "none", "--no-color",
        "--header", f"Authorization: Bearer {CHAT_KEY}",
        "--continue-on-failure", "--request-timeout", "300", "--max-response-time", "300",
        "--exclude-path", "/v1/stop",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, timeout=600, check=False, env=environment
    )
    print(done.stdout[-8000:], done.stderr[-2000:])
    assert done.returncode == 0
