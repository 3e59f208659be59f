"""Bytes on the worker's control side: reserved before the engine is asked, free when it ends."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.device_bytes import HOST
from protocol.errors import EngineFailed, InvalidRequest
from protocol.messages import (
    Acknowledge,
    Answer,
    Close,
    Configure,
    Fence,
    Open,
    RoomWanted,
    TurnEnded,
)
from protocol.payloads import Payload, PayloadType
from sessions.ledger import Budget, Ledger
from tests.workers.test_control import FENCE, Bench, code, run
from workers.control_events import (
    CancelTurn,
    ConfigureSession,
    ControlLimits,
    Emitted,
    FreeSession,
    GatewayDown,
    OpenSession,
    SessionMeasured,
    TurnFinished,
    TurnOutcome,
)

OTHER = Fence("other", 1, "g1")


def declared(settings: dict[str, Any]) -> dict[str, int]:
    size = settings.get("bytes", 40)
    if size < 0:
        raise InvalidRequest("no session has fewer bytes than none", field="bytes")
    return {HOST: size}


def bench(total: int = 100, **fields: Any) -> Bench:
    return Bench(ledger=Ledger({HOST: Budget(total)}), declare=declared, **fields)


def reserved(of: Bench) -> int:
    return of.ledger.devices()[HOST].reserved


def text(size: int) -> Payload:
    return Payload(PayloadType.TEXT, b"x" * size)


def test_bytes_are_reserved_before_the_engine_opens_and_told_in_the_answer() -> None:
    it = bench()
    (opened,) = it.command(Open(FENCE, "c1", {"bytes": 60}, tenant="t"))
    assert isinstance(opened, OpenSession)
    (answer,) = it.take()
    assert isinstance(answer, Answer)
    assert answer.result["bytes"] == {HOST: 60}
    assert reserved(it) == 60


def test_what_does_not_fit_never_reaches_the_engine_and_leaves_nothing() -> None:
    it = bench().open()
    assert it.command(Open(OTHER, "c1", {"bytes": 61})) == []
    (answer,) = it.take()
    assert code(answer) == "capacity_exceeded"
    assert (it.control.sessions, reserved(it)) == (1, 40)
    assert it.command(Open(OTHER, "c2", {"bytes": 60})) != []
    assert reserved(it) == 100


def test_who_holds_something_elsewhere_is_refused_at_once_and_asks_nobody_to_make_room() -> None:
    it = bench(parks=True).open()
    it.command(Open(OTHER, "c1", {"bytes": 61}, waits=False))
    (answer,) = it.take()
    assert (code(answer), it.control.sessions) == ("capacity_exceeded", 1)
    it.command(Open(OTHER, "c2", {"bytes": 61}))
    (asked,) = it.take()
    assert isinstance(asked, RoomWanted)


def test_settings_that_the_engine_cannot_declare_are_refused_by_field() -> None:
    it = bench()
    assert it.command(Open(FENCE, "c1", {"bytes": -1})) == []
    (answer,) = it.take()
    assert isinstance(answer, Answer)
    assert answer.error is not None
    assert (answer.error.code, answer.error.field) == ("invalid_value", "bytes")
    assert (it.control.sessions, reserved(it)) == (0, 0)


def test_an_open_that_the_engine_refuses_gives_its_bytes_back() -> None:
    it = bench()
    it.refusals["open"] = InvalidRequest("not like this")
    it.command(Open(FENCE, "c1"))
    (answer,) = it.take()
    assert isinstance(answer, Answer)
    assert answer.result.get("bytes") is None
    assert (code(answer), reserved(it)) == ("invalid_value", 0)


def test_a_closed_session_holds_nothing_and_makes_room_at_once() -> None:
    it = bench().open()
    assert FreeSession("s") in it.command(Close(FENCE, "c2", "client"))
    assert reserved(it) == 0
    it.open(OTHER)
    assert reserved(it) == 40


def test_bytes_are_held_until_the_last_turn_has_stopped() -> None:
    it = bench().open()
    it.command(run(1))
    assert CancelTurn("s", 1) in it.command(Close(FENCE, "c2", "client"))
    assert reserved(it) == 40
    it.tell(TurnFinished("s", 1, TurnOutcome.CANCELLED))
    assert reserved(it) == 0


def test_what_an_engine_fails_to_close_is_held_and_closed_again_ever_later() -> None:
    it = bench(50, limits=ControlLimits(close_again_ms=500.0, close_again_most_ms=1500.0)).open()
    it.refusals["close"] = EngineFailed("the device is busy")
    assert it.command(Close(FENCE, "c2", "client")) == [FreeSession("s")]
    assert (it.take(), reserved(it), it.control.sessions) == ([], 40, 1)
    # Each time twice as long, and no longer than that.
    for wait_ms in (500, 1000, 1500, 1500):
        assert it.after(wait_ms - 1) == []
        assert it.after(1) == [FreeSession("s")]
    it.command(Open(OTHER, "c3"))
    assert code(it.take()[0]) == "capacity_exceeded"
    del it.refusals["close"]
    it.after(1500)
    (answer,) = it.take()
    assert isinstance(answer, Answer)
    assert (answer.command, answer.error) == ("c2", None)
    assert (reserved(it), it.control.sessions, it.control.deadline_ms) == (0, 0, None)


def test_a_session_that_is_opened_anew_waits_until_the_earlier_one_is_closed() -> None:
    it = bench(50).open()
    it.refusals["close"] = EngineFailed("the device is busy")
    assert it.command(Open(Fence("s", 2, "g1"), "again")) == [FreeSession("s")]
    del it.refusals["close"]
    actions = it.after(ControlLimits().close_again_ms)
    assert [type(action) for action in actions] == [FreeSession, OpenSession]
    assert reserved(it) == 40


def test_an_open_anew_is_not_counted_twice() -> None:
    it = bench(50).open()
    fence = Fence("s", 2, "g1")
    assert it.command(Open(fence, "again")) == [FreeSession("s"), it.actions[-1]]
    assert isinstance(it.actions[-1], OpenSession)
    assert reserved(it) == 40


def test_the_sessions_of_a_gateway_that_has_gone_hold_nothing() -> None:
    it = bench(limits=ControlLimits(owner_gone_ms=0.0)).open().open(OTHER)
    it.tell(GatewayDown("g1"))
    it.after(0.0)
    assert (it.control.sessions, reserved(it)) == (0, 0)


def test_settings_that_need_more_are_reserved_first() -> None:
    it = bench().open().open(OTHER)
    (answered,) = it.command(Configure(FENCE, "c2", {"bytes": 60}))
    assert isinstance(answered, ConfigureSession)
    (answer,) = it.take()
    assert isinstance(answer, Answer)
    assert answer.result["bytes"] == {HOST: 60}
    assert it.command(Configure(OTHER, "c3", {"bytes": 41})) == []
    (answer,) = it.take()
    assert (code(answer), reserved(it)) == ("capacity_exceeded", 100)


def test_settings_that_the_engine_refuses_need_no_more() -> None:
    it = bench().open()
    it.refusals["open"] = InvalidRequest("not like this")  # The bench's name for operations.
    it.command(Configure(FENCE, "c2", {"bytes": 90}))
    assert reserved(it) == 40


def test_settings_that_need_less_give_the_rest_back() -> None:
    it = bench().open()
    it.command(Configure(FENCE, "c2", {"bytes": 10}))
    assert reserved(it) == 10


def test_output_is_reserved_until_it_is_acknowledged() -> None:
    it = bench().open()
    it.command(run(1))
    it.tell(Emitted("s", 1, text(25)))
    it.tell(Emitted("s", 1, text(35)))
    assert (it.control.kept_bytes, reserved(it)) == (60, 100)
    it.command(Acknowledge(FENCE, 1, 1))
    assert reserved(it) == 75
    it.command(Close(FENCE, "c2", "client"))
    it.tell(TurnFinished("s", 1, TurnOutcome.CANCELLED))
    assert reserved(it) == 0


def test_output_that_does_not_fit_fails_its_turn_alone() -> None:
    it = bench().open()
    it.command(run(1))
    it.command(run(2, "aside"))
    it.take()
    it.tell(Emitted("s", 1, text(61)))
    it.tell(TurnFinished("s", 1, TurnOutcome.CANCELLED))
    (ended,) = it.take()
    assert isinstance(ended, TurnEnded)
    assert ended.error is not None
    assert (ended.error.code, ended.turn, reserved(it)) == ("capacity_exceeded", 1, 40)
    it.tell(Emitted("s", 2, text(60)))
    assert reserved(it) == 100


def test_output_with_memory_of_its_own_counts_twice() -> None:
    it = bench(limits=ControlLimits(twice_over_bytes=10)).open()
    it.command(run(1))
    it.tell(Emitted("s", 1, text(10)))
    it.tell(Emitted("s", 1, text(11)))
    assert reserved(it) == 40 + 10 + 22
    it.command(Acknowledge(FENCE, 1, 2))
    assert reserved(it) == 40


def test_what_an_engine_measures_corrects_the_account() -> None:
    it = bench().open()
    it.tell(SessionMeasured("s", {HOST: 70}))
    assert reserved(it) == 70
    it.command(Open(OTHER, "c2"))
    (answer,) = it.take()
    assert code(answer) == "capacity_exceeded"
    it.tell(SessionMeasured("s", {HOST: 5}))
    assert reserved(it) == 40


def test_the_status_tells_every_device() -> None:
    it = bench().open()
    assert it.control.status("think", 0).devices == it.ledger.devices()


@pytest.mark.parametrize("sizes", [(40, 40), (100,), (20, 30, 50)])
def test_the_state_is_that_of_the_accounts(sizes: tuple[int, ...]) -> None:
    it = bench()
    empty = it.control.freeze()[-1]
    for number, size in enumerate(sizes):
        it.command(Open(Fence(f"s{number}", 1, "g1"), "open", {"bytes": size}))
    assert it.control.freeze()[-1] != empty
    for number in range(len(sizes)):
        it.command(Close(Fence(f"s{number}", 1, "g1"), "close", "client"))
    assert it.control.freeze()[-1] == empty
