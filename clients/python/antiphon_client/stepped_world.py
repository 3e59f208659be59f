"""A world that is stepped by requests."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Iterable, Mapping
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from antiphon_client import told
from antiphon_client.closing import ClosedOnLeaving
from antiphon_client.connection import FIRST_RETRY_S, LAST_RETRY_S
from antiphon_client.errors import (
    AntiphonError,
    NoRoom,
    NotReachable,
    ProtocolError,
    Refused,
    ServerFailed,
)
from antiphon_client.session import (
    ANSWER_TIMEOUT_S,
    OPEN_TIMEOUT_S,
    REQUEST_TIMEOUT_S,
    Gateway,
)
from antiphon_client.stream import token_of


class SteppedWorld(ClosedOnLeaving):
    """A world that is stepped by requests, each exactly once: an answer that was lost on the way
    is asked for again, and nothing is passed over."""

    def __init__(self, gateway: Gateway, opened: Mapping[str, Any]) -> None:
        self._gateway = gateway
        self.id = token_of(opened).session
        with told.understood("the answer to an open"):
            world, facts = told.fields(opened["world"], "world"), opened["facts"]
            self.committed_step = told.whole(facts["committed_step"], "committed_step")
        self.world: Mapping[str, Any] = world
        """What it is, as of a `World`."""
        self.unclaimed = 0
        """Frames of steps that were done although nobody waited for their answer any more."""
        self._stepping = False
        self._lost = False
        """Whether the step that is asked for has had an attempt without an answer."""
        self._unanswered: dict[str, Any] | None = None
        """The step whose answer never came: it may have been done, or be done yet."""
        self._unknown: tuple[str, Mapping[str, Any]] | None = None
        """The reset, rewind or restore of which the same is true."""

    @classmethod
    async def open(
        cls,
        gateway: Gateway,
        model: str | None = None,
        *,
        settings: Mapping[str, Any] | None = None,
        limits: Mapping[str, float] | None = None,
        fork: str | None = None,
        timeout_s: float = OPEN_TIMEOUT_S,
    ) -> Self:
        """A new world; with `fork` it begins as the one of that id is now, which goes on
        undisturbed. Raises as `World.open`."""
        body: dict[str, Any] = {"settings": dict(settings or {}), "limits": dict(limits or {})}
        if model is not None:
            body["model"] = model
        if fork is not None:
            body["fork"] = {"session": fork}
        return cls(gateway, await gateway.requests.ask("POST", "/v1/worlds", body, timeout_s))

    async def step(
        self,
        actions: Iterable[Iterable[float]] = (),
        *,
        frames: int = 1,
        scene: str | None = None,
        attempts: int = 5,
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> npt.NDArray[np.uint8]:
        """So many frames further: (frames, height, width, 3). `actions` are a row for each frame
        or one for all; without any nothing is held.

        A gateway that does not answer is asked again, up to `attempts` times in all. Raises
        Refused, NoRoom, NotReachable and other AntiphonErrors; `committed_step` is where the world
        stands then, as far as that was told: somebody else may have moved it on. RuntimeError while
        another step is under way: both would have its number.

        Whether a step was done whose answer never came (NotReachable), or was not waited for any
        longer, is not known. Ask for the same again and its answer is that of this step. Any other
        step has it done first, exactly once, and counts its frames in `unclaimed`. A reset, rewind
        or restore of which nothing is known is done before either; while the gateway is still at
        it the step is refused as `change_in_progress`.
        """
        if attempts < 1:
            raise ValueError("attempts is at least 1")
        if self._stepping:
            raise RuntimeError("a step of this world is under way")
        self._stepping = True
        try:
            return await self._step(actions, frames, scene, attempts, timeout_s)
        finally:
            self._stepping = False

    async def _step(
        self,
        actions: Iterable[Iterable[float]],
        frames: int,
        scene: str | None,
        attempts: int,
        timeout_s: float,
    ) -> npt.NDArray[np.uint8]:
        asked: dict[str, Any] = {
            "actions": [[float(number) for number in row] for row in actions],
            "frames": frames,
            "format": "raw",
        }
        if scene is not None:
            asked["scene"] = scene
        await self._settle_change(attempts, timeout_s)
        if self._unanswered != asked:
            await self._settle(attempts, timeout_s)
        return await self._done(asked, attempts, timeout_s)

    async def _settle_change(self, attempts: int, timeout_s: float) -> None:
        """Know what has become of the reset, rewind or restore without an answer."""
        if self._unknown is None:
            return
        verb, body = self._unknown
        try:
            await self._change(verb, body, timeout_s, attempts)
        except (Refused, NoRoom, ServerFailed) as refused:
            if refused.code == "change_in_progress":
                raise
            # That says nothing of the first attempt: a restore that was done cannot be again.
            await self._look(timeout_s)
            self._unknown = None

    async def _look(self, timeout_s: float) -> None:
        """Know which step is the last that is committed."""
        path = f"/v1/worlds/{self.id}"
        answer = await self._gateway.requests.ask("GET", path, None, timeout_s)
        with told.understood("the answer to a look"):
            committed = told.whole(answer["facts"]["committed_step"], "committed_step")
        if committed != self.committed_step:
            self.committed_step, self._unanswered = committed, None

    async def _settle(self, attempts: int, timeout_s: float) -> None:
        """Know what has become of the step without an answer. Raises AntiphonError where that
        cannot be known now."""
        if self._unanswered is None:
            return
        try:
            self.unclaimed += len(await self._done(self._unanswered, attempts, timeout_s))
        except (Refused, NoRoom, ServerFailed):
            if self._unanswered is not None:
                raise

    async def _done(
        self, asked: dict[str, Any], attempts: int, timeout_s: float
    ) -> npt.NDArray[np.uint8]:
        """The frames of the next step. Until it is answered it is the one without an answer."""
        before, self._unanswered = self._unanswered, asked
        step = self.committed_step + 1
        try:
            answer = await self._again("step", {"step": step, **asked}, attempts, timeout_s)
        except (Refused, NoRoom, ServerFailed) as error:
            if not self._doubtful(error, step, repeated=before is not None):
                self._unanswered = None
            if error.committed_step is not None:
                self.committed_step = error.committed_step
            raise
        except (TypeError, ValueError):
            self._unanswered = before  # It was never sent.
            raise
        with told.understood("the answer to a step"):
            committed = told.whole(answer["committed_step"], "committed_step")
            made = [
                np.frombuffer(_bytes(frame["data"]), np.uint8).reshape(
                    frame["height"], frame["width"], 3
                )
                for frame in answer["frames"]
            ]
            pictures = np.stack(made)
        self.committed_step, self._unanswered = committed, None
        return pictures

    def _doubtful(self, error: AntiphonError, step: int, *, repeated: bool) -> bool:
        """Whether the step may have been done, or be done yet, although it was refused."""
        told_of = error.committed_step
        if told_of is None:
            # It says nothing of the step: an earlier attempt of it may well have come through.
            return repeated or self._lost
        # A player took the world over in its midst: it goes on.
        return error.code == "session_busy" and told_of < step

    async def reset(
        self, settings: Mapping[str, Any] | None = None, *, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> None:
        """Begin anew. Raises AntiphonError; where no answer came (NotReachable), or it was not
        waited for, the next step has it done first, and so it is with the other two."""
        await self._change("reset", {"settings": dict(settings or {})}, timeout_s)

    async def checkpoint(self, *, timeout_s: float = ANSWER_TIMEOUT_S) -> list[int]:
        """Keep the state as it is: the steps after which one is kept. Raises AntiphonError."""
        await self._settle_change(1, timeout_s)
        if not self._stepping:
            await self._settle(1, timeout_s)
        answer = await self._change("checkpoint", {}, timeout_s)
        with told.understood("the answer to a checkpoint"):
            return [told.whole(step, "kept") for step in answer["kept"]]

    async def rewind(self, step: int, *, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        """Go back to the state that was kept after `step`. Raises AntiphonError."""
        await self._change("rewind", {"step": step}, timeout_s)

    async def restore(self, *, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        """Go on from what is stored, where the state was lost with its worker: `committed_step`
        says from where. Raises Refused where nothing was lost, or nothing is stored."""
        await self._change("restore", {}, timeout_s)

    async def _change(
        self, verb: str, body: Mapping[str, Any], timeout_s: float, attempts: int = 1
    ) -> Any:
        before = self._unknown
        if verb != "checkpoint":
            self._unknown = verb, body
        try:
            answer = await self._again(verb, body, attempts, timeout_s)
        except (Refused, NoRoom, ServerFailed):
            self._unknown = before
            raise
        with told.understood(f"the answer to {verb}"):
            committed = told.whole(answer["committed_step"], "committed_step")
        if verb != "checkpoint":
            # What was asked for before is over, whatever became of it.
            self.committed_step, self._unanswered, self._unknown = committed, None, None
        return answer

    async def close(self, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        """End the world."""
        with contextlib.suppress(AntiphonError):
            await self._gateway.requests.ask("DELETE", f"/v1/worlds/{self.id}", None, timeout_s)

    async def _again(
        self, verb: str, body: Mapping[str, Any], attempts: int, timeout_s: float
    ) -> Any:
        path, delay_s = f"/v1/worlds/{self.id}/{verb}", FIRST_RETRY_S
        if verb == "step":
            self._lost = False
        for left in reversed(range(attempts)):
            try:
                return await self._gateway.requests.ask("POST", path, body, timeout_s)
            except NotReachable:
                self._lost = self._lost or verb == "step"
                if not left:
                    raise
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, LAST_RETRY_S)
        raise AssertionError("unreachable")


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise ProtocolError("a frame that is not base64") from None
