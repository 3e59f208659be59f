"""The requests of one OpenPI connection, without a connection."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gateway.surfaces.openpi.requests import (
    Observed,
    Requests,
    ResetAsked,
    read_request,
)
from protocol.errors import EngineFailed, InvalidRequest
from protocol.openpi import from_parts, pack, to_parts, unpack
from protocol.payloads import Payload, PayloadType
from sessions import passed_on
from sessions.steps import refusals
from sessions.steps.events import NEXT, Reason, Reset, SafeAction, Step, StepDone, StepFailed


def observed(number: int = 0) -> Observed:
    return Observed([Payload(PayloadType.OBSERVATION, bytes([number]))])


def done(step: int, answer: dict[str, Any] | None = None, **timeline: float) -> StepDone:
    answer = {"actions": np.full((2, 1), step, "<f4")} if answer is None else answer
    parts = to_parts(PayloadType.ACTIONS, answer)
    return StepDone(step, step, {"actions": parts}, {"act": timeline})


def begun(requests: Requests) -> Step:
    verb = requests.begin()
    assert isinstance(verb, Step)
    return verb


def finished(requests: Requests, step: StepDone, now_ms: float) -> list[dict[str, Any]]:
    """What is answered when a step of this connection has been done."""
    assert requests.step_over(step.step, step.committed_step)
    return [unpack(frame) for frame in requests.done(step, "act", now_ms)]


def test_each_request_is_a_step_and_answered_with_its_timing() -> None:
    requests = Requests(committed=0)
    assert requests.begin() is None
    requests.ask(observed(), 100)
    assert begun(requests).step == 1
    assert requests.begin() is None
    (answer,) = finished(requests, done(1, started=3.0, done=9.5), 130)
    assert answer["actions"].tolist() == [[1.0], [1.0]]
    assert answer["server_timing"] == {"infer_ms": 30.0}
    assert answer["policy_timing"] == {"infer_ms": 6.5}
    assert answer["antiphon"] == {"fresh": True, "step": 1}
    requests.sent(131)
    requests.ask(observed(), 200)
    assert begun(requests).step == 2
    (answer,) = finished(requests, done(2), 210)
    assert answer["server_timing"] == {"infer_ms": 10.0, "prev_total_ms": 31.0}


def test_what_the_policy_says_of_its_time_is_told_as_it_is() -> None:
    requests = Requests(0)
    requests.ask(observed(), 0)
    begun(requests)
    said = done(1, {"actions": np.zeros((1, 1)), "policy_timing": {"infer_ms": 1.25, "n": 4}})
    (answer,) = finished(requests, said, 5)
    assert answer["policy_timing"] == {"infer_ms": 1.25, "n": 4}


def test_the_newest_observation_wins_and_those_before_it_are_answered_in_order() -> None:
    requests = Requests(0)
    requests.ask(observed(0), 0)
    begun(requests)
    for number in (1, 2, 3):
        requests.ask(observed(number), number)
    assert requests.pending == 4
    assert len(finished(requests, done(1), 10)) == 1
    verb = begun(requests)
    assert (verb.step, verb.inputs) == (2, observed(3).inputs)
    answers = finished(requests, done(2), 20)
    assert [answer["antiphon"] for answer in answers] == [
        {"fresh": False, "step": 2, "reason": "superseded"},
        {"fresh": False, "step": 2, "reason": "superseded"},
        {"fresh": True, "step": 2},
    ]
    assert [answer["server_timing"]["infer_ms"] for answer in answers] == [19, 18, 17]
    assert all(answer["actions"][0, 0] == 2 for answer in answers)
    assert (requests.superseded, requests.pending) == (2, 0)


def test_a_reset_keeps_its_place_among_observations() -> None:
    requests = Requests(0)
    for asked in (observed(1), observed(2), ResetAsked(), observed(3)):
        requests.ask(asked, 0)
    assert begun(requests).inputs == observed(2).inputs
    assert len(finished(requests, done(1), 1)) == 2
    assert isinstance(requests.begin(), Reset)
    frame = requests.was_reset(2)
    assert frame is not None
    answer = unpack(frame)
    assert answer["actions"].size == 0
    assert answer["antiphon"]["reason"] == "reset"
    verb = begun(requests)
    assert (verb.step, verb.inputs) == (1, observed(3).inputs)


def test_what_an_earlier_connection_asked_for_answers_nobody_here() -> None:
    requests = Requests(committed=4, in_flight=5)
    requests.ask(observed(), 0)
    # It waits for that, whatever number it gets then.
    assert begun(requests).step == NEXT
    assert requests.was_reset(1) is None
    assert not requests.step_over(5, 5)
    assert requests.begin() is None
    assert finished(requests, done(6), 1)
    requests.ask(observed(), 2)
    assert begun(requests).step == 7


def test_what_is_superseded_without_a_safe_action_is_answered_with_what_took_its_place() -> None:
    requests = Requests(committed=4, in_flight=5)
    superseded = StepFailed(NEXT, 4, refusals.superseded().info(), None)
    for number in (1, 2, 3):
        requests.ask(observed(number), number)
        assert begun(requests).inputs == observed(number).inputs
        assert not requests.failed(superseded)
    assert not requests.step_over(5, 5)
    answered = finished(requests, done(6), 10)
    assert [answer["antiphon"]["fresh"] for answer in answered] == [False, False, True]
    requests.ask(observed(), 20)
    begun(requests)
    assert requests.failed(StepFailed(7, 6, EngineFailed("on purpose").info(), None))


def safe(step: int, reason: Reason, *, in_flight: bool = False, value: float = 9.0) -> SafeAction:
    parts = to_parts(PayloadType.ACTIONS, {"actions": np.full((2, 1), value, "<f4")})
    return SafeAction(step, 0, reason, {"actions": parts}, in_flight)


def answers(frames: list[bytes]) -> list[dict[str, Any]]:
    return [unpack(frame) for frame in frames]


def test_what_is_late_is_answered_with_the_safe_action_and_its_result_is_nobodys() -> None:
    requests = Requests(committed=0)
    requests.ask(observed(1), 0)
    begun(requests)
    (answer,) = answers(requests.safe(safe(1, Reason.LATE, in_flight=True), 50))
    assert answer["actions"].tolist() == [[9.0], [9.0]]
    assert answer["antiphon"] == {"fresh": False, "step": 1, "reason": "late"}
    assert answer["policy_timing"] == {"infer_ms": 0.0}
    # The next waits for it, and its deadline counts from when it came.
    requests.ask(observed(2), 60)
    verb = begun(requests)
    assert (verb.step, verb.since_ms) == (NEXT, 60)
    assert not requests.step_over(1, 1)
    (answer,) = finished(requests, done(2), 90)
    assert answer["antiphon"] == {"fresh": True, "step": 2}


def test_a_newer_observation_takes_the_place_of_one_that_waits_and_both_are_answered() -> None:
    requests = Requests(committed=0)
    requests.ask(observed(1), 0)
    begun(requests)
    requests.safe(safe(1, Reason.LATE, in_flight=True), 50)
    requests.ask(observed(2), 60)
    begun(requests)
    requests.ask(observed(3), 70)
    verb = begun(requests)
    # The older one must not wait longer for that.
    assert (verb.inputs, verb.since_ms) == (observed(3).inputs, 60)
    assert requests.safe(safe(NEXT, Reason.SUPERSEDED), 70) == []
    assert not requests.step_over(1, 1)
    older, newer = finished(requests, done(2), 90)
    assert older["antiphon"]["reason"] == "superseded"
    assert newer["antiphon"] == {"fresh": True, "step": 2}


def test_a_safe_action_for_an_earlier_connection_is_none_of_ours() -> None:
    requests = Requests(committed=4, in_flight=5)
    requests.ask(observed(), 0)
    begun(requests)
    assert requests.safe(safe(5, Reason.LATE, in_flight=True), 1) == []
    assert requests.pending == 1
    (answer,) = answers(requests.safe(safe(NEXT, Reason.LATE), 2))
    assert answer["antiphon"]["fresh"] is False
    assert requests.pending == 0


def test_an_answer_without_actions_is_no_answer() -> None:
    for answer in ({"state": np.zeros(2)}, {"actions": [1.0]}):
        requests = Requests(0)
        requests.ask(observed(), 0)
        begun(requests)
        with pytest.raises(EngineFailed):
            finished(requests, done(1, answer), 1)


def test_a_request_is_a_map_in_a_binary_message() -> None:
    asked = read_request(pack({"state": np.zeros(2), "prompt": "go"}))
    assert isinstance(asked, Observed)
    assert {part.dtype for part in asked.inputs} == {"<f8", ""}
    for refused in ("text", pack([1]), b"\xc1"):
        with pytest.raises(InvalidRequest):
            read_request(refused)


def test_an_observation_has_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    message = pack({"a": b"x" * 100})
    monkeypatch.setattr("gateway.surfaces.openpi.requests.MAX_INPUT_BYTES", len(message) - 1)
    with pytest.raises(InvalidRequest, match="bytes") as refused:
        read_request(message)
    assert refused.value.code == "payload_too_large"
    assert passed_on.MAX_INPUT_BYTES > 1024 * 1024


def test_an_endpoint_is_no_part_of_the_observation() -> None:
    assert isinstance(read_request(pack({"endpoint": "reset", "session_id": "a"})), ResetAsked)
    labelled = read_request(pack({"endpoint": "infer", "session_id": "a", "prompt": "go"}))
    assert isinstance(labelled, Observed)
    assert from_parts(labelled.inputs) == {"prompt": "go"}
    for other in ({"endpoint": "elsewhere"}, {"endpoint": 3}, {"session_id": "a"}):
        asked = read_request(pack(other))
        assert isinstance(asked, Observed)
        assert from_parts(asked.inputs) == other


def test_a_reset_that_was_said_before_a_stop_is_answered_as_an_observation_is() -> None:
    requests = Requests(0)
    requests.ask(ResetAsked(), 100)
    requests.stopped(200)
    # One that was read before it, or may have been said before, and one that was not.
    requests.ask(ResetAsked(), 300, 150)
    requests.ask(ResetAsked(), 300, 250)
    assert begun(requests).inputs == []
    given = safe(NEXT, Reason.STOPPED)
    assert len(requests.safe(given, 301)) == 2
    reset = requests.begin()
    assert isinstance(reset, Reset)
    assert reset.said_ms == 250
