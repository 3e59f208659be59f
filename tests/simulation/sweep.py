"""I6 at every step: the same conversation, given up after 1, 2, 3, ... events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from sessions.duplex import events as said
from sessions.steps.events import Step
from tests.simulation.client import Client
from tests.simulation.engine import SPEECH
from tests.simulation.profile import calm, loop_of
from tests.simulation.rollout import Rollout
from tests.simulation.schedule import Outcome, Schedule, attempt
from tests.simulation.steps import actions
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


def _fork(schedule: Schedule) -> tuple[Rollout, Rollout]:
    """A client that plays, and one whose session begins as that one's is in a step."""
    first, second = (Rollout(schedule.deployment, "gateway-0", name) for name in ("one", "two"))
    schedule.clients += [first, second]
    for client in (first, second):
        client.talks = False

    def play() -> None:
        if first.view.created:
            first.say(Step(1, [actions(1)]))
            second.source = first.session
            second.open()

    def go_on() -> None:
        if second.view.created:
            second.say(Step(second.committed + 1, [actions(3)]))

    def begin() -> None:
        first.open()
        first.later(60.0, play)
        first.later(900.0, go_on)

    schedule.world.after(1_000.0, begin)
    return first, second


def sweep_forks(stages: str, gone: str, seed: int = 0) -> Iterator[Outcome]:
    """A fork on a pipeline, which is given up at every step, or whose source ends then."""
    for events in range(1, LONGEST):
        schedule = Schedule(seed, replace(calm(), pipeline=loop_of(stages)))
        first, second = _fork(schedule)
        finished = False

        def play(
            schedule: Schedule = schedule,
            clients: tuple[Rollout, Rollout] = (first, second),
            events: int = events,
        ) -> None:
            nonlocal finished
            schedule.world.run(events)
            first, second = clients
            finished = second.committed > 1 and not second.pending()
            client = second if gone == "fork" else first
            if client.gateway is not None:
                client.gateway.run(client.close)
            schedule.world.run(30)
            schedule.end()

        yield attempt(schedule, play)
        if finished:
            return


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
