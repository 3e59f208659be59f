from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
from structlog.testing import capture_logs

from gateway.bookkeeping import Bookkeeping
from gateway.hosted import Hosted
from gateway.metrics import GatewayMetrics
from protocol.errors import CapacityExceeded, EngineLost, ErrorInfo
from sessions.actions import TurnMeasured
from sessions.lifecycle import CloseReason
from sessions.pipeline import Kind
from sessions.session import Identity, Session
from tests.sessions.harness import voice_pipeline


class Ended:
    """All that is asked of a session which has ended."""

    def __init__(self, error: ErrorInfo | None) -> None:
        self.identity = Identity("sess_1", 1, "gateway_1", "local", "voice", 0)
        self.pipeline = voice_pipeline()
        self.error = error


LOST = EngineLost("It died.").info()
FULL = CapacityExceeded("Full.").info()


@pytest.mark.parametrize(
    ("reason", "error", "opened", "level", "code"),
    [
        (CloseReason.CLIENT, None, True, "info", None),
        (CloseReason.IDLE, None, True, "info", None),
        (CloseReason.ENGINE_LOST, LOST, True, "warning", "engine_lost"),
        (CloseReason.ERROR, None, True, "warning", "internal_error"),
        (CloseReason.ADMISSION, FULL, False, "info", "capacity_exceeded"),
    ],
)
def test_the_end_of_a_session_is_logged_with_its_error(
    reason: CloseReason, error: ErrorInfo | None, opened: bool, level: str, code: str | None
) -> None:
    with capture_logs() as logs:
        books = Bookkeeping(GatewayMetrics())
        books.released(cast(Session, Ended(error)), reason, opened=opened)
    (log,) = logs
    assert log == {
        "event": "session_released",
        "log_level": level,
        "session": "sess_1",
        "epoch": 1,
        "reason": reason,
        "error": code,
    }


@pytest.mark.parametrize(
    ("kind", "status", "level"),
    [
        (Kind.DUPLEX, "completed", "info"),
        (Kind.ROBOT, "failed", "info"),
        (Kind.ROBOT, "completed", "debug"),
        (Kind.WORLD, "completed", "debug"),
    ],
)
def test_steps_that_are_done_have_no_line_in_the_log(kind: Kind, status: str, level: str) -> None:
    session = Ended(None)
    session.pipeline = replace(session.pipeline, kind=kind)
    turn = TurnMeasured(1, "default", status, None, None, None, None, None, 0, None, {})
    with capture_logs() as logs:
        Bookkeeping(GatewayMetrics()).measured(cast(Hosted, SimpleNamespace(session=session)), turn)
    assert [(log["event"], log["log_level"]) for log in logs] == [("turn_ended", level)]
