"""Who may talk to the gateway: host names, origins and keys.

A browser sends `Origin` with every WebSocket and every unsafe request, so a page of
another origin is refused there. `Host` is checked everywhere, which stops a foreign
name that was made to resolve to this server. Keys come in a header or a WebSocket
sub-protocol, never in a URL, and are never logged.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from gateway.http_errors import HttpRefusal
from protocol.addresses import is_loopback
from protocol.config import GatewayConfig

KEY_SUBPROTOCOL = "openai-insecure-api-key."

_DEFAULT_PORTS = {"http": 80, "https": 443}
_SECURE = {"https", "wss"}


class AccessDenied(HttpRefusal):
    """Whoever asked may not, from there or with that key."""


class Keys:
    """A set of keys that is searched in a time independent of what is presented."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def match(self, key: str) -> str | None:
        """A name for the key that tells nothing of it; None when it is not in the set."""
        presented = hashlib.sha256(key.encode()).digest()
        found = None
        for digest in self._digests:
            if hmac.compare_digest(digest, presented):
                found = f"key-{digest.hex()[:12]}"
        return found


class Access:
    """The rules of one gateway."""

    def __init__(self, config: GatewayConfig) -> None:
        self._keys = Keys(config.keys)
        self._admin_keys = Keys(config.admin_keys)
        self._loopback = is_loopback(config.host)
        self._origins = frozenset(filter(None, map(_origin, config.origins)))
        self._hosts = frozenset(_host_name(host) for host in (*config.hosts, config.host))
        self._any_host = bool(config.keys) and not config.hosts and not self._loopback

    def check_host(self, scope: Scope) -> None:
        """Raises AccessDenied for a `Host` that is not this server's.

        Loopback names, addresses and configured names are. Off loopback, with keys and
        no configured names, any name is: a page under a foreign name has no key to send.
        """
        host = Headers(scope=scope).get("host")
        if host is not None:
            name = _host_name(host)
            if name == "localhost" or _is_address(name) or name in self._hosts:
                return
            if self._any_host:
                return
        raise AccessDenied(
            "This server does not answer to that Host; add it to gateway.hosts.",
            code="host_not_allowed",
            status=403,
        )

    def check_origin(self, scope: Scope) -> None:
        """Raises AccessDenied for a page of an origin that is neither own nor configured."""
        headers = Headers(scope=scope)
        origins = headers.getlist("origin")
        if not origins:
            return
        origin = _origin(origins[0]) if len(origins) == 1 else None
        scheme = "https" if scope.get("scheme") in _SECURE else "http"
        own = _origin(f"{scheme}://{headers.get('host', '')}")
        if origin is not None and (origin == own or origin in self._origins):
            return
        raise AccessDenied(
            "Pages of that origin are not let in; add it to gateway.origins.",
            code="origin_not_allowed",
            status=403,
        )

    def tenant(self, scope: Scope, subprotocols: Sequence[str] = ()) -> str:
        """The tenant that the request's key stands for. Raises AccessDenied."""
        if not self._keys:
            return "local"
        return self._require(self._keys, _presented(scope, subprotocols))

    def check_admin(self, scope: Scope) -> None:
        """Raises AccessDenied unless the request may read and change what operators see.

        Without admin keys the operator's endpoints are open on loopback to programs
        and to this server's own pages, and closed otherwise.
        """
        if self._admin_keys:
            self._require(self._admin_keys, _presented(scope, ()))
            return
        if not self._loopback:
            raise AccessDenied(
                "The operator's endpoints need gateway.admin_keys.",
                code="admin_not_configured",
                status=403,
            )
        self.check_origin(scope)

    @staticmethod
    def _require(keys: Keys, presented: str | None) -> str:
        if presented is None:
            raise AccessDenied(
                "No API key: send 'Authorization: Bearer KEY'.",
                code="missing_api_key",
                status=401,
            )
        name = keys.match(presented)
        if name is None:
            raise AccessDenied("Incorrect API key.", code="invalid_api_key", status=401)
        return name


def _presented(scope: Scope, subprotocols: Sequence[str]) -> str | None:
    authorization = Headers(scope=scope).get("authorization", "")
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() in ("bearer", "api-key") and key.strip():
        return key.strip()
    for subprotocol in subprotocols:
        if subprotocol.startswith(KEY_SUBPROTOCOL):
            return subprotocol.removeprefix(KEY_SUBPROTOCOL)
    return None


def _host_name(host: str) -> str:
    """The host of `host[:port]`, lower case, without the brackets of IPv6."""
    if host.count(":") > 1 and not host.startswith("["):
        return host.lower()
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _origin(text: str) -> tuple[str, str, int] | None:
    """Scheme, host and port of an origin; None when it is none (as "null" is)."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return None
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname or parts.username is not None:
        return None
    return parts.scheme, parts.hostname, port or _DEFAULT_PORTS[parts.scheme]
