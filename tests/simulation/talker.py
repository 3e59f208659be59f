"""Clients that talk: they speak, ask, interrupt, write and change their minds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from protocol.errors import ErrorInfo
from sessions.duplex import events as said
from tests.simulation.client import Client
from tests.simulation.deployment import Deployment
from tests.simulation.engine import SILENCE, SPEECH

FULL_BYTES = 65_500
"""A conversation with so much text has room for a few words more."""
FRAME_MS = 100
SPEECH_FRAME = SPEECH * (24 * FRAME_MS)
SILENT_FRAME = SILENCE * (24 * FRAME_MS)
MANUAL: dict[str, Any] = {"audio": {"input": {"turn_detection": None, "transcription": {}}}}

AUDIO_PART = said.Part(said.PartKind.INPUT_AUDIO, audio=SPEECH_FRAME)

BAD_PATCHES: list[dict[str, Any]] = [
    {"no_such_setting": 1},
    {"audio": {"output": {"speed": 9.0}}},
    {"audio": {"output": {"voice": "nobody"}}},
    {"output_modalities": ["text", "audio"]},
    {"tools": [{"name": "x"}]},
    {"instructions": "x" * 20_000},
    {"tracing": {"workflow_name": "x" * 5_000}},
    {"tracing": {"group_id": 2**70}},
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
    {"audio": {"input": {"turn_detection": {"interrupt_on": "words"}}}},
    {"audio": {"input": {"turn_detection": {"create_response": False}}}},
    {"audio": {"output": {"voice": "amy"}}},
    {"tracing": {"workflow_name": "simulated"}},
]


class Talker(Client):
    """The client of a duplex session."""

    progress = (said.CommitInput, said.CreateItem, said.CreateResponse)
    unrefused = (said.AppendAudio, said.RetrieveItem)

    def __init__(self, deployment: Deployment, gateway_place: str, name: str) -> None:
        super().__init__(deployment, gateway_place, name)
        self.waits = self.world.chance(0.5)
        """Whether it does nothing while a response is in progress."""

    def a_patch(self) -> dict[str, Any] | None:
        """Settings to open with, good ones and bad ones."""
        if not self.rude or not self.world.chance(0.4):
            return None
        bad = self.world.chance(self.rude)
        return self.world.random.choice(BAD_PATCHES if bad else GOOD_PATCHES)

    def a_verb(self) -> said.ClientVerb:
        """Something to say that is harmless."""
        return said.CancelResponse()

    def learns(self, output: Any) -> None:
        """A transcript that failed is asked for."""
        if isinstance(output, said.InputTranscriptionFailed) and self.talks:
            self.later(1.0, lambda: self.say(said.RetrieveItem(output.item_id)))

    def busy(self) -> bool:
        """Whether it waits for the end of a response."""
        return self.waits and bool(self.view.open)

    def handed_over(self, verb: Any) -> None:
        """A verb is about to reach the session."""
        if isinstance(verb, said.CancelResponse | said.TruncateItem | said.Reset):
            self.interrupted = True

    def act(self) -> None:
        """Do one thing of those that people do."""
        chance = self.world.random
        if self.world.chance(self.rude):
            self._be_rude()
            return
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
        elif roll < 0.91:
            self.say(said.ClearInput())
        elif roll < 0.92:
            self.world.count("conversations reset")
            self.say(said.Reset())
        elif roll < 0.95:
            self._truncate(chance)
        elif self.view.items:
            item_id = chance.choice(self.view.items).id
            if chance.random() < 0.5:
                self.say(said.DeleteItem(item_id))
            else:
                self.say(said.RetrieveItem(item_id))

    def probe(self) -> None:
        """Ask to be spoken to."""
        self.say(said.CreateResponse(output_modalities=("audio",)))

    def probed(self) -> tuple[ErrorInfo | None] | None:
        """How the response ended."""
        done = [r.done for r in self.view.responses.values() if r.done is not None]
        return (done[0].error,) if done else None

    def _talk(self, frames: int) -> None:
        if self.view.open:
            self.world.count("barge-ins")
        for index in range(frames):
            self.later(index * FRAME_MS, lambda: self._append(SPEECH_FRAME))
        for index in range(frames, frames + 7):
            self.later(index * FRAME_MS, lambda: self._append(SILENT_FRAME))

    def _append(self, pcm: bytes) -> None:
        if not self.over and self.view.ended is None:
            self.say(said.AppendAudio(pcm))

    def _create(self, chance: Any) -> None:
        if chance.random() < 0.25:
            given: list[said.Item | str] | None = None
            if chance.random() < 0.5:
                given = [self._item(chance)]
            self.say(said.CreateResponse(conversation=False, input=given))
        elif chance.random() < 0.2:
            limit = chance.choice(["inf", 50])
            verb = said.CreateResponse(
                instructions="In verse.", max_output_tokens=limit, metadata={"topic": "verse"}
            )
            self.say(verb)
        else:
            modalities = chance.choice([None, None, ("text",), ("audio",)])
            self.say(said.CreateResponse(output_modalities=modalities))

    def _cancel(self) -> None:
        if not self.view.open:
            return
        if self.world.chance(0.5):
            self.say(said.CancelResponse())
        else:
            self.say(said.CancelResponse(self.world.random.choice(list(self.view.open))))
        self.world.count("responses cancelled by their client")

    def _truncate(self, chance: Any) -> None:
        spoken = [item for item in self.view.items if item.spoken]
        if spoken:
            item = chance.choice(spoken[-2:])
            self.say(said.TruncateItem(item.id, 0, chance.randrange(item.audio_ms + 50)))

    def _item(self, chance: Any) -> said.Item:
        number = self.world.number("client item")
        if chance.random() < 0.05:
            part = said.Part(said.PartKind.INPUT_TEXT, "x" * self._room_bytes())
        elif chance.random() < 0.25:
            part = said.Part(said.PartKind.INPUT_AUDIO, audio=SPEECH_FRAME)
            if chance.random() < 0.3:
                part = said.Part(said.PartKind.INPUT_AUDIO, f"transcript {number}")
        else:
            part = said.Part(said.PartKind.INPUT_TEXT, f"text {number}")
        return said.Item(f"mine_{number}", said.Role.USER, said.ItemStatus.COMPLETED, [part])

    def _room_bytes(self) -> int:
        """Text that fills the conversation, as far as this client knows it."""
        there = sum(len(item.text or "") for item in self.view.items)
        return max(1, FULL_BYTES - there)

    def _after(self, chance: Any) -> str | None:
        roll = chance.random()
        if roll < 0.8 or not self.view.items:
            return None
        return said.FRONT if roll < 0.9 else str(chance.choice(self.view.items).id)

    def _be_rude(self) -> None:
        chance = self.world.random
        if self.world.chance(0.25):
            self._storm()
            return
        self.world.count("bad input")
        verbs: list[said.ClientVerb] = [
            said.PatchSettings(chance.choice(BAD_PATCHES)),
            said.CancelResponse("resp_of_nobody"),
            said.DeleteItem("item_of_nobody"),
            said.TruncateItem("item_of_nobody", 0, 1),
            said.CreateResponse(voice="nobody"),
            said.CreateResponse(conversation=False, input=["item_of_nobody"]),
            said.CreateResponse(conversation=False, input=[_item(AUDIO_PART)]),
            said.CreateResponse(conversation=False, input=["item_of_nobody"] * 600),
            said.CreateResponse(output_modalities=("text", "audio")),
            said.CreateResponse(instructions="x" * 20_000),
            said.CreateItem(self._item(chance), after="item_of_nobody"),
            said.CreateItem(_item(AUDIO_PART, AUDIO_PART)),
            said.CreateItem(_item(said.Part(said.PartKind.INPUT_TEXT, "x" * 70_000))),
            said.CommitInput(),
        ]
        if self.view.items:
            there = chance.choice(self.view.items)
            twin = said.Item(there.id, said.Role.USER, said.ItemStatus.COMPLETED)
            verbs.append(said.CreateItem(twin))
            verbs.append(said.TruncateItem(there.id, 0, 10_000_000))
            verbs.append(said.TruncateItem(there.id, 1, 0))
        self.say(chance.choice(verbs))

    def _storm(self) -> None:
        """Much at once: responses begun and cancelled, or more input than anybody hears."""
        self.world.count("storms")
        kind = self.world.random.randrange(5)
        if kind == 0:
            for _ in range(8):
                self.say(said.CreateResponse())
                self.say(said.CancelResponse())
        elif kind == 1:
            for _ in range(12):
                self._append(SPEECH_FRAME)
                self.say(said.CommitInput())
                self.say(said.ClearInput())
        elif kind == 2:
            self.say_all([said.AppendAudio(SILENT_FRAME[:480]) for _ in range(300)])
        elif kind == 3:
            self.say_all([said.CreateResponse(conversation=False) for _ in range(6)])
        else:
            languages = ["de", "en"] * 40
            self.say_all(
                [
                    said.PatchSettings({"audio": {"input": {"transcription": {"language": one}}}})
                    for one in languages
                ]
            )


def _item(*parts: said.Part) -> said.Item:
    """An item without a name."""
    own = [replace(part) for part in parts]
    return said.Item("unnamed", said.Role.USER, said.ItemStatus.COMPLETED, own)
