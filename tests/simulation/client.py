"""Clients: polite, rude, slow, and gone without a word."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gateway.hosted import Hosted
from protocol.errors import AntiphonError
from sessions.actions import ClientBlocked, ClientSaid, CloseRequested
from sessions.duplex import events as said
from sessions.lifecycle import CloseReason
from tests.simulation.engine import SILENCE, SPEECH
from tests.simulation.view import ClientView
from tests.simulation.world import World

if TYPE_CHECKING:
    from tests.simulation.deployment import Deployment
    from tests.simulation.gateway import GatewayProcess

FRAME_MS = 100
HELD_MS = 45_000.0
"""No worker may take longer than this to work off what a client has sent."""
HIGH_OUTPUTS = 24
"""So many unread outputs block a client that reads slowly."""
SPEECH_FRAME = SPEECH * (24 * FRAME_MS)
SILENT_FRAME = SILENCE * (24 * FRAME_MS)
MANUAL: dict[str, Any] = {"audio": {"input": {"turn_detection": None, "transcription": {}}}}

BAD_PATCHES: list[dict[str, Any]] = [
    {"no_such_setting": 1},
    {"audio": {"output": {"speed": 9.0}}},
    {"audio": {"output": {"voice": "nobody"}}},
    {"output_modalities": ["text", "audio"]},
    {"tools": [{"name": "x"}]},
    {"instructions": "x" * 20_000},
]
GOOD_PATCHES: list[dict[str, Any]] = [
    MANUAL,
    {"audio": {"input": {"turn_detection": {"type": "server_vad", "silence_duration_ms": 200}}}},
    {"audio": {"input": {"transcription": {"language": "de"}}}},
    {"audio": {"input": {"transcription": None}}},
    {"audio": {"input": {"transcription": {}, "turn_detection": {"interrupt_response": False}}}},
    {"output_modalities": ["text"]},
    {"output_modalities": ["audio"]},
    {"instructions": "Be terse."},
    {"max_output_tokens": 50},
]


class Client:
    """One client. It opens a session at a gateway and talks until it has had enough."""

    def __init__(self, deployment: Deployment, gateway_place: str, name: str) -> None:
        self.name = name
        self.view = ClientView()
        self.gateway: GatewayProcess | None = None
        self.hosted: Hosted | None = None
        self.session = ""
        self.over = False
        """Whether nothing more will happen to it."""
        self.refusal: AntiphonError | None = None
        self.close_asked: set[CloseReason] = set()
        self.interrupted = False
        """Whether it ever asked for the end of a response."""
        self.verb_ms = 0.0
        """When, by its gateway's clock, it last said something that was not refused."""
        self.opened_ms = 0.0
        self.blocked_ms: float | None = None
        self.last_sequence = 0
        self.released_ms: float | None = None
        self.appended_bytes = 0
        self.rude = deployment.profile.rude
        self.slow = deployment.world.chance(0.15) and self.rude > 0
        self.waits = deployment.world.chance(0.5)
        """Whether it does nothing while a response is in progress."""
        self.talks = True
        """Whether it does things by itself."""
        self.patience = deployment.world.random.choice([3, 10, 30])
        """How many things it does before it goes."""
        self.on_end: Callable[[Client], None] = lambda client: None
        self._deployment = deployment
        self._world: World = deployment.world
        self._place = gateway_place
        self.held = False
        """Whether the session takes no verbs for now."""
        self._holds = 0
        self._verbs_said = 0
        self._verb_before_ms = 0.0
        self._verbs: deque[said.ClientVerb] = deque()
        self._unread = 0

    # Life

    def open(self, patch: dict[str, Any] | None = None) -> None:
        """Ask for a session; refused at once where there is no gateway or no place."""
        gateway = self._deployment.gateways[self._place]
        if gateway is None:
            self._finish()
            return
        gateway.run(lambda: self._open(gateway, patch))

    def _open(self, gateway: GatewayProcess, patch: dict[str, Any] | None) -> None:
        world = self._world
        world.count("opens")
        if patch is None and world.chance(0.4) and self.rude:
            patch = world.random.choice(BAD_PATCHES if world.chance(self.rude) else GOOD_PATCHES)
        try:
            gateway.open(self, patch)
        except AntiphonError as error:
            world.count("opens refused")
            self.refusal = error
            self._finish()
            return
        if self.rude and world.chance(0.1):
            # Gone before its open was answered.
            self._deployment.blame(self.session, "cancelled")
            world.count("opens cancelled")
            self.later(world.random.choice([0.0, 0.3, 2.0, 300.0]), self.close)

    def hosted_as(self, gateway: GatewayProcess, hosted: Hosted) -> None:
        """A gateway hosts its session."""
        self.gateway = gateway
        self.hosted = hosted
        self.session = hosted.id
        self.opened_ms = self.verb_ms = gateway.now_ms
        self._deployment.watch.opened(self)

    def told(self, sequence: int, output: said.ClientOutput) -> None:
        """The session puts something out."""
        self._world.note(self.name, output)
        self._deployment.watch.told(self, sequence, output)
        self.view.told(output)
        if isinstance(output, said.SessionCreated) and self.talks:
            self._next()
        elif isinstance(output, said.InputTranscriptionFailed) and self.talks:
            self.later(1.0, lambda: self.say(said.RetrieveItem(output.item_id)))
        elif isinstance(output, said.Refused) and output.ref == f"verb_{self._verbs_said}":
            self.verb_ms = self._verb_before_ms
        self._unread += 1
        if self.slow and self._unread == HIGH_OUTPUTS and self.view.ended is None:
            assert self.gateway is not None
            self._world.count("clients blocked")
            self.blocked_ms = self.gateway.now_ms
            self.gateway.handle(self.session, ClientBlocked(True))
            pause_ms = self._world.random.choice([200.0, 3_000.0, 20_000.0])
            self.later(pause_ms, self._read)

    def _read(self) -> None:
        self._unread = 0
        self.blocked_ms = None
        self._handle(ClientBlocked(False))
        self._flush()

    def hold(self, hold: bool) -> None:
        """The session takes no verbs for now, or takes them again."""
        self.held = hold
        if hold:
            self._world.count("verbs held back")
            self._holds += 1
            number = self._holds
            self.later(HELD_MS, lambda: self._held_since(number))
        else:
            self.later(0.0, self._flush)

    def _held_since(self, hold: int) -> None:
        if self.held and self._holds == hold and not self.over and self.view.ended is None:
            self._world.fail("I11 isolation", f"{self.session} takes no verbs for {HELD_MS} ms")

    def released(self, reason: CloseReason) -> None:
        """Nothing is left of the session."""
        self._world.note(self.name, f"released: {reason}")
        self._deployment.watch.released(self, reason)
        self._finish()

    def gateway_died(self) -> None:
        """The connection ends with its gateway."""
        self._finish()

    def _finish(self) -> None:
        if not self.over:
            self.over = True
            self.released_ms = self._world.now_ms
            self.on_end(self)

    # What it does

    def close(self) -> None:
        """Hang up, which is all that a vanished client does as well."""
        self.close_asked.add(CloseReason.CLIENT)
        self._handle(CloseRequested(CloseReason.CLIENT))

    def say(self, verb: said.ClientVerb) -> None:
        """Hand a verb over, once it is taken."""
        self._verbs.append(verb)
        self._flush()

    def later(self, delay_ms: float, action: Callable[[], None]) -> None:
        """Do something after a while, in a turn of the gateway's loop."""
        assert self.gateway is not None
        self.gateway.later(delay_ms, action)

    def _handle(self, event: Any) -> None:
        if self.gateway is not None and not self.over:
            self.gateway.handle(self.session, event)

    def _flush(self) -> None:
        # Not from within an output: a surface reads its client in a turn of its own.
        while self._verbs and not self.held and self.blocked_ms is None and not self.over:
            verb = self._verbs.popleft()
            assert self.gateway is not None
            self._world.note(self.name, verb)
            self._deployment.watch.said(self, verb)
            if isinstance(verb, said.CancelResponse | said.TruncateItem):
                self.interrupted = True
            if not isinstance(verb, said.AppendAudio | said.RetrieveItem):
                self._verbs_said += 1
                verb = replace(verb, ref=f"verb_{self._verbs_said}")
                self._verb_before_ms, self.verb_ms = self.verb_ms, self.gateway.now_ms
            self._handle(ClientSaid(verb))

    def _next(self) -> None:
        delay_ms = self._world.random.choice([1.0, 30.0, 250.0, 1_500.0])
        self.later(delay_ms, self._act)

    def _act(self) -> None:
        """Do one thing of those that clients do."""
        if self.over or self.view.ended is not None or not self.talks:
            return
        world = self._world
        chance = world.random
        if self.held or (self.waits and self.view.open):
            self._next()
            return
        self.patience -= 1
        if self.patience <= 0:
            if world.chance(0.2) and self.rude:
                world.count("clients gone silent")
                return
            world.count("clients gone")
            self.close()
            return
        if world.chance(self.rude):
            self._be_rude()
        else:
            roll = chance.random()
            if roll < 0.35:
                self._talk(chance.choice([2, 5, 9]))
            elif roll < 0.55:
                self._create(chance)
            elif roll < 0.65:
                self._cancel()
            elif roll < 0.75:
                self.say(said.CreateItem(self._item(chance), self._after(chance)))
            elif roll < 0.85:
                self.say(said.PatchSettings(chance.choice(GOOD_PATCHES)))
            elif roll < 0.90:
                self.say(said.CommitInput())
            elif roll < 0.92:
                self.say(said.ClearInput())
            elif roll < 0.95:
                self._truncate(chance)
            elif self.view.items:
                item_id = chance.choice(self.view.items).id
                if chance.random() < 0.5:
                    self.say(said.DeleteItem(item_id))
                else:
                    self.say(said.RetrieveItem(item_id))
        self._next()

    def _talk(self, frames: int) -> None:
        if self.view.open:
            self._world.count("barge-ins")
        for index in range(frames):
            self.later(index * FRAME_MS, lambda: self._append(SPEECH_FRAME))
        for index in range(frames, frames + 7):
            self.later(index * FRAME_MS, lambda: self._append(SILENT_FRAME))

    def _append(self, pcm: bytes) -> None:
        if not self.over and self.view.ended is None:
            self.appended_bytes += len(pcm)
            self.say(said.AppendAudio(pcm))

    def _create(self, chance: Any) -> None:
        if chance.random() < 0.25:
            given: list[said.Item | str] | None = None
            if chance.random() < 0.5:
                given = [self._item(chance)]
            self.say(said.CreateResponse(conversation=False, input=given))
        else:
            modalities = chance.choice([None, None, ("text",), ("audio",)])
            self.say(said.CreateResponse(output_modalities=modalities))

    def _cancel(self) -> None:
        if not self.view.open:
            return
        if self._world.chance(0.5):
            self.say(said.CancelResponse())
        else:
            self.say(said.CancelResponse(self._world.random.choice(list(self.view.open))))
        self._world.count("responses cancelled by their client")

    def _truncate(self, chance: Any) -> None:
        spoken = [item for item in self.view.items if item.spoken]
        if spoken:
            item = chance.choice(spoken[-2:])
            self.say(said.TruncateItem(item.id, 0, chance.randrange(item.audio_ms + 50)))

    def _item(self, chance: Any) -> said.Item:
        number = self._world.number("client item")
        if chance.random() < 0.25:
            part = said.Part(said.PartKind.INPUT_AUDIO, audio=SPEECH_FRAME)
            if chance.random() < 0.3:
                part = said.Part(said.PartKind.INPUT_AUDIO, f"transcript {number}")
        else:
            part = said.Part(said.PartKind.INPUT_TEXT, f"text {number}")
        return said.Item(f"mine_{number}", said.Role.USER, said.ItemStatus.COMPLETED, [part])

    def _after(self, chance: Any) -> str | None:
        roll = chance.random()
        if roll < 0.8 or not self.view.items:
            return None
        return said.FRONT if roll < 0.9 else str(chance.choice(self.view.items).id)

    def _be_rude(self) -> None:
        chance = self._world.random
        if self._world.chance(0.25):
            self._storm()
            return
        self._world.count("bad input")
        verbs: list[said.ClientVerb] = [
            said.PatchSettings(chance.choice(BAD_PATCHES)),
            said.CancelResponse("resp_of_nobody"),
            said.DeleteItem("item_of_nobody"),
            said.TruncateItem("item_of_nobody", 0, 1),
            said.CreateResponse(voice="nobody"),
            said.CreateResponse(conversation=False, input=["item_of_nobody"]),
            said.CommitInput(),
        ]
        if self.view.items:
            there = chance.choice(self.view.items)
            twin = said.Item(there.id, said.Role.USER, said.ItemStatus.COMPLETED)
            verbs.append(said.CreateItem(twin))
            verbs.append(said.TruncateItem(there.id, 0, 10_000_000))
        self.say(chance.choice(verbs))

    def _storm(self) -> None:
        """Much at once: responses begun and cancelled, or more input than anybody hears."""
        self._world.count("storms")
        kind = self._world.random.randrange(3)
        if kind == 0:
            for _ in range(8):
                self.say(said.CreateResponse())
                self.say(said.CancelResponse())
        elif kind == 1:
            for _ in range(12):
                self._append(SPEECH_FRAME)
                self.say(said.CommitInput())
                self.say(said.ClearInput())
        else:
            for _ in range(300):
                self._append(SILENT_FRAME[:480])
