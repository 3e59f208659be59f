"""What a player's world does next, and when: one step of one frame at a time, at its rate.

Free of I/O; times are monotonic ms. What is held down is state: it is sampled when a step is
begun, the latest counts, and none is queued.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from gateway.surfaces.worlds.form import Form, Row, actions
from protocol.errors import ErrorInfo, ErrorKind, SessionBusy, SessionStateLost
from sessions.steps.events import Step, StepDone, StepFailed

BACK_OFF_MS = 1_000.0
"""How long a step waits that found no room."""
REMEMBERED_HOLDS = 64
"""Holds whose time of arrival is known, the latest ones."""
MOST_ASKED = 256
"""Times that single frames may be asked for before those of the first are made."""

_GOES_ON = ("step_cancelled", "step_out_of_order", "step_committed")
"""Codes of failures after which the next step may well be done."""


@dataclass(frozen=True)
class Held:
    """What is held down, since when."""

    sequence: int
    row: Row
    received_ms: float


@dataclass(frozen=True)
class AskedScene:
    """A scene that is to be changed to, and the player's name for that."""

    scene: str
    ref: str | None


@dataclass(frozen=True)
class Stepped:
    """Single frames that were asked for by name: how many were made, and the error for which no
    more are."""

    frames: int
    ref: str
    error: ErrorInfo | None = None


@dataclass(frozen=True)
class NotChanged:
    """A scene that was asked for and is not changed to any more, and why."""

    scene: AskedScene
    why: str


@dataclass
class _Asked:
    """Single frames that are to be made."""

    frames: int
    ref: str | None
    made: int = 0
    last: bool = False
    """Whether it is over with the step that is in flight, whatever becomes of that."""


@dataclass(frozen=True)
class _Begun:
    step: int
    at_ms: float
    held: Held
    scene: AskedScene | None


class Playing:
    """The world of one connection that controls it.

    `window` is how many frames it may be ahead of what the player has seen; None: any. `name` is
    that of its steps: another's may have the same number.
    """

    def __init__(self, form: Form, window: int | None, name: str, now_ms: float) -> None:
        self.runs = False
        """Whether it goes on by itself."""
        self.late = 0
        """How many steps were begun later than a whole period after they were due."""
        self._form = form
        self._period_ms = 1000.0 / form.capabilities.rate_hz
        self._window = window
        self._name = name
        self._held = Held(0, form.nothing_held, now_ms)
        self._holds: dict[int, float] = {}
        self._asked: deque[_Asked] = deque()
        self._over: list[Stepped | NotChanged] = []
        """What the player is to be told of what it has asked for."""
        self._due_ms = now_ms
        self._committed = 0
        self._begun: _Begun | None = None
        self._stray: int | None = None
        """A step that somebody else has begun: ours come after it."""
        self._changing: str | None = None
        """Our name for what is asked of the state between two steps, until it is answered."""
        self._lost = False
        self._scene: AskedScene | None = None
        self._frame = 0
        """The last frame that was made, and the last that was seen."""
        self._seen = 0

    def stands(self, committed: int, in_flight: int | None, *, lost: bool) -> None:
        """Where the world stands as this connection comes to it."""
        self._committed, self._stray, self._lost = committed, in_flight, lost

    # What the player says

    def hold(self, held: Held) -> None:
        """This is held down from now on, unless it is older than what is."""
        if held.sequence <= self._held.sequence:
            return
        self._held = held
        self._holds[held.sequence] = held.received_ms
        if len(self._holds) > REMEMBERED_HOLDS:
            del self._holds[min(self._holds)]

    def play(self, now_ms: float) -> None:
        """Go on by itself. Raises SessionStateLost."""
        self._check_state()
        if not self.runs:
            self.runs, self._due_ms = True, max(now_ms, self._due_ms)

    def pause(self) -> None:
        """Stand still behind the frame that is being made."""
        self._stand_still(None)

    def step(self, frames: int, ref: str | None) -> None:
        """Make so many single frames. Raises SessionBusy while it goes on by itself, or has too
        much to do, and SessionStateLost."""
        self._check_state()
        if self.runs:
            raise SessionBusy("the world goes on by itself: pause it first", field="type")
        if len(self._asked) >= MOST_ASKED:
            raise SessionBusy(f"frames were asked for {MOST_ASKED} times: wait for them")
        self._asked.append(_Asked(frames, ref))

    def change_scene(self, asked: AskedScene) -> None:
        """Another scene from the next step on. Raises InvalidRequest, and SessionStateLost."""
        self._check_state()
        self._form.check_scene(asked.scene)
        self._give_up_scene("another scene was asked for")
        self._scene = asked

    def change(self, ref: str) -> None:
        """The state is kept, goes back or begins anew, in between two steps. Raises SessionBusy
        while another such thing is under way."""
        if self._changing is not None:
            raise SessionBusy(
                "a reset, a checkpoint or a rewind is under way: wait for it",
                code="change_in_progress",
            )
        self._changing = ref

    def seen(self, frame: int) -> None:
        """The player has all pictures up to this one."""
        self._seen = max(self._seen, min(frame, self._frame))

    def _check_state(self) -> None:
        if self._lost:
            raise SessionStateLost("the state is lost: reset it, or restore it")

    def what_is_over(self) -> list[Stepped | NotChanged]:
        """What has become of what the player has asked for, since this was called last."""
        over, self._over = self._over, []
        return over

    def _stand_still(self, error: ErrorInfo | None) -> None:
        """The frame that is being made, if one is, is the last."""
        self.runs = False
        kept = None
        if self._begun is not None and self._asked:
            kept = self._asked.popleft()
            kept.last = True
        self._end_asked(error)
        if kept is not None:
            self._asked.append(kept)

    def _end_asked(self, error: ErrorInfo | None = None) -> None:
        while self._asked:
            self._end_first(error)

    def _end_first(self, error: ErrorInfo | None = None) -> None:
        asked = self._asked.popleft()
        if asked.ref is not None:
            self._over.append(Stepped(asked.made, asked.ref, error))

    def _give_up_scene(self, why: str) -> None:
        if self._scene is not None:
            self._over.append(NotChanged(self._scene, why))
        self._scene = None

    # What is to be done

    def due_ms(self) -> float | None:
        """When `begin` has a step; None: not before something else happens."""
        if self._begun or self._stray is not None or self._changing is not None or self._lost:
            return None
        if not self.runs and (not self._asked or self._asked[0].last):
            return None
        if self._window is not None and self._frame - self._seen >= self._window:
            return None
        return self._due_ms

    def begin(self, now_ms: float) -> Step | None:
        """The step that is to be begun now, if one is."""
        due_ms = self.due_ms()
        if due_ms is None or due_ms > now_ms:
            return None
        parameters: dict[str, Any] = {"frames": 1}
        if self.runs:
            late_ms = now_ms - due_ms
            # A little late is made up for; more is not, or frames would come in a rush.
            self.late += late_ms >= self._period_ms
            self._due_ms = (due_ms if late_ms < self._period_ms else now_ms) + self._period_ms
            parameters["deadline_ms"] = self._due_ms - now_ms
        scene, self._scene = self._scene, None
        if scene is not None:
            parameters["scene"] = scene.scene
        held, step = self._held, self._committed + 1
        self._begun = _Begun(step, now_ms, held, scene)
        return Step(step, [actions([held.row], held.sequence)], parameters, self._name)

    # What has become of it

    def done(self, done: StepDone, now_ms: float) -> Done:
        """A step is committed, ours or not."""
        self._committed = done.committed_step
        for pieces in done.outputs.values():
            for piece in pieces:
                frame = piece.attributes.get("frame")
                self._frame = frame if isinstance(frame, int) else self._frame
        begun = self._step_over(done.step)
        if begun is None:
            return Done()
        if done.ref != self._name:
            # Somebody else has made the step of this number: ours is still to be made.
            self._not_done(begun)
            return Done()
        if self._asked:
            asked = self._asked[0]
            asked.made += 1
            if asked.last or asked.made == asked.frames:
                self._end_first()
        received_ms = self._holds.pop(begun.held.sequence, None)
        return Done(now_ms - begun.at_ms, received_ms, begun.scene)

    def failed(self, failed: StepFailed, now_ms: float) -> ErrorInfo | None:
        """A step was not done; the error for which the world stands still now, if it does."""
        self._committed = failed.committed_step
        if failed.in_flight:
            return None
        begun = self._step_over(failed.step)
        if begun is None:
            return None
        error = failed.error
        self._not_done(begun, error)
        if error.kind is ErrorKind.CAPACITY:
            wait_ms = float(error.retry_after_ms or BACK_OFF_MS)
            self._due_ms = max(self._due_ms, now_ms + wait_ms)
            return None
        if error.code in _GOES_ON:
            return None
        self._stand_still(error)
        return error

    def changed(self, committed: int) -> None:
        """The world has begun anew, or gone back: it is the one after this step. What was asked of
        the one before goes: single frames, and a scene."""
        self._give_up_scene("the world has begun anew, or gone back")
        self._end_asked()
        self._committed, self._lost = committed, False
        self._frame = self._seen = 0
        self._changing = self._stray = None

    def kept(self) -> None:
        """The state is kept, and the world goes on."""
        self._changing = None

    def change_refused(self, ref: str | None) -> bool:
        """A verb was refused; whether it was the change that waits."""
        ours = ref is not None and ref == self._changing
        if ours:
            self._changing = None
        return ours

    def state_lost(self) -> None:
        """There is nothing to go on from."""
        self._lost = True
        self.pause()

    def _not_done(self, begun: _Begun, error: ErrorInfo | None = None) -> None:
        """What was to come with this step is to come with the next, or not at all."""
        if self._asked and self._asked[0].last:
            self._end_first(error)
        if begun.scene is None:
            return
        if self._scene is None:
            self._scene = begun.scene
        else:
            self._over.append(NotChanged(begun.scene, "another scene was asked for"))

    def _step_over(self, step: int) -> _Begun | None:
        if step == self._stray:
            self._stray = None
        begun = self._begun
        if begun is None or begun.step != step:
            return None
        self._begun = None
        return begun


@dataclass(frozen=True)
class Done:
    """What is known of a step that is done: of one of this connection's how long it took, when
    the hold had come that took effect with it, and the scene that it changed to."""

    took_ms: float | None = None
    held_since_ms: float | None = None
    scene: AskedScene | None = None
