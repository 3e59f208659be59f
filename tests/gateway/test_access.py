from __future__ import annotations

from typing import Any

import pytest

from gateway.access import Access, AccessDenied, Keys
from protocol.config import GatewayConfig

KEY = "sk-0123456789"
OTHER = "sk-9876543210"


def scope(scheme: str = "ws", **headers: str) -> dict[str, Any]:
    names = {"host": "localhost:8080", **headers}
    return {
        "type": "websocket" if scheme.startswith("ws") else "http",
        "scheme": scheme,
        "headers": [(name.encode(), value.encode()) for name, value in names.items()],
    }


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8080", "127.0.0.1:1", "[::1]:8080", "192.168.1.4", "LOCALHOST"]
)
def test_own_names_and_addresses_are_hosts(host: str) -> None:
    Access(GatewayConfig()).check_host(scope(host=host))


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example:8080", "", "[::1", "a b"])
def test_foreign_names_are_refused_as_host(host: str) -> None:
    with pytest.raises(AccessDenied) as caught:
        Access(GatewayConfig()).check_host(scope(host=host))
    assert (caught.value.code, caught.value.status) == ("host_not_allowed", 403)


def test_keys_do_not_open_loopback_to_foreign_names() -> None:
    # A page under a rebound name would be of the server's "own" origin.
    with pytest.raises(AccessDenied):
        Access(GatewayConfig(keys=(KEY,))).check_host(scope(host="evil.example"))


def test_off_loopback_keys_stand_in_for_names_until_names_are_configured() -> None:
    public = GatewayConfig(host="0.0.0.0", keys=(KEY,))
    Access(public).check_host(scope(host="voice.example.org"))
    named = GatewayConfig(host="0.0.0.0", keys=(KEY,), hosts=("voice.example.org",))
    Access(named).check_host(scope(host="voice.example.org:443"))
    for config in (named, GatewayConfig(host="0.0.0.0")):
        with pytest.raises(AccessDenied):
            Access(config).check_host(scope(host="other.example.org"))


@pytest.mark.parametrize(
    ("scheme", "headers"),
    [
        ("ws", {}),
        ("ws", {"origin": "http://localhost:8080"}),
        ("http", {"origin": "http://localhost:8080"}),
        ("wss", {"origin": "https://localhost", "host": "localhost"}),
        ("wss", {"origin": "https://localhost:443", "host": "localhost"}),
        ("ws", {"origin": "https://app.example.org"}),
    ],
)
def test_own_configured_and_absent_origins_are_let_in(scheme: str, headers: dict[str, str]) -> None:
    access = Access(GatewayConfig(origins=("https://app.example.org",)))
    access.check_origin(scope(scheme, **headers))


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "http://localhost:8081",
        "https://localhost:8080",
        "http://localhost:8080.evil.example",
        "http://localhost:8080@evil.example",
        "null",
        "",
        "file://",
    ],
)
def test_other_origins_are_refused(origin: str) -> None:
    with pytest.raises(AccessDenied) as caught:
        Access(GatewayConfig()).check_origin(scope(origin=origin))
    assert (caught.value.code, caught.value.status) == ("origin_not_allowed", 403)


def test_without_keys_everyone_who_reaches_the_port_is_let_in() -> None:
    assert Access(GatewayConfig()).tenant(scope(authorization="Bearer whatever")) == "local"


@pytest.mark.parametrize(
    ("headers", "subprotocols"),
    [
        ({"authorization": f"Bearer {KEY}"}, []),
        ({"authorization": f"bearer  {KEY}"}, []),
        ({"authorization": f"Api-Key {KEY}"}, []),
        ({}, ["realtime", f"openai-insecure-api-key.{KEY}"]),
    ],
)
def test_a_key_is_taken_from_header_or_subprotocol(
    headers: dict[str, str], subprotocols: list[str]
) -> None:
    access = Access(GatewayConfig(keys=(OTHER, KEY)))
    tenant = access.tenant(scope(**headers), subprotocols)
    assert tenant.startswith("key-")
    assert KEY not in tenant


def test_tenants_of_different_keys_differ() -> None:
    keys = Keys((KEY, OTHER))
    assert keys.match(KEY) != keys.match(OTHER)
    assert keys.match("sk-unknown") is None


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, "missing_api_key"),
        ({"authorization": "Bearer "}, "missing_api_key"),
        ({"authorization": f"Basic {KEY}"}, "missing_api_key"),
        ({"authorization": f"Bearer {KEY}x"}, "invalid_api_key"),
        ({"authorization": "Bearer é"}, "invalid_api_key"),
    ],
)
def test_wrong_keys_are_refused(headers: dict[str, str], code: str) -> None:
    with pytest.raises(AccessDenied) as caught:
        Access(GatewayConfig(keys=(KEY,))).tenant(scope(**headers))
    assert (caught.value.code, caught.value.status) == (code, 401)
    assert KEY not in caught.value.message


def test_admin_is_open_on_loopback_to_programs_and_own_pages_only() -> None:
    access = Access(GatewayConfig(keys=(KEY,)))
    access.check_admin(scope("http"))
    access.check_admin(scope("http", origin="http://localhost:8080"))
    with pytest.raises(AccessDenied):
        access.check_admin(scope("http", origin="http://evil.example"))


def test_admin_is_closed_off_loopback_without_admin_keys() -> None:
    access = Access(GatewayConfig(host="0.0.0.0", keys=(KEY,)))
    with pytest.raises(AccessDenied) as caught:
        access.check_admin(scope("http", authorization=f"Bearer {KEY}"))
    assert caught.value.code == "admin_not_configured"


def test_admin_keys_are_keys_of_their_own() -> None:
    access = Access(GatewayConfig(keys=(KEY,), admin_keys=(OTHER,)))
    access.check_admin(scope("http", authorization=f"Bearer {OTHER}"))
    for headers in ({}, {"authorization": f"Bearer {KEY}"}):
        with pytest.raises(AccessDenied):
            access.check_admin(scope("http", **headers))
    with pytest.raises(AccessDenied):
        access.tenant(scope(authorization=f"Bearer {OTHER}"))
