"""A client's way to its session: one attachment after the other, and what came over each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from protocol.errors import ErrorInfo
from sessions.actions import (
    AttachRefused,
    AttachRequested,
    ClientBlocked,
    ClientHas,
    ClientSaid,
    Detached,
)
from sessions.client import Attached, LetGo, Role
from sessions.duplex import events as said
from sessions.lifecycle import State

if TYPE_CHECKING:
    from tests.simulation.client import Client

AWAY_MS = (1.0, 300.0, 2_500.0, 5_000.0, 5_000.0, 9_000.0)
"""How long a client that was cut off stays away; the last is longer than its grace."""
UNSEEN_MS = (0.0, 0.0, 40.0, 1_500.0)
"""How long nobody notices that a client is gone."""


REUSED = frozenset({"secret_reused"})
GUESSED = frozenset({"resume_refused"})
CANNOT = frozenset({"invalid_value"})
AT_ONCE = REUSED | GUESSED


@dataclass(eq=False)
class Attachment:
    """One attachment, from when it is asked for.

    `following` is the number of the output that must come next, None before the client is
    attached. `refusable`: the codes with which it may be refused, None for those that any
    client may meet.
    """

    name: str
    role: Role
    cursor: int | None = None
    secret: str | None = None
    new_secret: str = ""
    following: int | None = None
    attached: Attached | None = None
    refusable: frozenset[str] | None = None
    refused: ErrorInfo | None = None
    let_go: str | None = None
    unwelcome: bool = False
    """Whether it must not be let in."""
    dead: bool = False
    """Whether nothing of what is sent reaches anybody."""


class Line:
    """All attachments of one client. It speaks over `current`, and knows its session's
    outputs up to number `has`."""

    def __init__(self, client: Client, resumable: bool) -> None:
        self.attachments: dict[str, Attachment] = {}
        self.current: Attachment | None = None
        self.secret: str | None = f"secret-of-{client.name}" if resumable else None
        self.resumable = resumable
        self.opens_apart = resumable and client.world.chance(0.15)
        """Whether it asks for its session first and comes to it later."""
        self.has = 0
        self.acknowledged = 0
        self.left_ms: float | None = None
        """Since when, by its gateway's clock, nobody controls the session."""
        self._retired: str | None = None
        self._spoken = False
        self._client = client
        self._world = client.world
        self._number = 0

    def opens(self) -> None:
        """The session is opened over the first attachment, or without one."""
        if self.opens_apart:
            self._world.count("sessions opened apart")
            self._return_later()
            return
        first = Attachment(self._client.name, Role.CONTROLLER, following=1)
        self.attachments[first.name] = self.current = first

    # What comes

    def told(self, sequence: int, output: Any, to: str | None) -> None:
        """An output leaves the session, for one attachment or for all."""
        watch = self._client.watch
        if to is not None:
            if (attachment := self.attachments.get(to)) is not None:
                watch.delivered(self._client, attachment, sequence, output)
                self._took(attachment, sequence, output)
            return
        for attachment in list(self.attachments.values()):
            if attachment.following is not None:
                watch.delivered(self._client, attachment, sequence, output)
                self._took(attachment, sequence, output)

    def _took(self, attachment: Attachment, sequence: int, output: Any) -> None:
        if isinstance(output, Attached):
            self._attached(attachment, output)
        elif isinstance(output, LetGo):
            self._let_go(attachment, output)
        elif attachment.following is not None:
            if sequence >= attachment.following:
                attachment.following = sequence + 1
            if attachment is self.current and not attachment.dead:
                self.has = max(self.has, sequence)

    def _attached(self, attachment: Attachment, about: Attached) -> None:
        attachment.attached = about
        lost = about.lost
        first = about.sequence if attachment.cursor is None else attachment.cursor
        attachment.following = (first if lost is None else lost[1]) + 1
        if attachment.role is Role.OBSERVER:
            return
        world = self._world
        self.left_ms = None
        self._spoken = False
        if attachment.cursor is None:
            self.has = about.sequence
        self.current = attachment
        self._client.blocked_ms = None
        if world.chance(0.2) and self._client.talks:
            # The answer is lost: only what it came with is known to be good.
            world.count("answers to an attach lost")
            self.secret = attachment.secret
            self._vanish()
            return
        if attachment.secret is None and self.secret is not None:
            self._retired = self.secret
        self.secret = about.secret
        self._client.back()

    def _let_go(self, attachment: Attachment, last_word: LetGo) -> None:
        attachment.let_go = last_word.reason
        self.attachments.pop(attachment.name, None)
        if attachment is self.current:
            self.current = None
            if last_word.reason == "stalled":
                self._return_later()

    def refused(self, action: AttachRefused) -> None:
        """An attachment that was asked for is not had."""
        attachment = self.attachments.pop(action.attachment, None)
        if attachment is None:
            return
        attachment.refused = action.error
        self._client.watch.attach_refused(self._client, attachment, action.error)
        if attachment.secret is not None and attachment.secret == self.secret:
            self.secret = None

    # What goes

    def say(self, verb: said.ClientVerb, command: str | None = None) -> bool:
        """Hand a verb over; whether there is an attachment for that."""
        if self.current is None:
            return False
        self._confirmed()
        self._client.handle(ClientSaid(verb, self.current.name, command))
        return True

    def acknowledge(self) -> None:
        """Say what has come."""
        if self.current is not None and self.resumable:
            self._confirmed()
            self.acknowledged = self.has
            self._client.handle(ClientHas(self.current.name, self.has))

    def blocked(self, blocked: bool) -> None:
        """The client does not read, or reads again."""
        if self.current is not None:
            self._client.handle(ClientBlocked(blocked, self.current.name))

    def _confirmed(self) -> None:
        """The first word on an attachment: the secret before this one is good no more."""
        current = self.current
        if current is not None and current.attached is not None and not self._spoken:
            self._spoken = True
            if current.secret is not None:
                self._retired = current.secret

    # Coming and going

    def vanish(self) -> None:
        """Be cut off, and come back after a while."""
        if self.current is not None:
            self._world.count("clients cut off")
            self._vanish()

    def _vanish(self) -> None:
        client, attachment = self._client, self.current
        assert attachment is not None
        self.current = None
        attachment.dead = True
        client.blocked_ms = None
        unseen_ms = self._world.random.choice(UNSEEN_MS)
        if unseen_ms:
            self._world.count("clients gone unseen for a while")
        client.later(unseen_ms, lambda: self.leave(attachment))
        self._return_later()

    def leave(self, attachment: Attachment) -> None:
        """Its gateway sees that an attachment is gone."""
        # One that opened a session which was refused has the name of the next one that opens.
        if self.attachments.get(attachment.name) is attachment:
            del self.attachments[attachment.name]
            self._client.handle(Detached(attachment.name))

    def _return_later(self) -> None:
        if self.resumable:
            self._client.later(self._world.random.choice(AWAY_MS), self._return)

    def _return(self) -> None:
        client, world = self._client, self._world
        if self.current is None and not client.over and client.view.ended is not None:
            # It was away when its session ended.
            self._ask(self.has, self.secret, refusable=frozenset())
        if not self._wanted():
            return
        if not client.view.created or any(a.following is None for a in self._arriving()):
            client.later(1_000.0, self._return)
            return
        if client.session_state is State.DETACHED:
            world.count("clients back at a session left alone")
        if self.secret is None or world.chance(0.15):
            world.count("takeovers without the secret")
            self._ask(cursor=world.random.choice([None, 0, self.has]), secret=None)
        elif world.chance(0.2):
            world.count("two come at once")
            secret = self.secret
            for _ in range(world.random.choice([2, 2, 6])):
                self._ask(self.has, secret, refusable=AT_ONCE)
        else:
            self._ask(self.has, self.secret)
        client.later(6_000.0, self._again)

    def _again(self) -> None:
        """Where the first attempt came to nothing."""
        if self._wanted():
            self._return()

    def _arriving(self) -> list[Attachment]:
        """Attachments that were asked for, and are waited for."""
        return [a for a in self.attachments.values() if not a.dead]

    def _wanted(self) -> bool:
        client = self._client
        return self.current is None and not client.over and client.view.ended is None

    def take_over(self) -> None:
        """Another device of the same client takes the session, which has missed everything."""
        if self.resumable and self.current is not None:
            self._world.count("takeovers without the secret")
            self._ask(self._world.random.choice([None, 0]), None)

    def intrude(self) -> None:
        """Somebody comes with a secret that is not good, or to what nobody can come to."""
        world = self._world
        if not self.resumable:
            role = world.random.choice([Role.CONTROLLER, Role.OBSERVER])
            self._ask(None, None, role=role, refusable=CANNOT, unwelcome=True)
        elif world.chance(0.2):
            cursor = self._client.last_sequence + 1
            self._ask(cursor, self.secret, refusable=CANNOT, unwelcome=True)
        elif self._retired is not None and self._world.chance(0.7):
            # One that was replaced long ago is not remembered any more.
            self._ask(self.has, self._retired, refusable=AT_ONCE, unwelcome=True)
        else:
            self._ask(self.has, "a guess", refusable=GUESSED, unwelcome=True)

    def observe(self) -> None:
        """Somebody looks on: reads nothing, may say something, and goes. Or very many do."""
        if not self.resumable:
            return
        for _ in range(20 if self._world.chance(0.05) else 1):
            self._observe()

    def _observe(self) -> None:
        world, client = self._world, self._client
        cursor = world.random.choice([None, 0, self.has])
        attachment = self._ask(cursor, None, role=Role.OBSERVER)
        world.count("observers")

        def speak() -> None:
            if attachment.name in self.attachments:
                client.handle(ClientSaid(client.a_verb(), attachment.name))

        if world.chance(0.5):
            client.later(200.0, speak)
        client.later(world.random.choice([100.0, 4_000.0]), lambda: self.leave(attachment))

    def _ask(
        self,
        cursor: int | None,
        secret: str | None,
        *,
        role: Role = Role.CONTROLLER,
        refusable: frozenset[str] | None = None,
        unwelcome: bool = False,
    ) -> Attachment:
        self._number += 1
        name = f"{self._client.name}-{self._number}"
        new_secret = f"secret-{name}"
        attachment = Attachment(
            name, role, cursor, secret, new_secret, refusable=refusable, unwelcome=unwelcome
        )
        self.attachments[name] = attachment
        self._world.note(self._client.name, f"asks for {name}: {role}, {cursor}, {secret}")
        self._client.handle(AttachRequested(name, role, cursor, secret, new_secret))
        going = role is Role.CONTROLLER and not unwelcome and self._world.chance(0.05)
        if going and name in self.attachments:
            # Gone before it was let in.
            attachment.dead = True
            if attachment is self.current or secret is None:
                self.secret = secret
            if attachment is self.current:
                self.current = None
            self.leave(attachment)
            self._return_later()
        return attachment
