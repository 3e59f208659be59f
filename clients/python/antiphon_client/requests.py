"""Requests to the gateway over HTTP, one connection each: there are few of them.

The standard library's client does them, in a thread; whoever is cancelled hangs up.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import ssl
import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from antiphon_client.errors import NotReachable, ProtocolError, Refused, error_of
from antiphon_client.limits import MAX_BODY_BYTES

MAX_ANSWER_BYTES = 16 * 1024 * 1024

_KINDS = {"invalid_request_error": "client", "rate_limit_error": "capacity"}


class _Call:
    """A request, which another thread than the one that waits for it may give up."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self.connection = connection
        self.socket: socket.socket | None = None
        """Of the connection, which has it no more where the answer is to be the last."""
        self._given_up = False

    def give_up(self) -> None:
        """Let the thread that waits go on: its connection is at its end."""
        self._given_up = True
        if self.socket is not None:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)

    def check(self) -> None:
        """Raise OSError where it was given up: what was read may be a part."""
        if self._given_up:
            raise ConnectionAbortedError("given up")


class Requests:
    """Requests to the gateway at `url`, with its key if it has keys."""

    def __init__(self, url: str, key: str | None, tls: ssl.SSLContext | None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"an address like http://HOST:PORT is needed, not {url!r}")
        self._secure = parts.scheme == "https"
        self._host = parts.hostname
        self._port = parts.port
        self._path = parts.path.rstrip("/")
        self._tls = tls
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    async def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> Any:
        """The body of the answer. Raises AntiphonError for every answer but a good one, and
        NotReachable where all of one has not come within `timeout_s`."""
        call = _Call(self._connection(timeout_s))
        asking = asyncio.get_running_loop().run_in_executor(
            None, self._ask, call, method, path, body
        )
        try:
            # The connection's own limit is for each piece of an answer.
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(asking)
        except TimeoutError:
            raise NotReachable(f"{method} {path}: no answer within {timeout_s:g} s") from None
        finally:
            if not asking.done():
                call.give_up()
                asking.add_done_callback(_retrieve)

    def ask_now(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> Any:
        """The same, for a thread that may wait."""
        call = _Call(self._connection(timeout_s))
        timer = threading.Timer(timeout_s, call.give_up)
        timer.daemon = True
        timer.start()
        try:
            return self._ask(call, method, path, body)
        finally:
            timer.cancel()

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        if self._secure:
            return http.client.HTTPSConnection(
                self._host, self._port, timeout=timeout_s, context=self._tls
            )
        return http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)

    def _ask(self, call: _Call, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        headers = dict(self._headers)
        encoded = None
        if body is not None:
            encoded = json.dumps(body).encode()
            if len(encoded) > MAX_BODY_BYTES:
                raise Refused(
                    f"a body of {len(encoded)} bytes: the gateway takes {MAX_BODY_BYTES} at most",
                    code="body_too_large",
                )
            headers["Content-Type"] = "application/json"
        connection = call.connection
        try:
            connection.connect()
            call.socket = connection.sock
            call.check()
            connection.request(method, self._path + path, encoded, headers)
            answer = connection.getresponse()
            read = answer.read(MAX_ANSWER_BYTES)
            call.check()
        except (OSError, http.client.HTTPException) as error:
            raise NotReachable(f"{method} {path}: {error or type(error).__name__}") from error
        finally:
            connection.close()
        return _read(answer, read)


def _read(answer: http.client.HTTPResponse, body: bytes) -> Any:
    if answer.status == 204:
        return None
    try:
        read = json.loads(body)
    except (ValueError, RecursionError):
        raise ProtocolError(f"status {answer.status}, and no JSON") from None
    if answer.status < 400:
        return read
    try:
        told = read["error"]
        info = {"code": told["code"], "message": told["message"], "field": told.get("param")}
        info["kind"] = _KINDS.get(told["type"], "server")
        info["retry_after_ms"] = told.get("retry_after_ms")
    except (KeyError, TypeError):
        raise ProtocolError(f"status {answer.status} without an error") from None
    error = error_of(info)
    committed = read.get("committed_step")
    error.committed_step = committed if type(committed) is int else None
    raise error


def _retrieve(asked: asyncio.Future[Any]) -> None:
    if not asked.cancelled():
        asked.exception()
