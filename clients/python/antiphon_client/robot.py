"""The control loop of a robot over a session: for asyncio, and for a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import secrets
import threading
import time
from collections.abc import Coroutine, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

from antiphon_client.actions import Action, Source
from antiphon_client.closing import ClosedOnLeaving
from antiphon_client.control import ControlMachine, Counts, Pace
from antiphon_client.errors import AntiphonError, NoAnswer, SessionEnded, error_of
from antiphon_client.options import ControlOptions
from antiphon_client.session import OPEN_TIMEOUT_S, Gateway, Session
from antiphon_client.stream import Attached, Lost, Output, Token

STOP_TIMEOUT_S = 5.0
STOP_BY_REQUEST_AFTER_S = 0.1
"""A stop that the stream has not answered by then is said by a request of its own as well."""
SLACK_S = 0.02
"""How long after its deadline a tick is waited for, before the loop's thread counts as stuck."""

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

Result = TypeVar("Result")


class AsyncRobotLoop(ClosedOnLeaving):
    """A robot under the control of a policy, over asyncio. Made by `open` or `resume`."""

    def __init__(self, gateway: Gateway, session: Session, options: ControlOptions) -> None:
        self._gateway = gateway
        self._session = session
        self._machine = ControlMachine(options)
        self._signals = f"/v1/sessions/{session.id}/signal"
        self._changed = asyncio.Event()
        self._reset_over: asyncio.Future[None] | None = None
        self._pace = Pace(options.period_ms)
        self._reading = asyncio.create_task(self._read(), name=f"robot {session.id}")

    @classmethod
    async def open(
        cls,
        gateway: Gateway,
        model: str | None,
        options: ControlOptions,
        *,
        settings: Mapping[str, Any] | None = None,
        limits: Mapping[str, float] | None = None,
        timeout_s: float = OPEN_TIMEOUT_S,
    ) -> Self:
        """A loop on a new session of the robot pipeline `model`. Raises as `Gateway.open`."""
        # What comes later than this is of no use here, and is not to be computed.
        control = {"deadline_ms": options.max_age_ms, "rate_hz": options.rate_hz}
        session = await gateway.open(
            model, settings=settings, limits=limits, control=control, timeout_s=timeout_s
        )
        return cls(gateway, session, options)

    @classmethod
    async def resume(cls, gateway: Gateway, token: Token, options: ControlOptions) -> Self:
        """A loop on the session that another process left. Raises as `Gateway.resume`."""
        return cls(gateway, await gateway.resume(token), options)

    @property
    def options(self) -> ControlOptions:
        """How the robot is controlled."""
        return self._machine.options

    @property
    def session(self) -> Session:
        """The session."""
        return self._session

    @property
    def counts(self) -> Counts:
        """What the loop has done so far."""
        return self._machine.counts

    @property
    def committed_step(self) -> int:
        """How many observations the policy has taken since the session began, or was reset."""
        return self._machine.steps.committed

    @property
    def stopped(self) -> bool:
        """Whether an emergency stop holds the robot, whoever asked for it."""
        return self._machine.stopped

    @property
    def error(self) -> AntiphonError | None:
        """Why the policy gave no answer last, or never will."""
        return self._machine.over or self._machine.error

    async def act(self, observation: Mapping[str, Any]) -> Action:
        """The action of the next tick, at the latest at its deadline. Call it once a period.

        The newest observation is sent as soon as the policy is free. Raises TypeError or
        ValueError for one that cannot be sent, such as one of more than `MAX_OBSERVATION_BYTES`,
        and the loop is as it was; whatever else happens is told by the action and `error`.
        """
        machine = self._machine
        machine.connected = self._session.connected
        machine.begin(observation, _now_ms())
        self._ask()
        await asyncio.sleep(
            0
        )  # What there is to send goes out, and who does not pace starves none.
        while not machine.decided(now_ms := _now_ms()) and now_ms < machine.deadline_ms:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout((machine.deadline_ms - now_ms) / 1000.0):
                    await self._changed.wait()
            machine.connected = self._session.connected
        return machine.end(_now_ms())

    def act_at_once(self, observation: Mapping[str, Any]) -> Action:
        """The action of the next tick, of what is there already: for a loop that is closed."""
        self._machine.begin(observation, _now_ms())
        return self._machine.end(_now_ms())

    async def pace(self) -> None:
        """Sleep until the next tick is due: ticks are a period apart, and none is made up for."""
        await asyncio.sleep(self._pace.wait_ms(_now_ms()) / 1000.0)

    async def reset(
        self, parameters: Mapping[str, Any] | None = None, *, timeout_s: float = 30.0
    ) -> None:
        """Begin anew, as for the next episode: the policy forgets what it was told, and what is
        planned is thrown away. It ends a stop, but for one by an operator.

        Raises AntiphonError where it did not come about, and then a stop holds on.
        """
        if self._reset_over is not None:
            raise RuntimeError("a reset is under way")
        over = self._reset_over = asyncio.get_running_loop().create_future()
        self._machine.begin_reset()
        try:
            async with asyncio.timeout(timeout_s):
                signal = {"type": "reset", "parameters": dict(parameters or {})}
                await self._session.signal(signal, timeout_s=timeout_s)
                await over
        except BaseException as error:
            self._machine.steps.resetting = False
            if isinstance(error, TimeoutError) and not isinstance(error, AntiphonError):
                raise NoAnswer(f"the reset took more than {timeout_s:g} s") from None
            raise
        finally:
            self._reset_over = None

    async def stop(self, *, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Emergency stop: at once every action is the safe one, whatever the network does, until
        a `release` or a `reset`, or until an operator releases it. Returns when the gateway has
        said that it stops the session too.

        Raises NoAnswer and other AntiphonErrors where it did not; the robot is stopped anyway.
        """
        self._machine.stop()
        self._changed.set()
        await self._signal_twice({"type": "stop"}, timeout_s)
        self._machine.stop_known()

    def stop_by_request_now(self, *, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Tell the gateway to stop the session, from a thread that may wait. Raises
        AntiphonError."""
        id = f"c-{secrets.token_hex(8)}"
        body = {"id": id, "signal": {"type": "stop"}}
        self._gateway.requests.ask_now("POST", self._signals, body, timeout_s)

    async def release(self, *, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End the stop, and go on with the policy as it is. Raises AntiphonError, and then it holds
        on: Refused, `emergency_stopped`, where an operator holds it too."""
        await self._signal_twice({"type": "release"}, timeout_s)
        self._machine.release()

    async def _signal_twice(self, signal: Mapping[str, Any], timeout_s: float) -> None:
        """By the stream, and where that says nothing by a request: the same command, which is
        carried out once."""
        id = f"c-{secrets.token_hex(8)}"
        by_stream = asyncio.ensure_future(
            self._session.signal(signal, urgent=True, id=id, timeout_s=timeout_s)
        )
        ways: set[asyncio.Future[Any]] = {by_stream}
        try:
            if self._session.connected:
                await asyncio.wait(ways, timeout=STOP_BY_REQUEST_AFTER_S)
            if not by_stream.done():
                body = {"id": id, "signal": dict(signal)}
                request = self._gateway.requests.ask("POST", self._signals, body, timeout_s)
                ways.add(asyncio.ensure_future(request))
            await _first_that_succeeds(ways)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def close(self) -> None:
        """End the session. A reset that is under way raises SessionEnded, and every action from
        here on is the safe one."""
        self._reading.cancel()
        await asyncio.wait([self._reading])
        self._machine.close()
        self._end(SessionEnded("client"))
        await self._session.close()

    # Between the session and the machine

    async def _read(self) -> None:
        try:
            while True:
                event = await self._session.next_event()
                match event:
                    case Attached(fields=fields):
                        self._machine.attached(fields)
                    case Lost():
                        self._machine.outputs_lost()
                    case Output(type=type, sequence=sequence, fields=fields):
                        self._machine.told(type, sequence, fields, _now_ms())
                        self._told(type, fields)
                self._ask()
                self._changed.set()
        except AntiphonError as error:
            self._end(error)
        except Exception as error:
            # Whatever it is, whoever acts has to know that nothing more will come.
            self._end(AntiphonError(f"what the session told was not understood: {error!r}"))

    def _end(self, error: AntiphonError) -> None:
        self._machine.end_session(error)
        self._changed.set()
        self._end_reset(error)

    def _end_reset(self, error: AntiphonError) -> None:
        if self._reset_over is not None and not self._reset_over.done():
            self._reset_over.set_exception(error)
            self._reset_over.exception()  # The signal of the reset may have raised it already.

    def _told(self, type: str, fields: Mapping[str, Any]) -> None:
        over = self._reset_over
        if over is None or over.done():
            return
        if type == "was_reset":
            over.set_result(None)
        elif type == "refused":
            over.set_exception(error_of(fields.get("error")))

    def _ask(self) -> None:
        if self._session.error is not None:
            return
        step = self._machine.ask()
        if step is None:
            return
        try:
            self._session.submit_now(step).add_done_callback(self._taken)
        except AntiphonError as error:  # Too long, with a prefix that has grown since the check.
            self._machine.refused(error)

    def _taken(self, answer: asyncio.Future[Mapping[str, Any]]) -> None:
        """The gateway has taken the step up, or refused it."""
        error = None if answer.cancelled() else answer.exception()
        if isinstance(error, AntiphonError):
            self._machine.refused(error)
            self._ask()
            self._changed.set()


class RobotLoop:
    """A robot under the control of a policy, for a loop that waits: the session lives in a thread
    of its own.

    `act` comes back at the latest a moment after its deadline, also when that thread is stuck.
    """

    def __init__(self, open: Coroutine[Any, Any, AsyncRobotLoop], options: ControlOptions) -> None:
        self._options = options
        self._stop = threading.Event()
        self._last: Action | None = None
        self._pace = Pace(options.period_ms)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="robot", daemon=True)
        self._thread.start()
        try:
            self._robot = self._run(open)
        except BaseException:
            self._end_thread()
            raise

    @classmethod
    def open(
        cls,
        url: str,
        model: str | None = None,
        *,
        key: str | None = None,
        settings: Mapping[str, Any] | None = None,
        limits: Mapping[str, float] | None = None,
        timeout_s: float = OPEN_TIMEOUT_S,
        **options: Any,
    ) -> Self:
        """A loop on a new session of the robot pipeline `model` at `url`; `options` are those of
        `ControlOptions`. Raises as `Gateway.open`."""
        control = ControlOptions(**options)
        opening = AsyncRobotLoop.open(
            Gateway(url, key=key),
            model,
            control,
            settings=settings,
            limits=limits,
            timeout_s=timeout_s,
        )
        return cls(opening, control)

    @property
    def counts(self) -> Counts:
        """What the loop has done so far."""
        return self._robot.counts

    @property
    def stopped(self) -> bool:
        """Whether an emergency stop holds the robot, whoever asked for it."""
        return self._stop.is_set() or self._robot.stopped

    @property
    def error(self) -> AntiphonError | None:
        """Why the policy gave no answer last, or never will."""
        return self._robot.error

    @property
    def token(self) -> Token:
        """What it takes to come back to the session from another process."""
        return self._robot.session.token

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def act(self, observation: Mapping[str, Any]) -> Action:
        """The action of the next tick; as `AsyncRobotLoop.act`."""
        try:
            acting = self._begin(self._robot.act(observation))
        except SessionEnded:
            return self._robot.act_at_once(observation)
        try:
            action = acting.result(self._options.deadline_ms / 1000.0 + SLACK_S)
        except TimeoutError:
            acting.cancel()
            action = self._safe("loop_stuck")
        if self._stop.is_set() and action.reason is None:
            action = self._safe("stopped")
        self._last = action
        return action

    def _safe(self, reason: str) -> Action:
        last = self._last
        values = self._options.safely(last.values if last else None)
        tick = last.tick + 1 if last else 1
        return Action(values, Source.WATCHDOG, tick, reason=reason)

    def pace(self) -> None:
        """Sleep until the next tick is due; as `AsyncRobotLoop.pace`."""
        time.sleep(self._pace.wait_ms(_now_ms()) / 1000.0)

    def reset(self, parameters: Mapping[str, Any] | None = None) -> None:
        """Begin anew; as `AsyncRobotLoop.reset`."""
        self._run(self._robot.reset(parameters))

    def stop(self) -> None:
        """Emergency stop, from any thread; as `AsyncRobotLoop.stop`. Where the session's thread is
        stuck it is said from this one, and that one holds on to it as soon as it goes on. Behind
        `close` it raises SessionEnded, as `reset` and `release` do."""
        self._stop.set()
        begun = threading.Event()

        async def stop() -> None:
            begun.set()
            await self._robot.stop()

        stopping = self._begin(stop())
        stopping.add_done_callback(lambda _: self._stop.clear())  # The loop itself holds on to it.
        if begun.wait(STOP_BY_REQUEST_AFTER_S):
            stopping.result()
        else:
            self._robot.stop_by_request_now()

    def release(self) -> None:
        """End the stop; as `AsyncRobotLoop.release`."""
        self._run(self._robot.release())

    def close(self) -> None:
        """End the session and the thread; idempotent."""
        if self._loop.is_closed():
            return
        try:
            self._run(self._robot.close())
        finally:
            self._end_thread()

    def _run(self, what: Coroutine[Any, Any, Result]) -> Result:
        return self._begin(what).result()

    def _begin(self, what: Coroutine[Any, Any, Result]) -> concurrent.futures.Future[Result]:
        """Have it done in the session's thread. Raises SessionEnded where that has ended."""
        try:
            return asyncio.run_coroutine_threadsafe(what, self._loop)
        except RuntimeError:
            what.close()
            raise SessionEnded("client") from None

    def _end_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _first_that_succeeds(ways: set[asyncio.Future[Any]]) -> None:
    """Wait for one of them; raises what the last one did when all fail."""
    waiting = set(ways)
    error: BaseException | None = None
    while waiting:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for way in done:
            error = way.exception()
            if error is None:
                return
    assert error is not None
    raise error


def _now_ms() -> float:
    """Monotonic, and where the system has such a clock it counts on while the machine sleeps: what
    was sensed before is old when it wakes up."""
    return time.clock_gettime(_CLOCK) * 1000.0
