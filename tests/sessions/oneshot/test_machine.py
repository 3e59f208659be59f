"""A session of one turn: pieces in order as they are made, one last word, then nothing."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.connectors import InlineDescriptor
from protocol.errors import CapacityExceeded, EngineFailed, InvalidRequest
from protocol.messages import (
    Acknowledge,
    Answer,
    Command,
    Feed,
    Fence,
    Open,
    RaiseFloor,
    Run,
    TurnEnded,
    TurnStatus,
)
from protocol.payloads import Payload, PayloadType, audio_payload, text_payload
from sessions import passed_on
from sessions.actions import Action, StageProduced, ToStage, TurnMeasured
from sessions.bindings import Binding
from sessions.client import Refused
from sessions.lifecycle import CloseReason
from sessions.oneshot.events import (
    CancelRequest,
    OneShotOutput,
    Piece,
    Request,
    RequestDone,
    RequestFailed,
)
from sessions.oneshot.machine import OneShotMachine
from sessions.pipeline import Delivery, Edge, Limits, Pipeline
from tests.sessions.harness import ask

PROMPT = text_payload("Say it.")


def chat(**limits: int) -> Pipeline:
    """think -> speak, both heard."""
    return Pipeline(
        "chat",
        ("think", "speak"),
        (Edge("think", "speak", PayloadType.TEXT, Delivery.CHUNK),),
        {"text": "think", "audio": "speak"},
        limits=Limits(**limits),
    )


class OneShot:
    """One request's machine. It does with stages what a session does."""

    def __init__(self, pipeline: Pipeline | None = None, **settings: Any) -> None:
        self.now_ms = 1_000.0
        pipeline = pipeline or chat()
        self.outputs: list[OneShotOutput] = []
        self.commands: list[tuple[str, Command]] = []
        self.measured: list[TurnMeasured] = []
        self.progressed = 0
        self.sequences: dict[str, int] = {}
        self.bindings: dict[str, Binding] = {}
        self.machine = OneShotMachine(
            pipeline,
            self.bindings,
            emit=self.outputs.append,
            measured=self.measured.append,
            progress=self._progress,
            settings_changed=lambda: None,
            new_id=lambda prefix: prefix,
        )
        self.machine.prepare(settings)
        for stage in pipeline.stages:
            self.bindings[stage] = Binding(
                stage,
                lambda: Fence("s", 1, "gateway"),
                lambda stage=stage: self.machine.stage_settings(stage),  # type: ignore[misc]
                self._act,
                tenant="somebody",
                priority=0,
                durable_until_s=None,
                peer=lambda other: self.bindings[other],
            )
            self.bindings[stage].bind()
            self.come_back(stage)

    def _progress(self) -> None:
        self.progressed += 1

    def _act(self, action: Action) -> None:
        if isinstance(action, ToStage):
            self.commands.append((action.stage, action.command))

    def ask(self, **fields: Any) -> None:
        ask(self.machine, Request([PROMPT], **fields), self.now_ms, self.outputs.append)

    def come_back(self, stage: str) -> None:
        binding = self.bindings[stage]
        binding.bound(f"{stage}-1")
        binding.answered(Answer("s", self.sent(Open, stage)[-1].command))
        self.machine.stage_ready(stage, self.now_ms)

    def lose(self, stage: str) -> None:
        self.machine.stage_lost(stage, self.bindings[stage].lost(), self.now_ms)
        self.bindings[stage].bind()

    def produce(self, stage: str, payload: Payload) -> None:
        self.sequences[stage] = self.sequences.get(stage, 0) + 1
        descriptor = InlineDescriptor(payload)
        piece = StageProduced(stage, 1, self.sequences[stage], payload, descriptor)
        self.machine.produced(piece, self.now_ms)

    def end(self, stage: str, *, failed: bool = False, **usage: Any) -> None:
        status = TurnStatus.FAILED if failed else TurnStatus.COMPLETED
        error = EngineFailed("on purpose").info() if failed else None
        ended = TurnEnded("s", 1, status, error, usage, {"done": 2.0})
        self.bindings[stage].reported(ended)
        self.machine.report(stage, ended, self.now_ms)

    def sent(self, kind: type[Any], stage: str) -> list[Any]:
        return [c for to, c in self.commands if to == stage and isinstance(c, kind)]

    def said(self) -> list[Any]:
        """What came out since the last call, in short."""
        short: list[Any] = []
        for output in self.outputs:
            match output:
                case Piece(port="text"):
                    short.append(output.payload.data.decode())
                case Piece():
                    short.append(output.payload.attributes["clause"])
                case RequestFailed() | Refused():
                    short.append(output.error.code)
                case RequestDone():
                    short.append("done")
        self.outputs.clear()
        return short


def sound(clause: int) -> Payload:
    return audio_payload(b"\x00\x00" * 24, 24_000, clause=clause, clause_end=True)


def test_pieces_come_in_the_order_in_which_they_are_made_and_then_the_last_word() -> None:
    one = OneShot()
    one.ask(parameters={"think": {"temperature": 0}})
    assert one.sent(Run, "think")[0].parameters == {"temperature": 0}
    one.now_ms += 30
    one.produce("think", text_payload("One moment, please. "))
    one.now_ms += 20
    one.produce("speak", sound(0))
    one.produce("think", text_payload("Here it is. "))
    one.end("think", output_tokens=7)
    one.produce("speak", sound(1))
    assert not one.machine.finished
    one.end("speak")
    assert one.machine.finished
    assert one.outputs[-1] == RequestDone(
        {"think": {"output_tokens": 7}, "speak": {}},
        {"think": {"done": 2.0}, "speak": {"done": 2.0}},
    )
    assert one.said() == ["One moment, please. ", 0, "Here it is. ", 1, "done"]
    (measured,) = one.measured
    assert (measured.status, measured.ttft_ms, measured.ttfp_ms) == ("completed", 30.0, 50.0)


def test_an_answer_of_many_clauses_is_not_held_up_by_its_own_pace() -> None:
    one = OneShot()
    one.ask()
    for number in range(8):
        one.produce("think", text_payload(f"This is sentence number {number} of the answer. "))
    one.end("think")
    heard = 0
    while not any(feed.last for feed in one.sent(Feed, "speak")):
        one.produce("speak", sound(heard))
        heard += 1
        assert heard < 50, "the voice waits for clauses that wait for the voice"
    assert heard > 2


def test_only_the_outputs_that_were_asked_for_are_made() -> None:
    one = OneShot()
    one.ask(ports=frozenset({"text"}))
    one.produce("think", text_payload("Yes. "))
    one.end("think")
    assert one.said() == ["Yes. ", "done"]
    assert not one.sent(Run, "speak")


def test_settings_go_to_the_stages_that_they_name() -> None:
    one = OneShot(think={"language": "en"})
    assert [one.sent(Open, s)[0].settings for s in ("think", "speak")] == [{"language": "en"}, {}]


@pytest.mark.parametrize("given", [{"listen": {}}, {"think": 3}])
def test_settings_of_no_stage_or_no_map_are_refused_by_name(given: dict[str, Any]) -> None:
    one = OneShot()
    with pytest.raises(InvalidRequest) as refused:
        one.machine.prepare(given)
    assert refused.value.field == f"settings.{next(iter(given))}"
    assert one.machine.settings == {}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"ports": frozenset({"video"})}, "ports"),
        ({"ports": frozenset()}, "ports"),
        ({"parameters": {"listen": {}}}, "parameters.listen"),
        ({"parameters": {"think": {"x": "y" * passed_on.MAX_PARAMETERS_BYTES}}}, "parameters"),
    ],
)
def test_a_request_that_cannot_be_carried_out_is_refused_by_name(
    fields: dict[str, Any], field: str
) -> None:
    one = OneShot()
    one.ask(**fields, ref="r")
    (refused,) = one.outputs
    assert isinstance(refused, Refused)
    assert (refused.error.field, refused.ref) == (field, "r")
    # Nothing was begun: the request can be put right.
    one.ask()
    assert one.sent(Run, "think")


def test_inputs_that_are_too_long_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passed_on, "MAX_INPUT_BYTES", 3)
    one = OneShot()
    one.ask()
    assert one.said() == ["payload_too_large"]


def test_a_second_request_is_refused() -> None:
    one = OneShot()
    one.ask()
    one.ask()
    assert one.said() == ["request_already_made"]
    assert len(one.sent(Run, "think")) == 1


def test_a_failure_ends_the_answer_with_what_was_sent_of_it() -> None:
    one = OneShot()
    one.ask()
    one.produce("think", text_payload("One. "))
    one.end("think", failed=True)
    assert one.said() == ["One. ", "engine_failed"]
    assert one.machine.finished
    assert one.measured[0].status == "failed"


def test_the_loss_of_a_worker_ends_the_answer() -> None:
    one = OneShot()
    one.ask()
    one.lose("think")
    assert one.said() == ["engine_lost"]
    assert one.machine.finished


def test_a_worker_lost_before_the_request_is_waited_for_and_not_for_ever() -> None:
    one = OneShot(chat(restore_ms=500))
    one.lose("think")
    one.ask()
    assert one.machine.deadline() == 1_500.0
    one.machine.tick(1_500.0)
    assert one.said() == ["engine_lost"]


def test_a_worker_that_refuses_the_session_ends_the_answer() -> None:
    one = OneShot()
    one.lose("think")
    one.ask()
    one.machine.stage_refused("think", CapacityExceeded("full").info(), one.now_ms)
    assert one.said() == ["capacity_exceeded"]


def test_a_cancelled_request_ends_at_once_on_every_stage() -> None:
    one = OneShot()
    one.ask()
    ask(one.machine, CancelRequest(), one.now_ms, one.outputs.append)
    ask(one.machine, CancelRequest(ref="again"), one.now_ms, one.outputs.append)
    assert one.said() == ["request_cancelled", "request_not_active"]
    assert one.sent(RaiseFloor, "think")
    one.produce("think", text_payload("too late"))
    one.end("think")
    assert one.said() == []
    assert [m.status for m in one.measured] == ["cancelled"]


def test_without_a_request_there_is_nothing_to_cancel() -> None:
    one = OneShot()
    ask(one.machine, CancelRequest(), one.now_ms, one.outputs.append)
    assert one.said() == ["request_not_active"]
    assert not one.machine.finished


def test_a_client_that_does_not_read_holds_its_worker_up_and_loses_nothing() -> None:
    one = OneShot()
    one.ask(ports=frozenset({"text"}))
    one.machine.blocked(True, one.now_ms)
    one.produce("think", text_payload("One. "))
    one.end("think")
    assert one.said() == []
    assert not one.sent(Acknowledge, "think")
    assert not one.machine.finished
    one.machine.blocked(False, one.now_ms)
    assert one.said() == ["One. ", "done"]
    assert [a.through for a in one.sent(Acknowledge, "think")] == [1]


def test_what_a_failed_turn_had_lent_is_not_sent_afterwards() -> None:
    one = OneShot()
    one.ask()
    one.machine.blocked(True, one.now_ms)
    one.produce("think", text_payload("One. "))
    one.end("think", failed=True)
    one.machine.blocked(False, one.now_ms)
    assert one.said() == ["engine_failed"]


def test_a_client_that_never_reads_is_stalled_after_its_time() -> None:
    one = OneShot(chat(stall_ms=500))
    one.machine.blocked(True, 1_000.0)
    assert one.machine.deadline() == 1_500.0
    assert [one.machine.stalled(at) for at in (1_499.0, 1_500.0)] == [False, True]


def test_a_client_is_stalled_at_the_very_deadline_whatever_is_lost_in_rounding() -> None:
    machine = OneShot(chat(stall_ms=500)).machine
    machine.blocked(True, 1_600.74)
    due_ms = machine.deadline()
    assert due_ms is not None
    assert due_ms - 1_600.74 < 500
    assert machine.stalled(due_ms)


@pytest.mark.parametrize("asked", [False, True])
def test_a_request_under_way_gets_its_last_word_when_the_session_ends(asked: bool) -> None:
    one = OneShot()
    if asked:
        one.ask()
    one.machine.end(CloseReason.IDLE, None, one.now_ms)
    one.machine.end(CloseReason.IDLE, None, one.now_ms)
    assert one.said() == ["request_cancelled"] * asked


def test_the_request_and_each_piece_that_is_sent_are_progress() -> None:
    one = OneShot()
    one.ask()
    one.ask()
    assert one.progressed == 1
    one.produce("think", text_payload("One. "))
    assert one.progressed == 2
    one.machine.blocked(True, one.now_ms)
    one.produce("think", text_payload("Two. "))
    assert one.progressed == 2


def test_the_state_has_a_canonical_value() -> None:
    one, other = OneShot(), OneShot()
    assert one.machine.freeze() == other.machine.freeze()
    one.ask()
    assert one.machine.freeze() != other.machine.freeze()
    other.ask()
    assert one.machine.freeze() == other.machine.freeze()
