"""I6 at every step: the same conversation, given up after 1, 2, 3, ... events."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sessions.duplex import events as said
from tests.simulation.client import Client
from tests.simulation.engine import SPEECH
from tests.simulation.profile import calm
from tests.simulation.schedule import Outcome, Schedule, attempt
from tests.simulation.talker import MANUAL, Talker

LONGEST = 600
"""More events than the conversation has."""


def _close(client: Client) -> None:
    client.close()


def _cancel(client: Client) -> None:
    if client.view.created:
        client.say(said.CancelResponse())
        client.say(said.CreateResponse(output_modalities=("text",)))


def _clear(client: Client) -> None:
    if client.view.created:
        client.say(said.ClearInput())
        client.say(said.AppendAudio(SPEECH * 4_800))
        client.say(said.CommitInput())


WAYS: dict[str, Callable[[Client], None]] = {"close": _close, "cancel": _cancel, "clear": _clear}


def _converse(schedule: Schedule) -> Client:
    """A client that has one conversation: it talks, is answered, and asks for more."""
    world = schedule.world
    client = Talker(schedule.deployment, "gateway-0", "client")
    client.talks = False
    schedule.clients.append(client)
    verbs: list[said.ClientVerb] = [
        said.PatchSettings(MANUAL),
        said.AppendAudio(SPEECH * 4_800),
        said.CommitInput(),
        said.CreateResponse(),
        said.CreateResponse(conversation=False, output_modalities=("text",)),
    ]

    def speak() -> None:
        if client.view.created:
            for verb in verbs:
                client.say(verb)

    def begin() -> None:
        client.open()
        client.later(60.0, speak)

    world.after(1_000.0, begin)
    return client


def sweep(stages: str, way: str, seed: int = 0) -> Iterator[Outcome]:
    """The conversation on a pipeline, given up at every step in one of the WAYS."""
    give_up = WAYS[way]
    for events in range(1, LONGEST):
        schedule = Schedule(seed, calm(stages))
        client = _converse(schedule)
        finished = False

        def play(
            schedule: Schedule = schedule, client: Client = client, events: int = events
        ) -> None:
            nonlocal finished
            schedule.world.run(events)
            finished = bool(client.view.responses) and not client.view.open
            if client.gateway is not None:
                client.gateway.run(lambda: give_up(client))
            schedule.world.run(30)
            schedule.end()

        yield attempt(schedule, play)
        if finished:
            return
