"""A port of its own for one robot pipeline: open while the pipeline is ready.

OpenPI's clients know a host and a port, take a connection that is refused for a policy that is
still loading, and come again. So nothing listens before the policy can answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Protocol, cast

import structlog
import uvicorn
from uvicorn.server import ServerState

from gateway.server import BACKLOG, SHUTDOWN_S, bind

_log = structlog.get_logger(__name__)


class Readiness(Protocol):
    """What says whether a pipeline can be served."""

    async def until_ready(self, pipeline: str, ready: bool) -> None:
        """Wait until the pipeline is ready, or until it is not."""


class PolicyPort:
    """Serves `config`'s application on the address of `listener`, which is bound, and does not
    listen yet."""

    def __init__(
        self,
        host: Readiness,
        pipeline: str,
        listener: socket.socket,
        config: uvicorn.Config,
        on_open: Callable[[], None] = lambda: None,
    ) -> None:
        self._host = host
        self._pipeline = pipeline
        self._listener: socket.socket | None = listener
        self._address = listener.getsockname()[:2]
        self._config = config
        self._on_open = on_open
        self._state = ServerState()

    @property
    def port(self) -> int:
        """The port's number, whether it is open or not."""
        return int(self._address[1])

    async def serve(self) -> None:
        """Open and close the port as the pipeline becomes ready and is not any more.

        Connections stay when it closes: their sessions know best. Cancelled, it closes all.
        Raises ConfigError when the port was taken by somebody else meanwhile.
        """
        self._config.load()
        self._state.default_headers = list(self._config.encoded_headers)
        try:
            while True:
                await self._host.until_ready(self._pipeline, True)
                server = await self._open()
                try:
                    await self._host.until_ready(self._pipeline, False)
                finally:
                    server.close()
                    _log.info("policy_port_closed", port=self.port, pipeline=self._pipeline)
        finally:
            if self._listener is not None:
                self._listener.close()
            await self._let_go()

    async def _open(self) -> asyncio.AbstractServer:
        listener, self._listener = self._listener or bind(*self._address), None
        loop = asyncio.get_running_loop()
        try:
            server = await loop.create_server(
                self._protocol, sock=listener, ssl=self._config.ssl, backlog=BACKLOG
            )
        except BaseException:
            listener.close()
            raise
        _log.info("policy_port_open", port=self.port, pipeline=self._pipeline)
        self._on_open()
        return server

    def _protocol(self) -> asyncio.Protocol:
        make = cast(Callable[..., asyncio.Protocol], self._config.http_protocol_class)
        return make(config=self._config, server_state=self._state, app_state={})

    async def _let_go(self) -> None:
        """The sessions have been told to end; what is left after a while is cut off."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SHUTDOWN_S):
                while self._state.tasks:
                    await asyncio.wait(self._state.tasks)
        for connection in list(self._state.connections):
            connection.shutdown()
