"""Who may ask: Host, Origin, API key."""

import errno
import json
import os

import pytest
from ruvmlx.apps.server import keys
from ruvmlx.apps.server.access import Access
from ruvmlx.apps.server.app import ENDPOINTS
from ruvmlx.apps.server.keys import matching, new_key, salt_digest, saved_keys

from ruvmlx.errors import StoreError, UsageError

KEY, OTHER = "k" * 20, "o" * 20


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("LOCALHOST:99", 200),
        ("127.0.0.1:1", 200), ("[::1]:80", 200), ("192.168.1.7", 200),
        ("my-mac.local", 200), ("localhost.", 200), ("x.localhost", 200),
        ("evil.example", 403), ("localhost.evil.example", 403), ("127.0.0.1.evil.example", 403), ("", 403),
        ("evil.example:80@localhost", 403), ("localhost:80:80", 403), ("2130706433", 403), ("[::1", 403),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/health", "/v1/models", "/nothing"])
def test_the_host_header(serve, one, host, status, path):
    """Host names that were not allowed are refused on every path: a foreign page may make its own name
    resolve to this server (DNS rebinding)."""
    running = one(lambda: serve(hosts=["my-mac.local"]))
    answer = running.ask("GET", path, host=host)
    assert answer.status == (404 if (status, path) == (200, "/nothing") else status)
    if status == 403:
        assert answer.error["code"] == "host_not_allowed"


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://localhost:3000", True), ("https://127.0.0.1", True), ("http://[::1]:8080", True),
        ("https://chat.example", True),
        ("https://evil.example", False), ("null", False), ("http://localhost.evil.example", False),
        ("https://chat.example.evil.example", False), ("http://chat.example", False), ("file://", False),
        ("http://127.0.0.1@evil.example", False), ("http://[::1", False),
        ("chrome-extension://localhost", False),
    ],
)  # fmt: skip
def test_the_origin_header(serve, one, origin, allowed):
    running = one(lambda: serve(origins=["https://chat.example"]))
    answer = running.ask("GET", "/v1/models", origin=origin)
    asked = running.ask(
        "OPTIONS", "/v1/chat/completions", origin=origin, access_control_request_method="POST",
        access_control_request_headers="authorization,content-type",
    )  # fmt: skip
    if allowed:
        assert answer.status == 200 and answer.headers["access-control-allow-origin"] == origin
        assert asked.status == 204 and "POST" in asked.headers["access-control-allow-methods"]
        assert "authorization" in asked.headers["access-control-allow-headers"]
        # A page reads both names of the id: OpenAI's client the first one, Anthropic's client the second one.
        readable = answer.headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "request-id"} <= {*readable} and answer.headers["request-id"]
        assert answer.headers["vary"] == asked.headers["vary"] == "origin"
    else:
        assert answer.status == asked.status == 403
        assert "access-control-allow-origin" not in answer.headers | asked.headers


def test_errors_can_be_read_by_allowed_pages(serve, one):
    """A page that may ask also sees why it was refused."""
    running = one(lambda: serve(keys=[KEY]))
    for path in ("/v1/models", "/nothing"):
        answer = running.ask("GET", path, origin="http://localhost:1")
        assert answer.status == 401 and answer.headers["access-control-allow-origin"] == "http://localhost:1"


def test_without_origin_no_cors(shared):
    assert "access-control-allow-origin" not in shared.ask("GET", "/v1/models").headers


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": f"Bearer {KEY}"}, 200),
        ({"authorization": f"bearer {OTHER}"}, 200),
        ({"x_api_key": KEY}, 200),
        ({"x_api_key": KEY, "authorization": "Bearer of-a-proxy"}, 200),
        ({"x_api_key": KEY, "authorization": "Bearer "}, 200),
        ({"x_api_key": KEY, "authorization": "Basic of-a-proxy"}, 200),
        ({"x_api_key": "of-a-proxy", "authorization": f"Bearer {KEY}"}, 200),
        ({"x_api_key": f"{KEY}x", "authorization": "Bearer of-a-proxy"}, 401),
        ({"authorization": f"Bearer {KEY}x"}, 401),
        ({"authorization": f"Bearer {KEY[:-1]}"}, 401),
        ({"authorization": "Bearer "}, 401),
        ({"authorization": f"Basic {KEY}"}, 401),
        ({"authorization": KEY}, 401),
        ({"x_api_key": "\xe9" * 20}, 401),
    ],
)
def test_the_key(serve, one, headers, status):
    running = one(lambda: serve(keys=[KEY, OTHER]))
    for method, path in (("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/openapi.json")):
        answer = running.ask(method, path, **headers)
        assert answer.status == status
        if status == 401:
            assert (
                answer.headers["www-authenticate"] == "Bearer"
                and answer.error["type"] == "authentication_error"
            )
    assert running.ask("GET", "/health", **headers).status == 200


def test_a_path_that_is_not_there_is_no_way_around_the_key(serve, one):
    running = one(lambda: serve(keys=[KEY]))
    assert running.ask("GET", "/nothing").status == 401
    assert running.ask("GET", "/health/").status == 401
    assert running.ask("GET", "/%68ealth").status == 200  # the same path


CHAT_ENDPOINTS = [e for e in ENDPOINTS if e.is_private or e.is_control]


@pytest.mark.parametrize("suffix", ["", "%0A", "%0a%0A", "%20", "%00", "/", "%2F", "?a=b", "%3F"])
@pytest.mark.parametrize("endpoint", CHAT_ENDPOINTS, ids=lambda e: f"{e.method} {e.path}")
def test_no_spelling_of_a_path_is_a_way_around_the_key_of_the_chat_app(shared, endpoint, suffix):
    """The router accepts a line break at the end of a path."""
    path = endpoint.path.replace("{id}", "1") + suffix
    for method in {endpoint.method, "HEAD"} if endpoint.method == "GET" else {endpoint.method}:
        plain = shared.ask(method, path, {} if endpoint.body else None)
        assert plain.status in (401, 404), plain
        page = shared.ask(method, path, {} if endpoint.body else None, origin="http://localhost:3000")
        assert page.status in (403, 404), page


def test_the_bearer_token_comes_before_the_other_valid_key():
    """The caches of a client depend on its key."""
    access, bearer = Access([KEY, OTHER]), {"authorization": f"Bearer {KEY}"}
    of_bearer, of_other = (access.check_key(h, None) for h in (bearer, {"x-api-key": OTHER}))
    assert access.check_key({**bearer, "x-api-key": OTHER}, None) == of_bearer != of_other


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://localhost/v1/models", "localhost", 200),
        ("HTTP://my-mac.local:80/v1/models?limit=1", "localhost", 200),
        ("http://my-mac.local/v1/models", "evil.example", 200),
        ("https://localhost/v1%2Fmodels/nothing", "localhost", 404),
        ("http://localhost", "localhost", 200),
        ("http://localhost?a=b", "localhost", 200),
        ("http://evil.example/v1/models", "localhost", 403),
        ("http://evil.example%2Flocalhost/v1/models", "localhost", 403),
        ("http://localhost@evil.example/v1/models", "localhost", 403),
        ("http:///v1/models", "localhost", 403),
        ("ftp://localhost/v1/models", "localhost", 404),
    ],
)
def test_a_whole_url_in_the_request_line_counts_as_its_path_and_its_host(serve, one, target, host, status):
    """The host of the URL takes the place of the Host header (RFC 9112, section 3.2.2)."""
    running = one(lambda: serve(hosts=["my-mac.local"]))
    connection = running.connect()
    connection.sendall(f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    with connection, connection.makefile("rb") as answer:
        assert answer.read().startswith(f"HTTP/1.1 {status} ".encode())


def test_no_key_reaches_the_log_or_the_caches(serve):
    running = serve(keys=[KEY])
    salts = []
    submit = running.serving.host.submit
    running.serving.host.submit = lambda request: (salts.append(request.cache_salt), submit(request))[1]
    for user in (None, "ann", "bob", "ann"):
        body = running.body(messages=[{"role": "user", "content": "secret words"}], user=user)
        assert running.ask("POST", "/v1/chat/completions", body, x_api_key=KEY).status == 200
    assert salts[1] == salts[3] and len(set(salts)) == 3 and all(len(salt) == 32 for salt in salts)
    running.ask("GET", "/v1/models", x_api_key="wrong" * 5)
    log = running.log.getvalue()
    assert KEY not in log and "wrong" not in log and "secret" not in log and "ann" not in log
    assert KEY not in "".join(salts) and '"prompt_tokens"' in log


def test_a_refusal_is_a_line_with_its_reason(serve):
    """A path that the server does not know could be text of a user, so the line does not have it."""
    running = serve(keys=[KEY])
    running.ask("GET", "/chat/completions", x_api_key=KEY)
    found = running.ask("GET", "/my/secret/words", x_api_key=KEY)
    assert found.status == 404 and found.error["code"] == "unknown_path"
    running.ask("PUT", "/v1/models", x_api_key=KEY)
    running.ask("GET", "/v1/models", x_api_key="wrong" * 5)
    running.ask("GET", "/health", host="evil.example")
    running.ask("POST", "/v1/chat/completions", {"nonsense": "secret"}, x_api_key=KEY)
    running.stop()  # the server writes the line after the answer
    lines = [json.loads(line) for line in running.log.getvalue().splitlines()]
    told = [(x["event"], x.get("path"), x["status"], x["reason"]) for x in lines if "reason" in x]
    assert told == [
        ("refused", "/chat/completions", 404, "unknown_path"),
        ("refused", None, 404, "unknown_path"),
        ("refused", "/v1/models", 405, "unknown_method"),
        ("refused", "/v1/models", 401, "invalid_api_key"),
        ("refused", "/health", 403, "host_not_allowed"),
        ("request", "/v1/chat/completions", "400", "unsupported_parameter"),
    ]
    assert "secret" not in running.log.getvalue()


def test_each_answer_names_the_id_that_its_line_has(serve):
    """The id is in the headers that the clients of OpenAI and of Anthropic read, and in the log."""
    running = serve(keys=[KEY])
    asked = [
        ("GET", "/v1/models", {"x_api_key": KEY}), ("GET", "/v1/models", {}),
        ("GET", "/nothing", {"x_api_key": KEY}), ("POST", "/v1/messages", {"x_api_key": KEY}),
    ]  # fmt: skip
    answers = [running.ask(method, path, **headers) for method, path, headers in asked]
    assert [answer.status for answer in answers] == [200, 401, 404, 400]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert ids == [answer.headers["request-id"] for answer in answers] and len(set(ids)) == 4
    running.stop()
    lines = [json.loads(line) for line in running.log.getvalue().splitlines()]
    assert [line["id"] for line in lines if line["event"] in ("request", "refused")] == ids


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/chat/completions", "the path is /v1/chat/completions, so the base URL must end in /v1."),
        ("/api/v1/messages", "the path is /v1/messages."),
        ("/v1/v1/chat/completions", "the path is /v1/chat/completions."),
        ("//v1/models", "the path is /v1/models."),
        ("/v1/chat/completions/", "the path is /v1/chat/completions."),
        ("/v1/api/tags", "the path is /api/tags."),
        ("/nothing/models", "the path is /v1/models, so the base URL must end in /v1."),
        ("/nothing", "GET /openapi.json lists all."),
        ("//", "GET /openapi.json lists all."),
    ],
)
def test_the_path_that_a_client_means_is_named(shared, path, words):
    """The base URL of many clients has the part /v1 or a slash too many, or lacks /v1."""
    refused = shared.ask("POST", path, {})
    told = refused.json["error"]
    message = told if isinstance(told, str) else told["message"]
    assert refused.status == 404 and message == f"there is no such path; {words}"


def test_salts_tell_pairs_apart():
    assert (
        len(
            {
                salt_digest("ab", "c"),
                salt_digest("a", "bc"),
                salt_digest("abc"),
                salt_digest("", "abc"),
                salt_digest("abc", ""),
            }
        )
        == 5
    )


def test_every_key_is_compared(monkeypatch):
    """In constant time, and also after one has matched."""
    compared = []
    real = keys.hmac.compare_digest
    monkeypatch.setattr(keys.hmac, "compare_digest", lambda a, b: (compared.append(a), real(a, b))[1])
    assert matching("a", ["a", "b", "c"]) == "a" and compared == [b"a", b"b", b"c"]
    assert matching("x", ["a"]) is None and matching("", []) is None


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_no_key_is_made_on_a_file_system_without_locks(home, monkeypatch, code):
    """Without a lock, one of two processes that make a key at the same time loses the key of the other. The
    error names the cause."""

    def refuse(*arguments):
        raise OSError(code, os.strerror(code))

    kept = new_key()
    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(StoreError, match="its file system has no locks"):
        new_key()
    assert saved_keys() == [kept]


def test_a_new_key_is_for_its_owner_alone(home):
    key = new_key()
    path = home / "api_keys"
    assert saved_keys() == [key] and len(key) > 40 and path.stat().st_mode & 0o777 == 0o600
    assert new_key() != key and len(saved_keys()) == 2
    path.chmod(0o644)
    with pytest.raises(StoreError, match="chmod 600"):
        saved_keys()
    path.chmod(0o600)
    path.write_text("short")
    with pytest.raises(UsageError):
        saved_keys()
