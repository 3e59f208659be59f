"""What a player's world does next: the steps of a connection, without one."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.surfaces.worlds.form import Form
from gateway.surfaces.worlds.playing import (
    MOST_ASKED,
    AskedScene,
    Done,
    NotChanged,
    Playing,
    Stepped,
)
from protocol.errors import (
    CapacityExceeded,
    EngineFailed,
    ErrorInfo,
    SessionBusy,
    SessionStateLost,
)
from protocol.worlds import Capabilities
from sessions.steps.events import Step, StepDone, StepFailed

FORM = Form(Capabilities(4, 4, 10.0, 1, 2, ["up"], [], ["one", "two", "three"], ["raw"]), "dream")


def a_player() -> Playing:
    playing = Playing(FORM, None, "mine", 0.0)
    playing.stands(0, None, lost=False)
    return playing


def begun(playing: Playing, now_ms: float = 0.0) -> tuple[int, str | None]:
    """The step that is begun now, and its scene."""
    step = playing.begin(now_ms)
    assert isinstance(step, Step)
    assert step.ref == "mine"
    return step.step, step.parameters.get("scene")


def done(playing: Playing, step: int, ref: str | None = "mine", **more: Any) -> Done:
    return playing.done(StepDone(step, more.get("committed", step), {}, {}, ref), 0.0)


def failed(playing: Playing, step: int, error: ErrorInfo) -> ErrorInfo | None:
    return playing.failed(StepFailed(step, step - 1, error, "mine"), 0.0)


def test_a_step_that_somebody_else_has_made_is_none_of_the_players() -> None:
    playing = a_player()
    playing.change_scene(AskedScene("two", "scene"))
    playing.step(1, "frame")
    assert begun(playing) == (1, "two")
    assert done(playing, 1, ref="theirs") == Done()
    assert playing.what_is_over() == []
    # The scene and the frame that were asked for come with the next.
    assert begun(playing) == (2, "two")
    told = done(playing, 2)
    assert told.scene == AskedScene("two", "scene")
    assert playing.what_is_over() == [Stepped(1, "frame")]


def test_every_scene_that_is_asked_for_is_answered() -> None:
    playing = a_player()
    one, two, three = (AskedScene(name, name) for name in ("one", "two", "three"))
    playing.step(2, None)
    playing.change_scene(one)
    assert begun(playing) == (1, "one")
    playing.change_scene(two)
    assert failed(playing, 1, CapacityExceeded("full").info()) is None
    (over,) = playing.what_is_over()
    assert isinstance(over, NotChanged)
    assert over.scene == one
    playing.change_scene(three)
    (over,) = playing.what_is_over()
    assert isinstance(over, NotChanged)
    assert over.scene == two
    assert begun(playing, 5_000.0) == (1, "three")
    assert done(playing, 1).scene == three


def test_a_single_frame_that_found_no_room_is_tried_again() -> None:
    playing = a_player()
    playing.step(1, "frame")
    begun(playing)
    assert failed(playing, 1, CapacityExceeded("full").info()) is None
    assert playing.begin(10.0) is None
    assert begun(playing, 5_000.0) == (1, None)
    done(playing, 1)
    assert playing.what_is_over() == [Stepped(1, "frame")]
    assert playing.due_ms() is None


@pytest.mark.parametrize("ends", ["done", "no room"])
def test_a_pause_ends_what_was_asked_for_behind_the_frame_that_is_being_made(ends: str) -> None:
    playing = a_player()
    playing.step(5, "five")
    playing.step(5, "others")
    begun(playing)
    done(playing, 1)
    begun(playing)
    playing.pause()
    assert playing.what_is_over() == [Stepped(0, "others")]
    playing.step(1, "later")
    if ends == "done":
        done(playing, 2)
        assert playing.what_is_over() == [Stepped(2, "five")]
        assert begun(playing) == (3, None)
    else:
        error = CapacityExceeded("full").info()
        failed(playing, 2, error)
        assert playing.what_is_over() == [Stepped(1, "five", error)]
        assert begun(playing, 5_000.0) == (2, None)


def test_where_the_engine_fails_nothing_more_is_made_and_why_is_told() -> None:
    playing = a_player()
    playing.step(5, "five")
    begun(playing)
    error = EngineFailed("on purpose").info()
    assert failed(playing, 1, error) == error
    assert playing.what_is_over() == [Stepped(0, "five", error)]
    assert playing.due_ms() is None


def test_a_world_whose_state_is_lost_says_so_with_the_same_error_everywhere() -> None:
    playing = a_player()
    playing.state_lost()
    with pytest.raises(SessionStateLost):
        playing.play(0.0)
    with pytest.raises(SessionStateLost):
        playing.step(1, None)


def test_only_so_much_is_asked_for_at_once() -> None:
    playing = a_player()
    for _ in range(MOST_ASKED):
        playing.step(1, "frames")
    with pytest.raises(SessionBusy):
        playing.step(1, "more")
