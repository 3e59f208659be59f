"""The client's stream machine: what it says on each connection, and what it makes of frames."""

from __future__ import annotations

from itertools import count
from typing import Any

import msgspec
import pytest

from antiphon_client import (
    ControlLost,
    NoRoom,
    ProtocolError,
    Refused,
    ServerFailed,
    SessionEnded,
)
from antiphon_client.limits import MAX_FRAME_BYTES
from antiphon_client.stream import (
    ACKNOWLEDGE_OUTPUTS,
    MAX_COMMANDS,
    REMEMBERED_COMMANDS,
    Answered,
    Attached,
    Lost,
    Output,
    Over,
    StreamMachine,
    Token,
)

LIMITS = {"grace_s": 20}
NAMES = {"update": "input", "signal": "signal"}


class Talk:
    """A machine, and a gateway that says what a test says."""

    def __init__(self, cursor: str | None = None) -> None:
        numbers = count(1)
        token = Token("sess_1", "secret_1", cursor)
        self.machine = StreamMachine(token, lambda: f"c{next(numbers)}")

    def connect(self) -> dict[str, Any]:
        return decoded(self.machine.attach())

    def tell(self, type: str, **fields: Any) -> list[Any]:
        return self.machine.receive(msgspec.msgpack.encode({"type": type, **fields}))

    def attach(self, sequence: int, secret: str = "secret_2", **fields: Any) -> list[Any]:
        self.connect()
        told = {"cursor": f"at.{sequence}", "limits": LIMITS, "lost": None, **fields}
        return self.tell("attached", sequence=sequence, secret=secret, **told)

    def output(self, sequence: int, type: str = "text_delta", **fields: Any) -> list[Any]:
        return self.tell(type, sequence=sequence, cursor=f"at.{sequence}", **fields)

    def said(self) -> list[dict[str, Any]]:
        frames = []
        while (frame := self.machine.take()) is not None:
            frames.append(decoded(frame))
        return frames


def decoded(frame: bytes) -> dict[str, Any]:
    read: dict[str, Any] = msgspec.msgpack.decode(frame)
    return read


def test_it_attaches_with_the_secret_and_then_with_the_next_one_and_the_cursor() -> None:
    talk = Talk()
    assert talk.connect() == {"type": "attach", "role": "controller", "secret": "secret_1"}
    (attached,) = talk.attach(3)
    assert isinstance(attached, Attached)
    assert not attached.again
    assert "secret" not in attached.fields
    talk.output(4)
    talk.machine.dropped(1006, "")
    assert talk.connect() == {
        "type": "attach",
        "role": "controller",
        "secret": "secret_2",
        "cursor": "at.4",
    }
    (attached,) = talk.attach(5, "secret_3")
    assert attached.again


def test_a_connection_that_broke_before_it_was_attached_changes_nothing() -> None:
    talk = Talk("at.7")
    first = talk.connect()
    talk.machine.dropped(None, "refused")
    assert talk.connect() == first


def test_the_token_says_what_was_read_and_not_what_has_come() -> None:
    talk = Talk()
    talk.attach(3)
    (first,) = talk.output(4)
    talk.output(5)
    assert talk.machine.token == Token("sess_1", "secret_2", "at.3")
    talk.machine.read(first)
    assert talk.machine.token.cursor == "at.4"
    assert "secret" not in repr(talk.machine.token).replace("secret_", "")


def test_what_is_told_twice_is_passed_on_once() -> None:
    talk = Talk()
    talk.attach(3)
    assert talk.output(4) == [Output("text_delta", 4, "at.4", {})]
    talk.machine.dropped(1006, "")
    talk.attach(5)
    assert talk.output(4) == []
    (output,) = talk.output(5)
    assert output.sequence == 5


def test_what_is_gone_is_said_in_its_place() -> None:
    talk = Talk()
    talk.attach(3)
    talk.output(4)
    talk.machine.dropped(1006, "")
    _, lost = talk.attach(9, lost=[5, 7])
    assert lost == Lost(5, 7)
    (output,) = talk.output(8)
    assert output.sequence == 8


def test_a_gap_that_nobody_stated_is_said_as_well() -> None:
    talk = Talk()
    talk.attach(3)
    lost, output = talk.output(6)
    assert (lost, output.sequence) == (Lost(4, 5), 6)


def test_commands_without_an_answer_are_said_again_in_their_order() -> None:
    talk = Talk()
    for text in ("a", "b"):
        talk.machine.update({"text": text})
    assert talk.said() == [], "nothing is said before the connection is attached"
    talk.attach(1)
    assert [frame["id"] for frame in talk.said()] == ["c1", "c2"]
    (answered,) = talk.output(2, "answer", id="c1", result={"n": 1}, error=None)
    assert answered == Answered("c1", {"n": 1}, None)
    talk.machine.dropped(1006, "")
    talk.machine.signal({"type": "commit"})
    talk.attach(2)
    assert talk.said() == [
        {"type": "update", "id": "c2", "input": {"text": "b"}},
        {"type": "signal", "id": "c3", "signal": {"type": "commit"}},
    ]
    assert talk.output(3, "answer", id="c1", result={}, error=None) == [], "the first one counts"


def test_what_is_urgent_goes_first() -> None:
    talk = Talk()
    talk.attach(1)
    talk.machine.update({"text": "a"})
    talk.machine.signal({"type": "commit"})
    talk.machine.signal({"type": "stop"}, urgent=True, id="mine")
    assert [frame["id"] for frame in talk.said()] == ["mine", "c1", "c2"]


def test_a_refusal_says_whose_fault_it_is() -> None:
    talk = Talk()
    talk.attach(1)
    for number, kind, error in ((2, "client", Refused), (3, "capacity", NoRoom)):
        command = talk.machine.update({})
        told = {"code": "some_code", "kind": kind, "message": "no", "retry_after_ms": 70}
        (answered,) = talk.output(number, "answer", id=command, result={}, error=told)
        assert isinstance(answered.error, error)
        assert (answered.error.code, answered.error.retry_after_ms) == ("some_code", 70)


def test_commands_without_an_answer_are_bounded() -> None:
    talk = Talk()
    for _ in range(MAX_COMMANDS):
        assert talk.machine.room
        talk.machine.update({})
    assert not talk.machine.room
    talk.machine.forget("c1")
    assert talk.machine.room
    for _ in range(3):
        talk.machine.update({"data": bytes(11 * 1024 * 1024)})
    assert not talk.machine.room
    talk.machine.forget(f"c{MAX_COMMANDS + 1}")
    talk.machine.forget("c2")
    talk.machine.forget("c3")
    assert talk.machine.room


def test_no_more_commands_wait_for_an_answer_than_the_gateway_remembers() -> None:
    talk = Talk()
    for _ in range(REMEMBERED_COMMANDS):
        talk.machine.signal({"type": "stop"}, urgent=True)
    with pytest.raises(Refused) as refused:
        talk.machine.signal({"type": "stop"}, urgent=True)
    assert refused.value.code == "too_many_events"


@pytest.mark.parametrize("said", ["update", "signal"])
def test_what_is_longer_than_a_frame_is_refused_before_it_is_sent(said: str) -> None:
    talk = Talk()
    talk.attach(1)
    around = len(msgspec.msgpack.encode({"type": said, "id": "c1", NAMES[said]: {"data": b""}}))
    longest = MAX_FRAME_BYTES - around - 3
    with pytest.raises(Refused, match=f"{MAX_FRAME_BYTES} at most") as refused:
        getattr(talk.machine, said)({"data": bytes(longest + 1)})
    assert (refused.value.code, refused.value.field) == ("payload_too_large", NAMES[said])
    assert talk.said() == []
    getattr(talk.machine, said)({"data": bytes(longest)})
    frame = talk.machine.take()
    assert frame is not None
    assert len(frame) == MAX_FRAME_BYTES
    talk.machine.dropped(1006, "")
    talk.attach(1)
    assert len(talk.said()) == 1


@pytest.mark.parametrize("id", ["", "x" * 129, "two words", "\u00e4", "line\n"])
def test_an_id_that_the_gateway_would_not_read_is_refused(id: str) -> None:
    with pytest.raises(ValueError, match="visible characters"):
        Talk().machine.signal({}, id=id)


def test_an_id_has_one_answer() -> None:
    talk = Talk()
    talk.machine.signal({}, id="mine")
    with pytest.raises(ValueError, match="mine has no answer yet"):
        talk.machine.signal({}, id="mine")


def test_what_nobody_waits_for_any_more_is_not_kept_to_be_sent() -> None:
    talk = Talk()
    talk.attach(1)
    talk.machine.update({"text": "a"})
    talk.machine.signal({"type": "stop"}, urgent=True)
    talk.machine.update({"text": "b"})
    talk.machine.forget("c1")
    talk.machine.forget("c2")
    assert [frame["id"] for frame in talk.said()] == ["c3"]


def test_a_message_that_the_other_side_does_not_take_is_not_sent_for_ever() -> None:
    for code in (1003, 1007, 1009):
        talk = Talk()
        talk.attach(1)
        (over,) = talk.machine.dropped(code, "too big")
        assert isinstance(over, Over)
        assert isinstance(over.error, ProtocolError)


def test_the_newest_acknowledgement_takes_the_place_of_those_that_wait() -> None:
    talk = Talk()
    talk.attach(0)
    for number in range(1, 3 * ACKNOWLEDGE_OUTPUTS + 1):
        (output,) = talk.output(number)
        talk.machine.read(output)
    assert talk.said() == [{"type": "have", "cursor": f"at.{3 * ACKNOWLEDGE_OUTPUTS}"}]


def test_a_close_is_said_once_on_each_connection_behind_what_waits() -> None:
    talk = Talk()
    talk.machine.close()
    talk.machine.update({})
    assert talk.said() == []
    for _ in range(2):
        talk.attach(1)
        assert [frame["type"] for frame in talk.said()] == ["update", "close"]
        assert talk.said() == []
        talk.machine.dropped(1006, "")


def test_the_gateway_is_told_now_and_then_what_was_read() -> None:
    talk = Talk()
    talk.attach(0)
    for number in range(1, 2 * ACKNOWLEDGE_OUTPUTS):
        (output,) = talk.output(number)
        talk.machine.read(output)
    assert talk.said() == [{"type": "have", "cursor": f"at.{ACKNOWLEDGE_OUTPUTS}"}]


def test_the_end_of_a_session_is_the_end() -> None:
    talk = Talk()
    talk.attach(1)
    told = {"code": "session_expired", "kind": "client", "message": "idle"}
    (over,) = talk.output(2, "session_ended", reason="idle", error=told)
    assert isinstance(over.error, SessionEnded)
    assert (over.error.reason, over.error.code) == ("idle", "session_expired")
    assert talk.machine.dropped(1000, "idle") == []
    with pytest.raises(SessionEnded):
        talk.machine.update({})


@pytest.mark.parametrize("code", ["secret_reused", "resume_refused"])
def test_who_has_an_old_secret_has_lost_control(code: str) -> None:
    talk = Talk()
    talk.connect()
    (over,) = talk.tell("error", error={"code": code, "kind": "client", "message": "no"})
    assert isinstance(over.error, ControlLost)


def test_who_is_replaced_does_not_come_back() -> None:
    talk = Talk()
    talk.attach(1)
    (over,) = talk.tell("let_go", reason="replaced", sequence=1, cursor="at.1")
    assert isinstance(over.error, ControlLost)


def test_who_read_too_slowly_comes_back() -> None:
    talk = Talk()
    talk.attach(1)
    assert talk.tell("let_go", reason="stalled", sequence=1, cursor="at.1") == []
    assert talk.machine.dropped(1008, "session_stalled") == []
    talk.attach(1)
    (over,) = talk.machine.dropped(1008, "session_closed")
    assert isinstance(over, Over)


@pytest.mark.parametrize(("kind", "final"), [("client", True), ("capacity", False)])
def test_a_connection_that_is_refused_for_now_is_tried_again(kind: str, final: bool) -> None:
    talk = Talk()
    talk.connect()
    told = talk.tell("error", error={"code": "some_code", "kind": kind, "message": "no"})
    assert bool(told) == final
    assert (talk.machine.over is not None) == final


def test_giving_up_is_for_good_and_said_once() -> None:
    talk = Talk()
    assert [type(event) for event in talk.machine.give_up(ServerFailed("no"))] == [Over]
    assert isinstance(talk.machine.over, ServerFailed)
    assert talk.machine.give_up(ServerFailed("again")) == []


@pytest.mark.parametrize(
    "frame",
    [
        b"\xc1",
        b"\x01",
        "words",
        *map(
            msgspec.msgpack.encode,
            [
                {"sequence": 1},
                {"type": "text_delta"},
                {"type": "attached", "sequence": 1},
                {"type": "error", "error": None},
                {"type": "answer", "sequence": 1, "cursor": "at.1"},
            ],
        ),
    ],
)
def test_what_is_no_frame_is_refused(frame: bytes | str) -> None:
    with pytest.raises(ProtocolError):
        Talk().machine.receive(frame)
