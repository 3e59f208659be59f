"""Who is told what of a session's outputs in its gateway."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from gateway.clients import Clients
from protocol.errors import ErrorInfo
from sessions.actions import ToClient
from sessions.client import Refused
from sessions.session import Session


async def test_who_waits_to_be_let_in_is_told_nothing_before_that() -> None:
    loop = asyncio.get_running_loop()
    clients = Clients(cast(Session, None), loop.create_future(), 0.0, lambda: 0)
    heard: dict[str, list[int]] = {"there": [], "coming": []}

    def listen(name: str) -> None:
        def told(sequence: int, output: Any) -> None:
            heard[name].append(sequence)

        clients.listeners[name] = told

    listen("there")
    listen("coming")
    clients.arrivals["coming"] = loop.create_future()
    clients.tell(ToClient(1, Refused(cast(ErrorInfo, None), None)))
    assert heard == {"there": [1], "coming": []}
    del clients.arrivals["coming"]
    clients.tell(ToClient(2, Refused(cast(ErrorInfo, None), None)))
    assert heard == {"there": [1, 2], "coming": [2]}
