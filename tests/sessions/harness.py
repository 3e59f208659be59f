"""A session core under test: its actions collected, its workers played by the test."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from protocol.connectors import Descriptor, InlineDescriptor
from protocol.errors import AntiphonError, CapacityExceeded, ErrorInfo, SessionStateLost
from protocol.messages import (
    Answer,
    Close,
    Command,
    Feed,
    Open,
    Park,
    Run,
    StageEvent,
    TurnEnded,
    TurnStatus,
)
from protocol.payloads import Payload, PayloadType, audio_payload, text_payload
from sessions.actions import (
    AskDirectory,
    AttachRefused,
    BindStage,
    ClientSaid,
    DirectoryAnswered,
    Event,
    ForgetParked,
    HoldClient,
    NotRestored,
    OpenRequested,
    Released,
    Reported,
    StageBound,
    StageLost,
    StageProduced,
    StageUnavailable,
    Tick,
    ToClient,
    ToStage,
    TurnMeasured,
    Unbind,
)
from sessions.client import SessionCreated
from sessions.directory import MemoryDirectory, Request
from sessions.duplex.events import ClientVerb
from sessions.machine import Machine
from sessions.pipeline import Delivery, Edge, Limits, Pipeline
from sessions.resume_secret import digest
from sessions.session import Identity, Session


def payload_of(descriptor: Descriptor) -> Payload:
    """What a command carries; the session core always hands payloads over whole."""
    assert isinstance(descriptor, InlineDescriptor)
    return descriptor.payload


PCM_MS = b"\x00\x00" * 24
"""One ms of audio at 24 kHz."""


def voice_pipeline(**limits: int) -> Pipeline:
    """listen -> think -> speak."""
    return Pipeline(
        name="voice",
        stages=("listen", "think", "speak"),
        edges=(
            Edge("listen", "think", PayloadType.TEXT, Delivery.FULL),
            Edge("think", "speak", PayloadType.TEXT, Delivery.CHUNK),
        ),
        outputs={"text": "think", "audio": "speak"},
        limits=Limits(**limits),
        instructions="Be brief.",
        voice="joe",
        voices={"joe": "joe", "alloy": "joe"},
    )


def ask(machine: Machine, verb: Any, now_ms: float, emit: Callable[[Any], None]) -> None:
    """Have a machine carry a verb out, or refuse it as its session does."""
    try:
        machine.client(verb, now_ms)
    except AntiphonError as error:
        emit(machine.refusal(verb, error.info()))


class Harness:
    """One session. Time moves only by `at` and `run_until`."""

    def __init__(
        self,
        pipeline: Pipeline | None = None,
        *,
        opened: bool = True,
        controller: str | None = "client",
        secret: str | None = None,
        limits: Limits | None = None,
        parks: Iterable[str] = (),
    ) -> None:
        self.now_ms = 1_000.0
        self._ids = 0
        self.pipeline = pipeline or voice_pipeline()
        self.directory = MemoryDirectory()
        identity = Identity("sess_1", 1, "gateway_1", "tenant", "voice", 1_900_000_000)
        self.session = Session(
            identity,
            self.pipeline,
            self._new_id,
            self.now_ms,
            controller=controller,
            secret_digest=None if secret is None else digest(secret),
            limits=limits,
        )
        self.outputs: list[Any] = []
        self.told: dict[str, list[tuple[int, Any]]] = {}
        self.sequences: list[int] = []
        self.commands: list[tuple[str, Command]] = []
        self.held = False
        self.measured: list[TurnMeasured] = []
        self.released: Released | None = None
        self.available = set(self.pipeline.stages)
        self.answer_opens = True
        self.answer_closes = True
        self.answer_directory = True
        self.asked: list[Request] = []
        """Calls of the directory that `answer` is still to answer."""
        self.refuse_open: dict[str, ErrorInfo] = {}
        self.no_room: dict[str, int] = {}
        """How many opens of a stage find no room, unless they wait for it."""
        self.parks = set(parks)
        self.parked: set[str] = set()
        """The stages whose state is in the store."""
        self.answer_parks = True
        self.refuse_park: ErrorInfo | None = None
        self.unbound: list[str] = []
        self.not_restored: list[ErrorInfo] = []
        self._output_sequence: dict[tuple[str, int], int] = {}
        if opened:
            self.feed(OpenRequested())
            assert isinstance(self.outputs[0], SessionCreated)
            self.clear()

    def _new_id(self, prefix: str) -> str:
        self._ids += 1
        return f"{prefix}_{self._ids}"

    # Into the session

    def feed(self, event: Event) -> None:
        """Hand an event in, and all that follows from it by itself."""
        events = [event]
        while events:
            for action in self.session.handle(events.pop(0), self.now_ms):
                match action:
                    case ToClient(to=to) if to is not None:
                        self.told.setdefault(to, []).append((action.sequence, action.output))
                    case AttachRefused():
                        self.told.setdefault(action.attachment, []).append((0, action.error))
                    case ToClient():
                        self.outputs.append(action.output)
                        self.sequences.append(action.sequence)
                    case ToStage():
                        self.commands.append((action.stage, action.command))
                        self._worker(action.stage, action.command, events)
                    case BindStage():
                        if action.stage in self.available:
                            events.append(StageBound(action.stage, f"{action.stage}-1"))
                        else:
                            error = CapacityExceeded("none").info()
                            events.append(StageUnavailable(action.stage, error))
                    case Unbind():
                        self.unbound.append(action.stage)
                    case NotRestored():
                        self.not_restored.append(action.error)
                    case ForgetParked():
                        self.parked.discard(action.stage)
                    case AskDirectory():
                        if self.answer_directory:
                            reply = self.directory.call(action.request)
                            events.append(DirectoryAnswered(reply))
                        else:
                            self.asked.append(action.request)
                    case HoldClient():
                        self.held = action.hold
                    case TurnMeasured():
                        self.measured.append(action)
                    case Released():
                        self.released = action

    def _worker(self, stage: str, command: Command, events: list[Event]) -> None:
        """Answer opens and closes as a healthy worker does."""
        if isinstance(command, Open) and self.answer_opens:
            error = self.refuse_open.get(stage)
            if self.no_room.get(stage) and not command.waits:
                self.no_room[stage] -= 1
                error = CapacityExceeded("others would have to make room").info()
            if error is None and command.restore:
                if stage not in self.parked:
                    error = SessionStateLost("nothing is parked").info()
                self.parked.discard(stage)
            result = {"parks": True} if stage in self.parks else {}
            events.append(Reported(stage, Answer("sess_1", command.command, error, result)))
        if isinstance(command, Park) and self.answer_parks:
            error = self.refuse_park
            if error is None:
                self.parked.add(stage)
            events.append(Reported(stage, Answer("sess_1", command.command, error)))
        if isinstance(command, Close) and self.answer_closes:
            events.append(Reported(stage, Answer("sess_1", command.command)))

    def answer(self) -> None:
        """The directory answers the calls that wait, and those that follow from that."""
        while self.asked:
            self.feed(DirectoryAnswered(self.directory.call(self.asked.pop(0))))

    def say(self, verb: ClientVerb) -> None:
        """The client says `verb`."""
        self.feed(ClientSaid(verb, "client"))

    def at(self, now_ms: float) -> None:
        """Time passes; deadlines that come due are handled in order."""
        while (due := self.session.deadline()) is not None and due <= now_ms:
            self.now_ms = max(self.now_ms, due)
            self.feed(Tick())
            if self.session.deadline() == due:
                raise AssertionError(f"the deadline at {due} was not handled")
        self.now_ms = now_ms

    def later(self, ms: float) -> None:
        """`ms` pass."""
        self.at(self.now_ms + ms)

    # Workers

    def lose(self, stage: str, *, back: bool = False) -> None:
        """The worker of `stage` dies; with `back` a new one is there at once."""
        if not back:
            self.available.discard(stage)
        self.feed(StageLost(stage))

    def come_back(self, stage: str) -> None:
        """A new worker of `stage` takes the sessions that wait for it."""
        self.available.add(stage)
        self.feed(StageBound(stage, f"{stage}-2"))

    def notice(self, name: str, **arguments: int) -> None:
        """The hearing stage notices something."""
        self.feed(Reported("listen", StageEvent("sess_1", name, arguments)))

    def produce(self, stage: str, turn: int, payload: Payload) -> None:
        """A stage produces a piece of a turn."""
        key = (stage, turn)
        self._output_sequence[key] = self._output_sequence.get(key, 0) + 1
        descriptor = InlineDescriptor(payload)
        self.feed(StageProduced(stage, turn, self._output_sequence[key], payload, descriptor))

    def text(self, stage: str, turn: int, text: str) -> None:
        """A stage produces text."""
        self.produce(stage, turn, text_payload(text))

    def audio(self, turn: int, clause: int, ms: int, *, end: bool = True) -> None:
        """The voice says `ms` of clause number `clause`."""
        self.produce(
            "speak", turn, audio_payload(PCM_MS * ms, 24_000, clause=clause, clause_end=end)
        )

    def done(
        self,
        stage: str,
        turn: int,
        status: TurnStatus = TurnStatus.COMPLETED,
        error: ErrorInfo | None = None,
        **usage: Any,
    ) -> None:
        """A stage ends a turn."""
        self.feed(Reported(stage, TurnEnded("sess_1", turn, status, error, usage)))

    # What came out

    def clear(self) -> None:
        """Forget what came out so far."""
        self.outputs.clear()
        self.commands.clear()

    def names(self) -> list[str]:
        """The outputs' type names in order."""
        return [type(output).__name__ for output in self.outputs]

    def all(self, kind: type[Any]) -> list[Any]:
        """All outputs of a type."""
        return [output for output in self.outputs if isinstance(output, kind)]

    def one(self, kind: type[Any]) -> Any:
        """The only output of a type."""
        (output,) = self.all(kind)
        return output

    def sent(self, kind: type[Any], stage: str | None = None) -> list[Any]:
        """All commands of a type (to a stage)."""
        return [
            command
            for to, command in self.commands
            if isinstance(command, kind) and stage in (None, to)
        ]

    def last_run(self, stage: str) -> Run:
        """The last turn started on `stage`."""
        run: Run = self.sent(Run, stage)[-1]
        return run

    def clauses(self, turn: int) -> list[str]:
        """The clauses handed to the voice for `turn`."""
        texts = []
        for stage, command in self.commands:
            if stage != "speak" or not isinstance(command, Run | Feed) or command.turn != turn:
                continue
            descriptors = command.inputs if isinstance(command, Run) else [command.payload]
            texts += [payload_of(d).data.decode() for d in descriptors if d is not None]
        return texts

    # Whole stretches of a conversation

    def speak(self, start_ms: int = 0, end_ms: int = 500) -> int:
        """The user speaks and stops; the turn in which it is being heard."""
        self.notice("speech_started", audio_start_ms=start_ms)
        self.notice("speech_stopped", audio_start_ms=start_ms, audio_end_ms=end_ms)
        return self.last_run("listen").turn

    def hear(self, text: str) -> None:
        """The user says `text`, and it is understood."""
        turn = self.speak()
        if text:
            self.text("listen", turn, text)
        self.done("listen", turn, audio_ms=500)

    def reply_turn(self, text: str = "What is new?") -> int:
        """The user says `text`; the turn of the reply that begins."""
        self.hear(text)
        return self.last_run("think").turn
