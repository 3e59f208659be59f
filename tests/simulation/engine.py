"""Synthetic engines on virtual time: they hear, think and speak what a test can recognise.

Every word that is thought names its run (`w7_0`), every piece of audio its run, clause
and number, so that whoever reads them knows where they come from and what is missing.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from protocol.connectors import Descriptor, InlineDescriptor
from protocol.errors import (
    CapacityExceeded,
    EngineFailed,
    ErrorInfo,
    Fenced,
    InvalidRequest,
    SessionStateLost,
)
from protocol.messages import CHECKPOINT, RELEASE, RESET, REWIND
from protocol.payloads import Payload, PayloadType, audio_payload, text_payload
from sessions.duplex.settings import INPUT_RATE_HZ
from sessions.steps.refusals import no_checkpoint
from tests.simulation.profile import PARKS, Places
from tests.simulation.steps import begun, folded, frame, latents
from workers.control_events import (
    ApplyInput,
    ConfigureSession,
    Emitted,
    InputFailed,
    InputTaken,
    Noticed,
    OpenSession,
    OperationDone,
    ParkSession,
    SessionMeasured,
    SignalSession,
    StartTurn,
    TurnFinished,
    TurnOutcome,
)

if TYPE_CHECKING:
    from tests.simulation.worker import WorkerProcess

SPEECH = b"\x01\x00"
SILENCE = b"\x00\x00"
KEPT = 2
"""Checkpoints of a session."""
AUDIO_TAG = struct.Struct("<III")

FAILED = EngineFailed("the synthetic engine failed on purpose").info()


Operation = OpenSession | ConfigureSession | SignalSession | ParkSession


class CommitRefused(Exception):
    """The engine fails at the very last."""


def payload_of(descriptor: Descriptor) -> Payload:
    """What a descriptor holds: here everything travels inside messages."""
    assert isinstance(descriptor, InlineDescriptor)
    return descriptor.payload


def declared(places: Places | None, settings: dict[str, Any]) -> dict[str, int]:
    """What a session with these settings may hold at most, in bytes by device."""
    places = places or Places(2)
    large = settings.get("language") == "de" or settings.get("seed") == 2
    units = 2 if large and places.parkable > 1 else 1
    return {places.device: places.unit_bytes * units}


@dataclass(eq=False)
class EngineTurn:
    """A turn that runs. `left` is how many steps it still has to go; None: until its input
    ends."""

    action: StartTurn
    session: EngineSession
    number: int
    inputs: deque[tuple[Payload, bool]] = field(default_factory=deque)
    last: bool = False
    steps: int = 0
    left: int | None = None
    fails_at: int | None = None
    gives_up: bool = False
    hangs: bool = False
    stubborn_ms: float = 0.0
    paced: bool = False
    deaf: bool = False
    waits: bool = False
    cancelled: bool = False
    over: bool = False
    checksum: bytes = b""
    pieces: int | None = None
    """Pieces of a step's output; None: its input comes first."""
    made: int = 0

    @property
    def key(self) -> tuple[str, int]:
        """The session and the turn."""
        return (self.action.session, self.action.turn)


@dataclass(eq=False)
class EngineSession:
    """The state of a session. Times of audio are ms since the session was opened."""

    name: str
    epoch: int
    owner: str
    settings: dict[str, Any]
    opened_ms: float
    heard_ms: float
    applied: int = 0
    speech_ms: float | None = None
    silence_ms: float = 0.0
    freed: bool = False
    runs: int = 0
    steps: int = 0
    checksum: bytes = b""
    """The state of a step loop, after so many steps."""
    checkpoints: dict[int, bytes] = field(default_factory=dict)
    """Earlier ones that are kept. A change of them is another map: copies share it."""


def _signalled(session: EngineSession, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """What becomes of a step loop between two steps. Raises InvalidRequest."""
    kept = session.checkpoints
    if name == RESET:
        as_opened = session.settings.get("seed", 0)
        session.steps, session.checkpoints = 0, {}
        session.checksum = begun(arguments.get("seed", as_opened))
    elif name == CHECKPOINT:
        kept = {**kept, session.steps: session.checksum}
        session.checkpoints = {step: kept[step] for step in sorted(kept)[-KEPT:]}
        return {"kept": sorted(session.checkpoints)}
    elif name == REWIND:
        step = arguments["step"]
        if step not in kept:
            raise no_checkpoint(step, sorted(kept))
        session.steps, session.checksum = step, kept[step]
        session.checkpoints = {earlier: kept[earlier] for earlier in kept if earlier <= step}
    elif name == RELEASE:
        pass  # A loop holds nothing here.
    return {}


class SyntheticEngine:
    """The engine of one worker: what its stage does with sessions, input and turns."""

    def __init__(self, worker: WorkerProcess) -> None:
        self.sessions: dict[str, EngineSession] = {}
        self.turns: dict[tuple[str, int], EngineTurn] = {}
        self._slow: dict[str, Operation] = {}
        self.progressed_ms = worker.world.now_ms
        self._worker = worker
        self._world = worker.world
        self._faults = worker.profile.engine
        self._stage = worker.stage
        self.obeys = False
        """Whether nothing goes wrong any more."""

    def obey(self) -> None:
        """No further fault."""
        self.obeys = True
        self._faults = type(self._faults)()
        for turn in list(self.turns.values()):
            turn.stubborn_ms = 0.0
            turn.deaf = False
            turn.fails_at = None
            if turn.hangs:
                turn.hangs = False
                self._next(turn)

    # Operations

    def operate(self, action: Operation) -> None:
        """Carry an operation out and say how it went, at once or after a while."""
        world = self._world
        park = isinstance(action, ParkSession)
        if isinstance(action, OpenSession) and action.fork is not None:
            # The state is that of the other session now.
            self._operate(action)
            return
        if world.chance(self._faults.slow_park if park else self._faults.slow_operation):
            world.count("fault: slow park" if park else "fault: slow operation")
            self._slow[action.session] = action

            def carry_out() -> None:
                # Not when the session was freed meanwhile.
                if self._slow.get(action.session) is action:
                    del self._slow[action.session]
                    self._operate(action)

            self._worker.later(world.random.uniform(5, 900), carry_out)
        else:
            self._operate(action)

    def _operate(self, action: Operation) -> None:
        error: ErrorInfo | None = None
        result: dict[str, Any] = {}
        world, faults = self._world, self._faults
        session = self.sessions.get(action.session)
        match action:
            case OpenSession():
                try:
                    result = self._open(action)
                except (InvalidRequest, SessionStateLost) as refusal:
                    error = refusal.info()
            case _ if session is None:
                return
            case ParkSession() if world.chance(faults.store_full):
                world.count("fault: store full")
                self._worker.blame(action.session, "store")
                error = CapacityExceeded("the store is full").info()
            case ParkSession():
                try:
                    self._worker.park(session, action)
                except Fenced as refusal:
                    world.count("parks that came too late")
                    error = refusal.info()
                else:
                    result = {"parked": 1}
            case ConfigureSession():
                if world.chance(faults.refuse_configure):
                    error = InvalidRequest("no such language", field="language").info()
                    world.count("fault: configure refused")
                    self._worker.blame(action.session, "configure refused")
                else:
                    session.settings = action.settings
                    session.speech_ms = None
            case SignalSession(name=name, arguments=arguments):
                session.speech_ms = None
                try:
                    result = _signalled(session, name, arguments)
                except InvalidRequest as refusal:
                    error = refusal.info()
        if action.session in self.sessions:
            self._measure(self.sessions[action.session])
        self._worker.tell(OperationDone(action.session, error, result))

    def _open(self, action: OpenSession) -> dict[str, Any]:
        """Begin with nothing, or with what was parked. Raises AntiphonError."""
        world, name = self._world, action.session
        if world.chance(self._faults.refuse_open):
            world.count("fault: open refused")
            self._worker.blame(name, "open refused")
            raise InvalidRequest("the synthetic engine refuses the session")
        result: dict[str, Any] = {"parks": True} if self._stage in PARKS else {}
        if action.restore is not None:
            snapshot = self._worker.restore(name, action.restore)
            session = replace(
                snapshot.state, epoch=action.epoch, owner=action.owner, settings=action.settings
            )
            result["committed_step"] = snapshot.step
            result["kept"] = sorted(session.checkpoints)
        elif action.fork is not None:
            source = self.sessions[action.fork.session]
            session = EngineSession(
                name,
                action.epoch,
                action.owner,
                action.settings,
                0.0,
                0.0,
                steps=source.steps,
                checksum=source.checksum,
            )
        else:
            clock_ms = float(action.settings.get("clock_ms", 0))
            session = EngineSession(
                name,
                action.epoch,
                action.owner,
                action.settings,
                clock_ms,
                clock_ms,
                checksum=begun(action.settings.get("seed", 0)),
            )
        self.sessions[name] = session
        self._worker.watch.session_made(self._worker, session, action)
        return result

    def _measure(self, session: EngineSession) -> None:
        """Say what the session holds; where bytes are bounded never more than was declared."""
        places = self._worker.profile.places
        share = self._world.random.choice([0.5, 1.0] if places else [0.5, 1.0, 1.5])
        held = {d: int(n * share) for d, n in declared(places, session.settings).items()}
        self._worker.tell(SessionMeasured(session.name, held))

    def free(self, name: str) -> bool:
        """Drop the session; turns of it that were abandoned end unheard. False when it fails."""
        self._slow.pop(name, None)
        if self._world.chance(self._faults.fail_close):
            self._world.count("fault: session not closed")
            # Whoever wants it anew here waits for that, or in vain.
            self._worker.blame(name, "lost")
            return False
        session = self.sessions.pop(name, None)
        if session is not None:
            session.freed = True
        return True

    # Stream input

    def apply(self, action: ApplyInput) -> None:
        """Hear a piece of audio: notice where speech begins and ends."""
        session = self.sessions[action.session]
        self._worker.watch.input_applied(self._worker, session, action)
        session.applied += 1
        world = self._world
        if world.chance(self._faults.fail_input):
            world.count("fault: input failed")
            self._worker.tell(InputFailed(action.session, action.sequence, FAILED))
        pcm = payload_of(action.payload).data
        length_ms = len(pcm) / 2 * 1000 / INPUT_RATE_HZ
        begin_ms, session.heard_ms = session.heard_ms, session.heard_ms + length_ms
        detection = session.settings.get("turn_detection")
        if detection is None:
            if world.chance(self._faults.overflow):
                world.count("fault: input buffer overflow")
                self._notice(session, "input_dropped", ms=20)
            return
        if pcm[:2] == SPEECH:
            session.silence_ms = 0.0
            if session.speech_ms is None:
                padded_ms = begin_ms - detection["prefix_padding_ms"]
                session.speech_ms = max(padded_ms, session.opened_ms)
                self._notice(session, "speech_started", audio_start_ms=int(session.speech_ms))
        elif session.speech_ms is not None:
            session.silence_ms += length_ms
            if session.silence_ms >= detection["silence_duration_ms"]:
                start_ms, session.speech_ms = int(session.speech_ms), None
                self._notice(
                    session,
                    "speech_stopped",
                    audio_start_ms=start_ms,
                    audio_end_ms=int(session.heard_ms),
                )

    def _notice(self, session: EngineSession, name: str, **arguments: int) -> None:
        self._worker.tell(Noticed(session.name, name, arguments))

    # Turns

    def start(self, action: StartTurn) -> None:
        """Begin a turn; how it goes is decided here."""
        world, faults = self._world, self._faults
        chance = world.random
        session = self.sessions[action.session]
        session.runs += 1
        turn = EngineTurn(action, session, world.number("run"), last=action.last)
        turn.inputs.extend((payload_of(descriptor), False) for descriptor in action.inputs)
        match self._stage:
            case "listen":
                turn.left = chance.choice([1, 2, 3, 4])
            case "think":
                turn.left = chance.choice([1, 2, 5, 9])
        if action.step is not None:
            turn.checksum = session.checksum
            if action.step != session.steps + 1:
                world.fail("I5 steps", f"step {action.step} is run after {session.steps}")
        if world.chance(faults.fail_turn):
            turn.fails_at = chance.randrange(3)
        elif world.chance(faults.give_up_turn):
            turn.gives_up, turn.fails_at = True, chance.randrange(3)
        elif world.chance(faults.hang):
            turn.hangs = True
        if world.chance(faults.stubborn):
            turn.stubborn_ms = chance.choice([200.0, 1_500.0, 9_000.0])
        turn.deaf = world.chance(faults.deaf)
        self.turns[turn.key] = turn
        self._worker.watch.turn_started(self._worker, turn)
        if turn.hangs:
            world.count("fault: engine hangs")
            self._worker.blame(action.session, "engine")
            return
        self._next(turn)

    def feed(self, session: str, turn: int, payload: Payload | None, last: bool) -> None:
        """More input for a running turn."""
        running = self.turns.get((session, turn))
        if running is None:
            return
        if payload is not None:
            running.inputs.append((payload, True))
        running.last = running.last or last
        self._go_on(running)

    def pace(self, session: str, turn: int, wait: bool) -> None:
        """The turn is to wait before it makes more, or may go on."""
        running = self.turns.get((session, turn))
        if running is not None:
            if wait:
                self._world.count("turns paced")
            if wait and running.deaf:
                self._world.count("fault: engine does not wait")
                self._worker.blame(session, "full")
                return
            running.paced = wait
            if not wait:
                self._go_on(running)

    def cancel(self, session: str, turn: int) -> None:
        """Stop the turn, at once or when it gets round to it."""
        running = self.turns.get((session, turn))
        if running is None or running.cancelled:
            return
        running.cancelled = True
        if running.stubborn_ms:
            self._world.count("fault: engine ignores cancel")
            self._worker.later(running.stubborn_ms, lambda: self._stopped(running))
        else:
            self._worker.later(0.0, lambda: self._stopped(running))

    def abandon(self, session: str, turn: int) -> None:
        """Nobody listens to the turn any more."""
        self.turns.pop((session, turn), None)

    def _stopped(self, turn: EngineTurn) -> None:
        if turn.hangs and turn.action.parameters.get("finish_when_cancelled"):
            self._end(turn, TurnOutcome.COMPLETED)
            return
        self._end(turn, TurnOutcome.CANCELLED)

    def _next(self, turn: EngineTurn) -> None:
        delay_ms = self._world.random.choice([0.5, 3.0, 20.0, 60.0])
        self._worker.later(delay_ms, lambda: self._step(turn))

    def _go_on(self, turn: EngineTurn) -> None:
        if turn.waits:
            turn.waits = False
            self._next(turn)

    def _step(self, turn: EngineTurn) -> None:
        """One step of a turn. A stubborn one goes on although it was cancelled."""
        if turn.over or turn.hangs or (turn.cancelled and not turn.stubborn_ms):
            return
        if turn.session.freed:
            turn.over = True
            return
        if turn.paced and not turn.cancelled:
            turn.waits = True
            return
        if turn.fails_at == turn.steps:
            if turn.gives_up:
                self._world.count("fault: turn given up by its engine")
                outcome = TurnOutcome.CANCELLED
            else:
                self._world.count("fault: turn failed")
                outcome = TurnOutcome.FAILED
            self._worker.blame(turn.action.session, "engine")
            self._end(turn, outcome, FAILED if outcome is TurnOutcome.FAILED else None)
            return
        turn.steps += 1
        if turn.left is not None:
            self._make(turn)
            turn.left -= 1
            if turn.left <= 0:
                self._end(turn, TurnOutcome.COMPLETED)
                return
        elif turn.inputs:
            payload, counted = turn.inputs.popleft()
            if counted:
                self._worker.tell(InputTaken(*turn.key, len(payload.data)))
            self._say(turn, payload)
        elif turn.last and turn.action.step is not None:
            if not self._move_on(turn):
                return
        elif turn.last:
            self._end(turn, TurnOutcome.COMPLETED)
            return
        else:
            turn.waits = True
            return
        self._next(turn)

    def _make(self, turn: EngineTurn) -> None:
        chance = self._world.random
        if self._stage == "listen":
            if chance.random() < 0.8:
                self._emit(turn, text_payload(f"heard{turn.number}_{turn.steps} "))
            return
        words = []
        count = chance.choice([1, 2, 4])
        self._worker.thought(turn.number, turn.steps * 10 + count - 1)
        for index in range(count):
            stop = chance.choice(["", "", ",", ".", "!"])
            words.append(f"w{turn.number}_{turn.steps * 10 + index}{stop} ")
        self._emit(turn, text_payload("".join(words)))

    def _say(self, turn: EngineTurn, payload: Payload) -> None:
        """Turn a clause into codes, or clause or codes into audio."""
        if turn.action.step is not None:
            turn.checksum = folded(turn.checksum, bytes(payload.data))
            return
        if self._stage == "decode":
            self._emit(turn, payload)
            return
        if self._stage == "encode":
            self._emit(turn, latents(bytes(payload.data)))
            return
        clause = int(payload.attributes["clause"])
        text = payload.data.decode()
        if self._stage == "voice":
            shape, attributes = (len(payload.data),), {"clause": clause}
            codes = Payload(PayloadType.CODEC_CODES, payload.data, "|u1", shape, attributes)
            self._emit(turn, codes)
            return
        run = int(text.split("_")[0].strip()[1:])
        pieces = self._world.random.choice([1, 1, 2, 4])
        for piece in range(pieces):
            self._worker.spoke(run, clause, piece)
            pcm = AUDIO_TAG.pack(run, clause, piece) * self._world.random.choice([40, 200, 900])
            self._emit(
                turn,
                audio_payload(pcm, 24_000, clause=clause, clause_end=piece == pieces - 1),
            )

    def _move_on(self, turn: EngineTurn) -> bool:
        """The output of a step, or its end; whether there is more to do."""
        wanted, chance = turn.action.parameters, self._world.random
        if wanted.get("fail"):
            self._worker.blame(turn.action.session, "engine")
            self._end(turn, TurnOutcome.FAILED, FAILED)
            return False
        if turn.pieces is None:
            turn.pieces = chance.choice([1, 1, 2, 5])
            turn.made = 0
        if turn.made < turn.pieces:
            self._emit(turn, frame(turn.checksum, turn.made, chance.choice([0, 100, 4_000])))
            turn.made += 1
            return True
        if wanted.get("fail_after_output"):
            self._worker.blame(turn.action.session, "engine")
            self._end(turn, TurnOutcome.FAILED, FAILED)
            return False
        if (wanted.get("stall") or wanted.get("finish_when_cancelled")) and not self.obeys:
            self._world.count("fault: step stalls")
            self._worker.blame(turn.action.session, "engine")
            turn.hangs = True
            return False
        session = turn.session

        def commit() -> None:
            if wanted.get("fail_in_commit"):
                self._world.count("fault: commit failed")
                self._worker.blame(turn.action.session, "engine")
                raise CommitRefused
            session.steps, session.checksum = session.steps + 1, turn.checksum

        self._end(turn, TurnOutcome.COMPLETED, commit=commit)
        return False

    def _emit(self, turn: EngineTurn, payload: Payload) -> None:
        self.progressed_ms = self._world.now_ms
        # As the worker's shell: what comes after the end of its turn is not wanted.
        if self.turns.get(turn.key) is turn:
            self._worker.tell(Emitted(*turn.key, payload))

    def _end(
        self,
        turn: EngineTurn,
        outcome: TurnOutcome,
        error: ErrorInfo | None = None,
        commit: Callable[[], None] | None = None,
    ) -> None:
        if turn.over:
            return
        turn.over = True
        self.progressed_ms = self._world.now_ms
        if self.turns.get(turn.key) is not turn:
            return
        del self.turns[turn.key]
        usage: dict[str, Any] = {}
        if outcome is TurnOutcome.COMPLETED:
            if self._stage == "think":
                usage = {"output_tokens": turn.steps, "input_tokens": 3, "cached_tokens": 1}
                usage["finish_reason"] = self._world.random.choice(["stop", "stop", "length"])
            elif self._stage == "speak":
                usage = {"synthesis_ms": 5.0}
        self._worker.tell(TurnFinished(*turn.key, outcome, error, usage, commit))
