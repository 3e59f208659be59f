"""Clients of any kind of session: how they come, speak, read, stop reading, and go."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from gateway.hosted import Hosted
from protocol.errors import AntiphonError, ErrorInfo
from sessions.actions import ClientSaid, CloseRequested, ToClient
from sessions.client import Answered, Refused, SessionCreated
from sessions.lifecycle import CloseReason, State
from sessions.opening import Opening, Position
from tests.simulation.line import Line
from tests.simulation.view import ClientView
from tests.simulation.world import World

if TYPE_CHECKING:
    from tests.simulation.deployment import Deployment
    from tests.simulation.gateway import GatewayProcess

HELD_MS = 45_000.0
"""No worker may take longer than this to work off what a client has sent."""
READ_AT_ONCE = 16
"""So much a surface reads of its client before others have the loop."""
HIGH_OUTPUTS = 24
"""So many unread outputs block a client that reads slowly."""
GOOD_LIMITS: list[dict[str, Any]] = [
    {"idle_s": 9},
    {"grace_s": 1.5},
    {"stall_s": 2},
    {"max_age_s": 15},
]
BAD_LIMITS: list[dict[str, Any]] = [{"sessions": 9}, {"idle_s": True}, {"grace_s": 9_999}]


class Client:
    """One client. It opens a session at a gateway and does things until it has had enough.

    What it does is its subclass's: `act` does one thing, `started` is called when its
    session is open.
    """

    progress: tuple[type, ...] = ()
    """Verbs that begin real work: only these, and what comes of them, keep a session from
    ending idle."""
    unrefused: tuple[type, ...] = ()
    """Verbs without a `ref`, which are refused in a form of their own or never."""

    def __init__(self, deployment: Deployment, gateway_place: str, name: str) -> None:
        self.name = name
        self.world: World = deployment.world
        self.watch = deployment.watch
        self.view = ClientView()
        self.gateway: GatewayProcess | None = None
        self.hosted: Hosted | None = None
        self.session = ""
        self.over = False
        """Whether nothing more will happen to it."""
        self.refusal: AntiphonError | None = None
        self.opening: Opening | None = None
        self._tries = 0
        """Sessions that were hosted for it, all but the last of which could not be opened."""
        self.limits: dict[str, Any] = {}
        """What it chooses of its session's limits."""
        self.control: dict[str, Any] = {}
        """What it chooses of its control loop."""
        self.source: str | None = None
        """The session that its own is to begin as."""
        self.close_asked: set[CloseReason] = set()
        self.interrupted = False
        """Whether it ever asked for the end of a response."""
        self.verb_ms = 0.0
        """When, by its gateway's clock, it last asked for work and was not refused."""
        self.opened_ms = 0.0
        self.blocked_ms: float | None = None
        self.last_sequence = 0
        self.released_ms: float | None = None
        profile = deployment.profile
        self.rude = profile.rude
        self.slow = self.world.chance(0.2) and self.rude > 0
        self.stoic = self.world.chance(0.4)
        """Whether it waits for the end of what it began, however long that takes."""
        self.fickle = profile.fickle if self.world.chance(0.7) else 0.0
        """How often it is cut off, or looked over its shoulder."""
        self.line = Line(self, profile.fickle > 0 and self.world.chance(0.8))
        self.talks = True
        """Whether it does things by itself."""
        self.patience = self.world.random.choice([3, 10, 30])
        """How many things it does before it goes."""
        self.on_end: Callable[[Client], None] = lambda client: None
        self._deployment = deployment
        self._place = gateway_place
        self.held = False
        """Whether the session takes no verbs for now."""
        self._apart = False
        self._holds = 0
        self._verbs_said = 0
        self._verb_before_ms = 0.0
        self._verbs: deque[Any] = deque()
        self._commands: deque[tuple[str, Any]] = deque(maxlen=20)
        self._unread = 0
        self._ticking = False

    # Life

    def open(self, patch: dict[str, Any] | None = None) -> None:
        """Ask for a session; refused at once where there is no gateway or no place."""
        gateway = self._deployment.gateways[self._place]
        if gateway is None:
            self._finish()
            return
        self.gateway = gateway
        gateway.run(lambda: self._open(gateway, patch))

    def _open(self, gateway: GatewayProcess, patch: dict[str, Any] | None) -> None:
        world = self.world
        world.count("opens")
        if patch is None:
            patch = self.a_patch()
        # An engine that hangs is seen to be wedged only while somebody waits for it.
        hangs = self._deployment.profile.engine.hang
        if self.rude and not hangs and world.chance(0.25):
            bad = world.chance(self.rude)
            world.count("bad limits chosen" if bad else "limits chosen")
            self.limits = world.random.choice(BAD_LIMITS if bad else GOOD_LIMITS)
        self.choose_control()
        self.choose_source()
        try:
            gateway.ask(self, patch)
        except AntiphonError as error:
            self.refused(error)
            return
        if self.rude and world.chance(0.1) and not self.over:
            # Gone before its open was answered.
            if self.session:
                self._deployment.blame(self.session, "cancelled")
            world.count("opens cancelled")
            gone = self.line.vanish if self.line.resumable and world.chance(0.5) else self.close
            self.later(world.random.choice([0.0, 0.3, 2.0, 300.0]), gone)

    def choose_control(self) -> None:
        """Set `control`; most kinds of session have no loop to choose."""

    def choose_source(self) -> None:
        """Set `source`; most kinds of session are forked by nobody."""

    def stands(self, position: Position) -> None:
        """Its open waits, and stands there."""
        self.world.count("opens that wait")
        self.watch.stands(self, position)

    def refused(self, error: AntiphonError) -> None:
        """It gets no session."""
        self.world.count("opens refused")
        self.world.note(self.name, f"refused: {error.message}")
        self.refusal = error
        self.watch.unqueued(self)
        self._finish()

    def hosted_as(self, gateway: GatewayProcess, hosted: Hosted) -> None:
        """A gateway hosts its session."""
        self.hosted = hosted
        self.session = hosted.id
        self.opened_ms = self.verb_ms = gateway.now_ms
        if not (self.line.opens_apart and self._tries):
            self.line.opens()
        self._tries += 1
        self.watch.begins(self)
        self._deployment.clients[hosted.id] = self
        self._deployment.watch.opened(self)

    def put_out(self, action: ToClient) -> None:
        """The session has an output, for one attachment or for all."""
        if action.to is None:
            self._told(action.sequence, action.output)
        self.line.told(action.sequence, action.output, action.to)

    def _told(self, sequence: int, output: Any) -> None:
        """The session puts something out, whoever is there to read it."""
        self.world.note(self.name, output)
        self.watch.told(self, sequence, output)
        self.view.told(output)
        if isinstance(output, SessionCreated):
            self.watch.unqueued(self)
            if self.talks:
                self._next()
        elif isinstance(output, Refused):
            if output.ref == f"verb_{self._verbs_said}":
                self.verb_ms = self._verb_before_ms
        elif isinstance(output, Answered) and output.error is not None:
            self.verb_ms = self._verb_before_ms
        self.learns(output)
        if self.line.current is None or self.line.current.dead:
            return
        self._unread += 1
        if self.slow and self._unread >= HIGH_OUTPUTS and self.view.ended is None:
            self._block()

    def _block(self) -> None:
        if self.blocked_ms is not None:
            return
        assert self.gateway is not None
        self.world.count("clients blocked")
        self.blocked_ms = self.gateway.now_ms
        self.line.blocked(True)
        pause_ms = self.world.random.choice([200.0, 3_000.0, 20_000.0, 20_000.0])
        self.later(pause_ms, self._read)

    def _read(self) -> None:
        self._unread = 0
        self.blocked_ms = None
        self.line.blocked(False)
        self._flush()

    def back(self) -> None:
        """It is attached again."""
        self._unread = 0
        self.later(0.0, self._flush)

    def hold(self, hold: bool) -> None:
        """The session takes no verbs for now, or takes them again."""
        self.held = hold
        if hold:
            self.world.count("verbs held back")
            self._holds += 1
            number = self._holds
            self.later(HELD_MS, lambda: self._held_since(number))
        else:
            self.later(0.0, self._flush)

    def _held_since(self, hold: int) -> None:
        # What another owner has taken is not worked off any more; the session ends by its clocks.
        stolen = "stolen" in self._deployment.causes[self.session]
        held = self.held and self._holds == hold and not stolen
        if held and not self.over and self.view.ended is None:
            self.world.fail("I11 isolation", f"{self.session} takes no verbs for {HELD_MS} ms")

    def released(self, reason: CloseReason) -> None:
        """Nothing is left of the session."""
        self.world.note(self.name, f"released: {reason}")
        self.watch.released(self, reason)
        if self.view.created:
            self._finish()
        else:
            # It may be tried again, or is told in another way that it is refused.
            self.hosted = None

    def gateway_died(self) -> None:
        """The connection ends with its gateway."""
        self._finish()

    def _finish(self) -> None:
        if not self.over:
            self.over = True
            self.released_ms = self.world.now_ms
            self.on_end(self)

    @property
    def session_state(self) -> State | None:
        """Where its session stands, while it is hosted."""
        return None if self.hosted is None else self.hosted.session.state

    # What it does

    def close(self) -> None:
        """Hang up; without an attachment by name of the session."""
        self.close_asked.add(CloseReason.CLIENT)
        if self.opening is not None and not self.view.created and self.gateway is not None:
            if not self.over:
                self.world.count("clients that left the queue")
                self.watch.unqueued(self)
                self.gateway.withdraw(self.opening)
                self._finish()
            return
        current = self.line.current
        self.handle(CloseRequested(CloseReason.CLIENT, None if current is None else current.name))

    def say(self, verb: Any) -> None:
        """Hand a verb over, once it is taken."""
        self.say_all([verb])

    def say_all(self, verbs: list[Any]) -> None:
        """Hand verbs over that come at once."""
        if self._apart:
            for verb in verbs:
                if self._open_to_all() and not isinstance(verb, self.unrefused):
                    self._say(verb, apart=True)
            return
        self._verbs.extend(verbs)
        self._flush()

    def later(self, delay_ms: float, action: Callable[[], None]) -> None:
        """Do something after a while, in a turn of the gateway's loop."""
        assert self.gateway is not None
        self.gateway.later(delay_ms, action)

    def handle(self, event: Any) -> None:
        """Tell the session something."""
        if self.gateway is not None and not self.over and self.hosted is not None:
            self.gateway.handle(self.session, event)

    def _flush(self) -> None:
        # Not from within an output: a surface reads its client in a turn of its own.
        said = 0
        while self._verbs and self._may_speak():
            if said == READ_AT_ONCE:
                self.later(0.0, self._flush)
                return
            said += 1
            self._say(self._verbs.popleft())

    def _say(self, verb: Any, *, apart: bool = False) -> None:
        """Say a verb over the attachment, or `apart` from it, as over the admin API."""
        assert self.gateway is not None
        self.world.note(self.name, verb)
        self.watch.said(self, verb)
        self.handed_over(verb)
        command: str | None = None
        if not isinstance(verb, self.unrefused):
            self._verbs_said += 1
            anew = msgspec.structs.replace if isinstance(verb, msgspec.Struct) else replace
            verb = anew(verb, ref=f"verb_{self._verbs_said}")
            self._verb_before_ms = self.verb_ms
            if isinstance(verb, self.progress):
                self.verb_ms = self.gateway.now_ms
            if apart or (self.fickle and self.world.chance(0.4)):
                command = f"command_{self._verbs_said}"
        if command is None:
            self.line.say(verb)
        else:
            self._command(command, verb, first=True, apart=apart)
        self.watch.taken(self, verb)

    def _may_speak(self) -> bool:
        attached = self.line.current is not None and not self.line.current.dead
        return attached and not self.held and self.blocked_ms is None and not self.over

    def _open_to_all(self) -> bool:
        """Whether its session takes verbs of whoever is there, or is not."""
        open_ = self.view.ended is None and self.session_state in (State.ACTIVE, State.DETACHED)
        return open_ and not self.held

    def say_apart(self) -> None:
        """Do one thing without an attachment, also while nobody is there, or nobody reads."""
        if self._open_to_all():
            self.world.count("verbs apart")
            self._apart = True
            self.act()
            self._apart = False

    def _command(self, command: str, verb: Any, *, first: bool, apart: bool = False) -> None:
        """Say a verb under an id, which is to be answered at once."""
        if self.view.ended is not None or self.session_state not in (State.ACTIVE, State.DETACHED):
            return
        if first:
            self._commands.append((command, verb))
        self.watch.commanded(self, command, first)
        over_line = self.line.current is not None and not apart
        if over_line and (first or self.world.chance(0.5)):
            self.line.say(verb, command)
        else:
            self.handle(ClientSaid(verb, None, command))
        self.watch.answered(self, command)

    def repeat_command(self) -> None:
        """Say something again under its old id, as after an answer that was lost."""
        if self._commands and not self.held and self.view.ended is None:
            command, verb = self.world.random.choice(self._commands)
            self._command(command, verb, first=False)

    def _next(self) -> None:
        if not self._ticking:
            self._ticking = True
            delay_ms = self.world.random.choice([1.0, 30.0, 250.0, 1_500.0])
            self.later(delay_ms, self._act)

    def _act(self) -> None:
        self._ticking = False
        if self.over or self.view.ended is not None or not self.talks:
            return
        world = self.world
        waits = self.stoic and bool(self.pending())
        if self.line.current is None or self.held or waits or self.busy():
            if self.fickle and world.chance(self.fickle / 3):
                self._be_fickle()
            elif self.line.current is None and world.chance(self.fickle):
                self.say_apart()
            self._next()
            return
        self.patience -= 1
        if self.patience <= 0:
            if world.chance(0.2) and self.rude:
                world.count("clients gone silent")
                return
            world.count("clients gone")
            if self.line.resumable or self.line.current is None or world.chance(0.5):
                self.close()
            else:
                # Its transport ends, and with that its session.
                self.close_asked.add(CloseReason.CLIENT)
                self.line.leave(self.line.current)
            return
        if self.fickle and world.chance(self.fickle):
            self._be_fickle()
        else:
            self.act()
        self._next()

    def _be_fickle(self) -> None:
        roll = self.world.random.random()
        line = self.line
        if roll < 0.45:
            if line.resumable:
                line.vanish()
        elif roll < 0.55:
            line.acknowledge()
        elif roll < 0.65:
            self.say_apart()
        elif roll < 0.75:
            self.repeat_command()
        elif roll < 0.85:
            line.observe()
        elif roll < 0.95:
            line.intrude()
        else:
            line.take_over()

    # What its kind does

    def a_patch(self) -> dict[str, Any] | None:
        """Settings to open with."""
        return None

    def a_verb(self) -> Any:
        """Something to say that is harmless."""
        raise NotImplementedError

    @property
    def next_ref(self) -> str:
        """The name that the next verb gets which may be refused."""
        return f"verb_{self._verbs_said + 1}"

    def learns(self, output: Any) -> None:
        """The session has put something out."""

    def handed_over(self, verb: Any) -> None:
        """A verb is about to reach the session."""

    def pending(self) -> list[Any]:
        """What was begun and has not ended."""
        return list(self.view.open)

    def busy(self) -> bool:
        """Whether it waits for something before it does more."""
        return False

    def act(self) -> None:
        """Do one thing."""
        raise NotImplementedError

    def probe(self) -> None:
        """Ask for something that works wherever anything does."""
        raise NotImplementedError

    def probed(self) -> tuple[ErrorInfo | None] | None:
        """How that was answered, None as long as it was not."""
        raise NotImplementedError
