"""To which servers the client of an attached chat sends this machine's stored API key."""

import pytest
from ruvmlx.apps.attach.client import is_here


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("127.0.0.1:8080", True), ("127.8.9.1", True), ("localhost:1", True), ("[::1]:8080", True),
        ("127.example.com", False), ("127.0.0.1.example.com", False), ("localhost.example.com", False),
        ("192.168.0.2", False), ("[2001:db8::1]", False),
    ],
)  # fmt: skip
def test_only_a_loopback_address_is_this_machine(host, here):
    assert is_here(f"http://{host}/v1") is here
