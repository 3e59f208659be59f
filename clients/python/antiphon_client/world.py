"""A world that is played over its own stream: what is held down goes, the newest picture comes.

The connection comes back by itself, and the same world goes on. Pictures are what the gateway
made of frames: only `raw` ones are pixels without a library of pictures.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from antiphon_client import told
from antiphon_client.closing import ClosedOnLeaving
from antiphon_client.connection import (
    CONNECT_TIMEOUT_S,
    FIRST_RETRY_S,
    LAST_RETRY_S,
    LEASE_MARGIN_S,
    not_understood,
)
from antiphon_client.errors import (
    AntiphonError,
    ConnectionLost,
    ControlLost,
    NoAnswer,
    ProtocolError,
    Refused,
    ServerFailed,
    SessionEnded,
    error_of,
)
from antiphon_client.session import (
    ANSWER_TIMEOUT_S,
    OPEN_TIMEOUT_S,
    REQUEST_TIMEOUT_S,
    RESUME_TIMEOUT_S,
    Gateway,
    answered_within,
)
from antiphon_client.stream import Token, frame_of, token_of

WINDOW_FRAMES = 16
"""How far a world may be ahead of the pictures that came: it stands still soon after the network
does."""

STATE_LOST = "session_state_lost"
_FINAL = frozenset({1000, 1008})
_REFUSING = frozenset({"secret_reused", "resume_refused"})
_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True)
class Picture:
    """A frame of a world. `told` is all that the gateway says of it, such as `control_ms`."""

    frame: int
    step: int
    action_sequence: int
    width: int
    height: int
    format: str
    data: bytes
    told: Mapping[str, Any]

    @property
    def pixels(self) -> npt.NDArray[np.uint8]:
        """(height, width, 3), read-only. Raises ValueError for a format that is not `raw`."""
        if self.format != "raw":
            raise ValueError(f"the picture is {self.format}: ask for format='raw'")
        return np.frombuffer(self.data, np.uint8).reshape(self.height, self.width, 3)


class World(ClosedOnLeaving):
    """A world in control of this client. Leave the context to end it.

    Made by `World.open` and `World.resume`. The newest picture is what counts: `next_picture`
    waits for one that was not seen yet, and pictures that nobody waited for are passed over,
    counted in `missed`.
    """

    def __init__(
        self, gateway: Gateway, token: Token, *, format: str = "jpeg", quality: int = 80
    ) -> None:
        self._gateway = gateway
        self._id = token.session
        self._secret = token.secret
        self._look = {"format": format, "quality": quality, "window": WINDOW_FRAMES}
        self._sequence = 0
        self._held: dict[str, Any] = {"keys": [], "axes": {}}
        self._plays = False
        self._socket: ClientConnection | None = None
        self._attached = asyncio.Event()
        self._begun = asyncio.Event()
        self._picture: Picture | None = None
        self._came = asyncio.Event()
        self._answers: dict[str, asyncio.Future[Mapping[str, Any]]] = {}
        self._asked = 0
        self._grace_s = CONNECT_TIMEOUT_S
        self._let_go = False
        """Whether the world goes on without this connection, for no fault of the next one."""
        self._still: AntiphonError | None = None
        """Why the world stands still, where that is for an error, until it is told to go on."""
        self._over: AntiphonError | None = None
        self.world: Mapping[str, Any] = {}
        """What it is: `width`, `height`, `rate_hz`, `keys`, `axes`, `scenes` and more."""
        self.committed_step = 0
        self.lost = False
        """Whether the state is gone with its worker: `reset` begins anew, and `restore` goes on
        from the step `restorable_step`, where that is not None."""
        self.restorable_step: int | None = None
        self.kept: list[int] = []
        """The steps to which `rewind` can go back."""
        self.missed = 0
        """Pictures that came and were passed over for newer ones."""
        self.connections = 0
        """How many connections controlled the world so far."""
        self._task = asyncio.create_task(self._run(), name=f"world {token.session}")

    @classmethod
    async def open(
        cls,
        gateway: Gateway,
        model: str | None = None,
        *,
        settings: Mapping[str, Any] | None = None,
        limits: Mapping[str, float] | None = None,
        fork: str | None = None,
        format: str = "jpeg",
        quality: int = 80,
        timeout_s: float = OPEN_TIMEOUT_S,
    ) -> Self:
        """A new world of the pipeline `model`, or of the first one; paused. With `fork` it begins
        as the one of that id is now, which goes on undisturbed. Waits where there is a queue.
        Raises Refused, NoRoom, NotReachable and other AntiphonErrors; NoAnswer where it was opened
        and could not be attached within `timeout_s`."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        body: dict[str, Any] = {"settings": dict(settings or {}), "limits": dict(limits or {})}
        if model is not None:
            body["model"] = model
        if fork is not None:
            body["fork"] = {"session": fork}
        opened = await gateway.requests.ask("POST", "/v1/worlds", body, timeout_s)
        left_s = max(until_s - loop.time(), 0.0)
        return await cls.resume(
            gateway, token_of(opened), format=format, quality=quality, timeout_s=left_s
        )

    @classmethod
    async def resume(
        cls,
        gateway: Gateway,
        token: Token,
        *,
        format: str = "jpeg",
        quality: int = 80,
        timeout_s: float = RESUME_TIMEOUT_S,
    ) -> Self:
        """The world that `token` names, as another process left it. Raises AntiphonError: NoAnswer
        where it could not be attached within `timeout_s`."""
        it = cls(gateway, token, format=format, quality=quality)
        try:
            async with answered_within(timeout_s, "the world is not attached"):
                await it._begun.wait()
            if it._over is not None:
                raise it._over
        except BaseException:
            await it.detach()
            raise
        return it

    @property
    def id(self) -> str:
        """The session's id."""
        return self._id

    @property
    def token(self) -> Token:
        """What it takes to come back from another process; it changes with each connection."""
        return Token(self._id, self._secret)

    @property
    def error(self) -> AntiphonError | None:
        """Why the world can be used no more."""
        return self._over

    # What a player says

    async def hold(self, *keys: str, axes: Mapping[str, float] | None = None) -> int:
        """Hold down these, and nothing else, from the next step on; the number that comes back
        as `action_sequence`. A connection that comes back holds the same again.

        Raises ValueError for what the world has not, and for an axis beyond -1 to 1.
        """
        self._check()
        wanted = {name: float(value) for name, value in (axes or {}).items()}
        for kind, names in (("keys", keys), ("axes", wanted)):
            if unknown := sorted(set(names) - set(self.world[kind])):
                raise ValueError(f"the world has no {unknown[0]!r} among its {kind}")
        if beyond := [name for name, value in wanted.items() if not -1.0 <= value <= 1.0]:
            raise ValueError(f"axis {beyond[0]!r} is from -1 to 1")
        self._sequence += 1
        self._held = {"keys": list(keys), "axes": wanted}
        await self._say({"type": "hold", "sequence": self._sequence, **self._held})
        return self._sequence

    async def play(self) -> None:
        """Go on at the world's rate, also after a connection came back. Raises Refused."""
        self._plays = True
        try:
            await self._ask({"type": "play"})
        except (Refused, ServerFailed):
            self._plays = False
            raise

    async def pause(self) -> None:
        """Stand still behind the frame that is being made."""
        self._plays = False
        await self._ask({"type": "pause"})

    async def reset(self, settings: Mapping[str, Any] | None = None) -> None:
        """Begin anew, with settings that replace those of the open; it stands still then where it
        did before. Raises Refused."""
        await self._ask({"type": "reset", "settings": dict(settings or {})})

    async def checkpoint(self) -> list[int]:
        """Keep the state as it is: the steps after which one is kept. Raises Refused."""
        answer = await self._ask({"type": "checkpoint"})
        with told.understood("the answer to a checkpoint"):
            return [told.whole(step, "kept") for step in answer["kept"]]

    async def rewind(self, step: int) -> None:
        """Go back to the state that was kept after `step`. Raises Refused where none is."""
        await self._ask({"type": "rewind", "step": step})

    async def restore(self) -> None:
        """Go on from the state that is stored, where the last one is lost; paused. Raises Refused
        where nothing is lost, or nothing is stored."""
        await self._ask({"type": "restore"})

    async def change_scene(self, scene: str) -> int:
        """Another scene from the next step on: waits for that step, and returns its number.
        Raises Refused."""
        answer = await self._ask({"type": "scene", "scene": scene})
        with told.understood("the answer to a scene"):
            return told.whole(answer["step"], "step")

    async def next_picture(self, timeout_s: float = ANSWER_TIMEOUT_S) -> Picture:
        """The newest picture, as soon as there is one that was not returned before.

        Raises NoAnswer after `timeout_s`, and what ended the world. Where the world stands still
        for an error, such as that its state is lost, that is raised until it is told to go on, by
        `play`, `reset`, `rewind` or `restore`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while self._picture is None:
                    self._check()
                    if self._still is not None:
                        raise self._still.with_traceback(None)
                    self._came.clear()
                    await self._came.wait()
        except TimeoutError as error:
            if isinstance(error, AntiphonError):
                raise
            raise NoAnswer(f"no picture within {timeout_s:g} s") from None
        picture, self._picture = self._picture, None
        return picture

    async def _ask(self, said: dict[str, Any]) -> Mapping[str, Any]:
        """Say it on this connection: its answer. One that is lost with it is said by the error."""
        self._check()
        self._asked += 1
        ref = f"a-{self._asked}"
        answer: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[ref] = answer
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await self._attached.wait()
                await self._say({**said, "ref": ref})
                return await answer
        except TimeoutError as error:
            if isinstance(error, AntiphonError):
                raise
            raise NoAnswer(f"no answer to {said['type']}") from None
        finally:
            self._answers.pop(ref, None)

    async def _say(self, frame: Mapping[str, Any]) -> None:
        """Send it, if there is a connection; what is state is said again on the next one."""
        if self._socket is not None:
            with contextlib.suppress(ConnectionClosed):
                await self._socket.send(_encoder.encode(frame))

    def _check(self) -> None:
        if self._over is not None:
            raise self._over.with_traceback(None)

    # The end

    async def close(self, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        """End the world, if it has not ended."""
        try:
            if self._over is None:
                with contextlib.suppress(AntiphonError):
                    await self._gateway.requests.ask(
                        "DELETE", f"/v1/worlds/{self._id}", None, timeout_s
                    )
        finally:
            await self.detach()

    async def detach(self) -> None:
        """Hang up. The world stands still, and waits for who comes with its `token`."""
        self._task.cancel()
        await asyncio.wait([self._task])
        self._end(SessionEnded("client"))

    def _end(self, error: AntiphonError) -> None:
        if self._over is None:
            self._over = error
        self._begun.set()
        self._came.set()
        self._fail(self._over)

    def _fail(self, error: AntiphonError) -> None:
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)
                answer.exception()  # Who was cancelled meanwhile does not read it.

    # Connections

    async def _run(self) -> None:
        """Keep a connection, until the world is over. Never raises but CancelledError: whoever
        waits has to know that nothing more will come."""
        try:
            await self._keep()
        except Exception as error:
            self._end(AntiphonError(f"the world cannot be kept up: {error!r}"))

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        delay_s, lost_s = FIRST_RETRY_S, loop.time()
        while self._over is None:
            before = self.connections
            code, reason = await self._connection()
            if self.connections > before:
                delay_s, lost_s = FIRST_RETRY_S, loop.time()
            self._dropped(code, reason)
            if loop.time() - lost_s > self._grace_s + LEASE_MARGIN_S:
                lease = f"no connection within the lease of {self._grace_s:g} s: {reason}"
                self._end(ConnectionLost(lease))
            if self._over is None:
                await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
                delay_s = min(2 * delay_s, LAST_RETRY_S)

    def _dropped(self, code: int | None, reason: str) -> None:
        self._socket = None
        self._attached.clear()
        self._fail(ConnectionLost("the connection broke before the answer came"))
        if code in _FINAL and not self._let_go:
            self._end(SessionEnded(reason or f"close {code}"))
        self._let_go = False

    async def _connection(self) -> tuple[int | None, str]:
        """One connection, from the upgrade to its end: close code and reason."""
        try:
            async with self._gateway.line.connect(self._id, "worlds") as socket:
                self._socket = socket
                attach = {"type": "attach", "role": "controller", "secret": self._secret}
                await socket.send(_encoder.encode({**attach, **self._look}))
                pinging = asyncio.create_task(self._ping(socket))
                try:
                    while self._over is None:
                        frame = frame_of(await socket.recv())
                        with told.understood(f"a frame {frame['type']!r:.64}"):
                            await self._receive(frame)
                except ConnectionClosed:
                    pass
                finally:
                    pinging.cancel()
                    await asyncio.gather(pinging, return_exceptions=True)
                return socket.close_code, socket.close_reason or ""
        except InvalidStatus as error:
            if 400 <= error.response.status_code < 500:
                status = error.response.status_code
                self._end(Refused(f"status {status}", code="upgrade_refused"))
            return None, str(error)
        except ProtocolError as error:
            self._end(error)
            return None, error.message
        except (OSError, InvalidHandshake, ConnectionClosed) as error:
            return None, str(error) or type(error).__name__
        except Exception as error:
            odd = not_understood(error)
            self._end(odd)
            return None, odd.message

    async def _ping(self, socket: ClientConnection) -> None:
        """Break a connection that has fallen silent, which TCP tells after many minutes."""
        with contextlib.suppress(ConnectionClosed):
            while True:
                await asyncio.sleep(self._gateway.line.ping_s)
                pong = await socket.ping()
                try:
                    async with asyncio.timeout(self._gateway.line.ping_s):
                        await pong
                except TimeoutError:
                    socket.transport.abort()

    async def _receive(self, frame: dict[str, Any]) -> None:
        match frame["type"]:
            case "frame":
                picture = _picture(frame)
                self.committed_step = max(self.committed_step, picture.step)
                self.missed += self._picture is not None
                self._picture = picture
                self._came.set()
                await self._say({"type": "seen", "frame": picture.frame})
            case "attached":
                await self._on_attached(frame)
            case "was_reset" | "was_rewound" | "was_restored":
                # What came before never was.
                self.committed_step = told.whole(frame["committed_step"], "committed_step")
                self._picture = self._still = self.restorable_step = None
                self.lost = False
                if frame["type"] == "was_rewound":
                    self.kept = [step for step in self.kept if step <= self.committed_step]
                else:
                    self._note_kept(frame)
                self._on_answer(frame)
            case "checkpoint_kept":
                self._note_kept(frame)
                self._on_answer(frame)
            case "playing":
                self._still = None
                self._on_answer(frame)
            case "paused" if frame.get("error") is not None:
                self._plays = False
                self._stand_still(error_of(told.fields(frame["error"], "error")))
            case "state_lost":
                self._plays = False
                self._state_lost(frame)
            case "paused" | "scene_changed" | "refused":
                self._on_answer(frame)
            case "error":
                error = error_of(frame["error"])
                if error.code in _REFUSING:
                    self._end(ControlLost(error.message, code=error.code))
                elif isinstance(error, Refused):
                    self._end(error)
            case "let_go" if frame["reason"] == "replaced":
                self._end(ControlLost("another connection has taken the world over"))
            case "let_go":
                self._let_go = True
            case "session_ended":
                error_info = frame.get("error")
                ended = error_of(error_info) if error_info else None
                self._end(SessionEnded(str(frame["reason"]), ended))

    async def _on_attached(self, frame: Mapping[str, Any]) -> None:
        self._secret = told.text(frame["secret"], "secret")
        self._grace_s = told.seconds(frame["grace_s"], "grace_s")
        world = told.fields(frame["world"], "world")
        for kind in ("keys", "axes"):
            set(world[kind])  # What is held is looked for in them.
        self.committed_step = told.whole(frame["committed_step"], "committed_step")
        self.world = world
        self.connections += 1
        if told.yes_or_no(frame["lost"], "lost"):
            self._plays = False
            self._state_lost(frame)
        else:
            self.lost, self.restorable_step = False, None
            self._note_kept(frame)
        # A new connection holds nothing, and stands still.
        if self._sequence:
            await self._say({"type": "hold", "sequence": self._sequence, **self._held})
        if self._plays:
            await self._say({"type": "play"})
        self._attached.set()
        self._begun.set()

    def _state_lost(self, frame: Mapping[str, Any]) -> None:
        step, reason = frame.get("restorable_step"), frame.get("reason")
        self.lost, self.kept = True, []
        self.restorable_step = None if step is None else told.whole(step, "restorable_step")
        way = "reset it" if step is None else f"reset it, or restore that after step {step}"
        why = "" if reason is None else f" ({told.text(reason, 'reason')})"
        self._stand_still(ServerFailed(f"the state is lost{why}: {way}", code=STATE_LOST))

    def _note_kept(self, frame: Mapping[str, Any]) -> None:
        self.kept = [told.whole(step, "kept") for step in frame.get("kept", [])]

    def _stand_still(self, error: AntiphonError) -> None:
        self._still = error
        self._came.set()

    def _on_answer(self, frame: Mapping[str, Any]) -> None:
        answer = self._answers.get(told.text(frame.get("ref") or "", "ref"))
        if answer is None or answer.done():
            return
        if frame["type"] == "refused":
            answer.set_exception(error_of(frame["error"]))
        else:
            answer.set_result(frame)


def _picture(frame: dict[str, Any]) -> Picture:
    data, format = frame.pop("data"), told.text(frame["format"], "format")
    names = ("frame", "step", "action_sequence", "width", "height")
    number, step, action, width, height = (told.whole(frame[name], name) for name in names)
    if not isinstance(data, bytes) or (format == "raw" and len(data) != width * height * 3):
        raise ProtocolError(f"a picture of {width} by {height} without its data")
    return Picture(number, step, action, width, height, format, data, frame)
