"""The HTTP and WebSocket server of the gateway process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.streams import StreamReader

from protocol.errors import ConfigError
from protocol.realtime import MAX_EVENT_BYTES

WS_MAX_BYTES = MAX_EVENT_BYTES + 5 * 1024 * 1024
"""Frames up to this are read, so that a too long event can be answered; above: close 1009."""
POLICY_WS_MAX_BYTES = 64 * 1024 * 1024
"""The same for observations on a port of their own."""
PING_INTERVAL_S = 20.0
PING_TIMEOUT_S = 60.0
REQUEST_S = 20.0
SHUTDOWN_S = 5
UNSENT_BYTES = 128 * 1024
"""What the kernel takes for a peer beyond what is on its way to it (TCP_NOTSENT_LOWAT).

Megabytes in the kernel's buffer would hide from the egress that a client does not read.
"""
UNREAD_MS = 90_000
"""A peer that takes nothing for this long is dropped by the kernel (TCP_USER_TIMEOUT)."""
BACKLOG = 1024


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises ConfigError when the address cannot be had."""
    listener = bind(host, port)
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _taken(host, port, error, "gateway.port") from None
    return listener


def bind(host: str, port: int, field: str = "gateway.port") -> socket.socket:
    """A TCP socket that has its address and does not listen yet.

    Raises ConfigError, naming `field`, when the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise _taken(host, port, error, field) from None
    return listener


def _taken(host: str, port: int, error: OSError, field: str) -> ConfigError:
    advice = "Choose another with --port or ANTIPHON_PORT"
    if field != "gateway.port":
        advice = f"Choose another as {field}"
    return ConfigError(
        f"cannot listen on {host} port {port}: {error.strerror or error}. {advice}", field=field
    )


def check_tls(cert: Path | None, key: Path | None) -> None:
    """Raises ConfigError when there is a certificate that cannot be used."""
    if cert is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
    except OSError as error:
        raise ConfigError(
            f"cannot use the certificate {cert} with the key {key}: {error}",
            field="gateway.tls_cert",
        ) from None


class _ClientsFaultsAreNoErrors(logging.Filter):
    """Takes the alarm out of what uvicorn says of its clients.

    Of a refusal before the upgrade the surface has logged all there is to know; text that
    is not UTF-8 is no fault of a line of code here, so no traceback is wanted.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to keep `record`."""
        if record.msg == "Invalid UTF-8 sequence received from client.":
            record.exc_info = None
            record.levelno, record.levelname = logging.WARNING, "WARNING"
        return record.msg != "ASGI callable returned without completing handshake."


_clients_faults_are_no_errors = _ClientsFaultsAreNoErrors()


class _PromptHttp(H11Protocol):
    """HTTP that does not wait for ever: a request has REQUEST_S to arrive and be understood.

    uvicorn closes a connection that idles after an answer, but not one that never asks,
    asks in drops, or whose upgrade stays unanswered because it is not a valid one.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come."""
        super().connection_made(transport)
        self._timer = self.loop.call_later(REQUEST_S, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone; a timer would keep all that was read from it."""
        self._timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """An answer is out; what comes next is timed anew."""
        super().on_response_complete()
        self._timer.cancel()
        self._timer = self.loop.call_later(REQUEST_S, self._look)

    def _look(self) -> None:
        protocol = self.transport.get_protocol()
        if protocol is self:
            late = self.cycle is None or self.cycle.response_complete
        else:
            late = not getattr(protocol, "handshake_initiated", True)
        if late:
            self.transport.close()


def server_config(
    app: ASGIApp, ws_max_bytes: int, tls_cert: Path | None = None, tls_key: Path | None = None
) -> uvicorn.Config:
    """How uvicorn serves `app`; WebSocket messages above `ws_max_bytes` end with close 1009."""
    return uvicorn.Config(
        app,
        http=_PromptHttp,
        ws=_WebSocket,
        ws_max_size=ws_max_bytes,
        ws_ping_interval=PING_INTERVAL_S,
        ws_ping_timeout=PING_TIMEOUT_S,
        # Base64 audio and images do not get smaller, and compressing takes the loop's time.
        ws_per_message_deflate=False,
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level="warning",
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=SHUTDOWN_S,
        ssl_certfile=tls_cert,
        ssl_keyfile=tls_key,
    )


class _WebSocket(WebSocketsSansIOProtocol):
    """A WebSocket that holds nothing once its connection is lost.

    Its parser holds the last message and, as a generator of its own, itself: the collector would
    find it, but as it counts objects and not bytes, after gigabytes.
    """

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        super().connection_lost(exc)
        self.conn.parser.close()
        self.conn.parser_exc = None
        self.conn.reader = StreamReader()
        self.frames = []


class GatewayServer(uvicorn.Server):
    """uvicorn, stopped by `stop` and not by signals, that drains sessions first."""

    def __init__(
        self,
        app: ASGIApp,
        drain: Callable[[], Awaitable[None]],
        tls_cert: Path | None = None,
        tls_key: Path | None = None,
    ) -> None:
        super().__init__(server_config(app, WS_MAX_BYTES, tls_cert, tls_key))
        logging.getLogger("uvicorn.error").addFilter(_clients_faults_are_no_errors)
        self._drain = drain
        self._stopped = asyncio.Event()

    async def main_loop(self) -> None:
        """Wait for `stop`: no tick wakes a gateway that has nothing to do."""
        self.server_state.default_headers = list(self.config.encoded_headers)
        await self._stopped.wait()

    def stop(self) -> None:
        """End `serve`: sessions are drained, then connections closed."""
        self.should_exit = True
        self._stopped.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Tell clients before their connections go (close 1001), for at most SHUTDOWN_S."""
        for server in self.servers:
            server.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SHUTDOWN_S):
                await self._drain()
                while self.server_state.tasks:
                    await asyncio.wait(self.server_state.tasks)
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process that runs this server."""
        yield
