"""The page at `/`: it needs no other host, its policy fits it, every request that it makes is one we have."""

import re
from html.parser import HTMLParser

import pytest
from ruvmlx.apps.server import page as page_module
from ruvmlx.apps.server.app import ENDPOINTS
from ruvmlx.apps.server.serving import MAX_RECENT_REQUESTS

SOURCE = page_module._page().text


class Elements(HTMLParser):
    """All elements of a page with their attributes, and the ids."""

    def __init__(self):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(SOURCE)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def test_nothing_comes_from_elsewhere():
    """No address of another host, nothing to load, no code or style in attributes."""
    assert "://" not in SOURCE and not re.search(r"""["'`]//""", SOURCE)
    for tag, attributes in Elements().found:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "a", "video", "audio")
        names = set(attributes)
        assert not names & {"src", "href", "style", "srcset", "action"}
        assert not any(name.startswith("on") for name in names)
    assert "innerHTML" not in SOURCE and "eval(" not in SOURCE and "localStorage" not in SOURCE


def test_every_id_in_the_script_is_in_the_page():
    ids = {attributes["id"] for _, attributes in Elements().found if "id" in attributes}
    tabs = set(re.findall(r'data-tab="(\w+)"', SOURCE))
    numbers = {"temperature", "topp", "longest"}  # by `numbers` in the script
    named = set(re.findall(r'\bat\("(\w+)"\)', SOURCE))
    assert named | tabs | numbers | {"talk", "options"} == ids and tabs | numbers <= ids


def test_every_request_of_the_page_has_an_endpoint():
    """Each is one that the page's other tests make."""
    asked = set(re.findall(r'ask\("(\w+)", "([^"]+)"', SOURCE))
    assert asked == {
        ("GET", "/v1/status"), ("GET", "/v1/models"), ("POST", "/v1/chat/completions"),
        ("POST", "/v1/ratings"), ("DELETE", "/v1/ratings/"), ("POST", "/v1/markdown"),
        ("GET", "/v1/learned"), ("GET", "/v1/chats"), ("POST", "/v1/chats"), ("GET", "/v1/chats/"),
        ("DELETE", "/v1/chats/"),
    }  # fmt: skip
    ours = {(endpoint.method, endpoint.path.replace("{id}", "")) for endpoint in ENDPOINTS}
    assert asked <= ours and SOURCE.count("fetch(") == 1


def test_the_policy(shared):
    """The page runs its own script and style by their digests, and may ask this server alone."""
    answer = shared.ask("GET", "/")
    assert answer.status == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.body.decode() == SOURCE
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy.pop("default-src") == "'none'" and policy.pop("connect-src") == "'self'"
    assert re.fullmatch(r"'sha256-[\w+/]{43}='", policy.pop("script-src"))
    assert re.fullmatch(r"'sha256-[\w+/]{43}='", policy.pop("style-src"))
    assert set(policy.values()) == {"'none'"} and answer.headers["x-content-type-options"] == "nosniff"


def test_the_status(serve):
    """Before a reply and after it; the question's words are not in it."""
    running = serve()
    empty = running.ask("GET", "/v1/status").json
    assert (empty["model"], empty["adapter"], empty["requests"]) == (running.model, "default@0", [])
    assert empty["tokens_per_second"] is None and empty["memory"]["resident_bytes"] > 1e7
    purposes = {row["name"]: row for row in empty["memory"]["purposes"]}
    assert purposes["weights"]["used"] == empty["memory"]["model_bytes"] > 0 == purposes["kv"]["used"]
    text = running.ask("GET", "/metrics").body.decode()
    weights = purposes["weights"]["used"]
    assert f'\nruvmlx_memory_bytes{{kind="used",purpose="weights"}} {weights}\n' in text
    assert text.count("\nruvmlx_memory_bytes{") == 3 * len(purposes)
    assert running.chat("a secret word").status == 200
    running.chat("a secret word", nonsense="a secret name")
    full = running.ask("GET", "/v1/status")
    newest, oldest = full.json["requests"]
    assert (newest["path"], newest["status"], newest["generated_tokens"]) == (
        "/v1/chat/completions",
        "400",
        0,
    )
    assert oldest["status"] == "200" and oldest["generated_tokens"] == 8 and oldest["prompt_tokens"] > 5
    assert full.json["tokens_per_second"] == oldest["tokens_per_second"] > 0
    assert b"secret" not in full.body


def test_the_last_requests_are_few(shared):
    for _ in range(MAX_RECENT_REQUESTS + 5):
        shared.ask("POST", "/v1/ratings", {})
    assert len(shared.ask("GET", "/v1/status").json["requests"]) == MAX_RECENT_REQUESTS


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("192.168.1.5:8642", "http://192.168.1.5:8642", 200),
        ("chat.lan", "https://chat.lan", 200),
        ("192.168.1.5:8642", "http://192.168.1.5:9000", 403),
        ("192.168.1.5:8642", "http://192.168.1.6:8642", 403),
        ("chat.lan", "https://chat.lan.evil.example", 403),
        ("evil.example", "http://evil.example", 403),
    ],
)
def test_the_page_may_ask_its_own_server(one, serve, host, origin, status):
    """A page from this server may ask it, from other machines too. A page from another host name may not."""
    running = one(lambda: serve(hosts=["chat.lan"]))
    assert running.ask("GET", "/v1/models", host=host, origin=origin).status == status


def test_the_page_needs_no_key_and_its_data_does(serve):
    running = serve(keys=["a" * 20])
    assert running.ask("GET", "/").status == 200
    assert running.ask("GET", "/v1/status").status == 401
    assert running.ask("GET", "/v1/status", authorization=f"Bearer {'a' * 20}").status == 200
