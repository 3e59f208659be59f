"""How a WebSocket comes to a session that is open: its upgrade, and its first frame."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import structlog
from starlette.types import Message, Receive, Scope, Send

from gateway.access import Access
from gateway.hosting import SessionHost, SessionSummary
from gateway.http_errors import can_answer, error_response
from gateway.metrics import GatewayMetrics
from gateway.surfaces.farewell import CLOSE_CODES
from gateway.surfaces.outlet import Outlet
from protocol.errors import AntiphonError, ErrorInfo, InvalidRequest

ATTACH_S = 10.0
"""How long a connection may take to say what it is to be."""

_log = structlog.get_logger(__name__)


class Encoding(Protocol):
    """An encoding of a stream, by WebSocket sub-protocol."""

    subprotocol: str

    def write(self, frame: Any) -> str | bytes:
        """A frame to be sent."""


Wire = TypeVar("Wire", bound=Encoding)


class Who(Protocol):
    """What the first frame says of who attaches."""

    @property
    def role(self) -> str:
        """`controller` or `observer`."""

    @property
    def secret(self) -> str | None:
        """The session's, for who wants control."""

    @property
    def takeover(self) -> bool:
        """Whether control is wanted without one."""


First = TypeVar("First", bound=Who)


class Upgrade:
    """The upgrades of one surface; `failed` makes the frame that says why one is refused."""

    def __init__(
        self,
        surface: str,
        host: SessionHost,
        access: Access,
        metrics: GatewayMetrics,
        failed: Callable[[ErrorInfo], Any],
    ) -> None:
        self._surface = surface
        self._host = host
        self._access = access
        self._metrics = metrics
        self._failed = failed

    async def accept(
        self,
        wires: Sequence[Wire],
        find: Callable[[str, str], SessionSummary],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> tuple[Wire, SessionSummary] | None:
        """The encoding and the session that the client names; None where it is not let in.

        `find` looks a session of a tenant up, and raises AntiphonError for one that this surface
        does not serve. Who offered an encoding is refused in it, as browsers cannot read a status.
        """
        message = await receive()
        if message["type"] != "websocket.connect":
            return None
        offered = [wire for wire in wires if wire.subprotocol in scope["subprotocols"]]
        wire = offered[0] if offered else wires[0]
        subprotocol = wire.subprotocol if offered else None
        accept: Message = {"type": "websocket.accept", "subprotocol": subprotocol, "headers": []}
        refusal: AntiphonError | None = None
        try:
            tenant = self._access.tenant(scope, scope["subprotocols"])
            summary = find(scope["path_params"]["session"], tenant)
        except AntiphonError as error:
            self._metrics.open_refused(error.code)
            _log.info("stream_refused", surface=self._surface, code=error.code)
            if subprotocol is None and can_answer(scope):
                await error_response(error)(scope, receive, send)
                return None
            refusal = error
        try:
            await send(accept)
        except OSError:
            return None  # The client hung up during the upgrade.
        if refusal is not None:
            await self.refuse(Outlet(send, self._metrics.frames(self._surface)), wire, refusal)
            return None
        return wire, summary

    async def refuse(self, outlet: Outlet, wire: Encoding, error: AntiphonError) -> None:
        """A frame that says why, and the close code of its kind."""
        self._metrics.error_told(error.code)
        outlet.egress.put(wire.write(self._failed(error.info())))
        outlet.finish(CLOSE_CODES[error.kind], error.code)
        # The client may hang up first.
        with contextlib.suppress(OSError):
            await outlet.run()


async def first_frame(receive: Receive, read: Callable[[Message], Any], kind: type[First]) -> Any:
    """The frame of this `kind` that a connection begins with; None when it has hung up.

    Raises InvalidRequest where that does not come, or asks for too much or too little.
    """
    try:
        async with asyncio.timeout(ATTACH_S):
            message = await receive()
    except TimeoutError:
        raise InvalidRequest(
            f"no 'attach' came within {ATTACH_S:g} s", code="attach_required"
        ) from None
    if message["type"] == "websocket.disconnect":
        return None
    attach = read(message)
    if not isinstance(attach, kind):
        raise InvalidRequest("the first frame is 'attach'", field="type", code="attach_required")
    _check(attach)
    return attach


def _check(attach: Who) -> None:
    if attach.role == "observer":
        for name in ("secret", "takeover"):
            if getattr(attach, name):
                raise InvalidRequest("an observer needs none", field=name)
    elif attach.secret is None and not attach.takeover:
        raise InvalidRequest(
            "control needs the session's secret, or 'takeover': true",
            field="secret",
            code="secret_required",
        )
    elif attach.secret is not None and attach.takeover:
        raise InvalidRequest("who has the secret takes nothing over", field="takeover")
