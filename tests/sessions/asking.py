"""A gateway of scripted workers: who asks it for sessions, and what becomes of that."""

from __future__ import annotations

from collections.abc import Callable

from protocol.errors import (
    AntiphonError,
    CapacityExceeded,
    InvalidRequest,
    SessionTooLarge,
    TenantShareExceeded,
)
from sessions.admission import Admission
from sessions.opening import Opening, Position
from sessions.openings import Openings
from sessions.pipeline import Kind, Limits, Pipeline


def pipeline(name: str = "voice", *stages: str, **limits: int) -> Pipeline:
    names = stages or ("think",)
    return Pipeline(name, names, (), {"text": names[-1]}, limits=Limits(**limits), kind=Kind.WORLD)


class Asker:
    """Somebody who asks for a session, and what became of that."""

    def __init__(
        self, it: Gateway, name: str, on_end: Callable[[Asker], None], opening: Opening
    ) -> None:
        self.name = name
        self.on_end = on_end
        self.opening = opening
        self.positions: list[int] = []
        self.estimates: list[int | None] = []
        self.error: AntiphonError | None = None
        self.open = False
        self._it = it

    @property
    def refused(self) -> str | None:
        """The code that it was refused with."""
        return None if self.error is None else self.error.code

    def leaves(self) -> None:
        """It waits no more."""
        self._it.openings.withdraw(self.opening, self._it.now_ms)
        self._it.settle()


class Gateway:
    """What hosts the sessions: each is open as soon as it has been begun, unless a stage of it
    has no room (`rooms`, by stage), and until it `ends`."""

    def __init__(self, **rooms: int) -> None:
        self.now_ms = 0.0
        self.admission = Admission()
        self.victims: list[str] = []
        self.evicted: list[str] = []
        self.openings = Openings(self.admission, self._evict)
        self.rooms = rooms
        self.begun: list[str] = []
        self.askers: dict[str, Asker] = {}
        self.answers = True
        """Whether workers answer at once."""
        self.on_asked: Callable[[Asker], None] | None = None
        """Told of who waits for its workers, instead of their answering at once."""
        self._unanswered: list[Asker] = []
        self._opened: dict[Asker, None] = {}
        self.invalid: set[str] = set()
        self.missing: set[str] = set()
        """Stages without a worker."""
        self.share: set[str] = set()
        """Tenants that have their share of every stage."""

    def ask(
        self,
        name: str,
        spec: Pipeline,
        tenant: str = "t",
        priority: int = 0,
        on_end: Callable[[Asker], None] = lambda _: None,
    ) -> Asker:
        """Somebody asks; `on_end` is told once it is let in or refused."""
        asker: Asker

        def begin() -> None:
            if name in self.invalid:
                raise InvalidRequest("no such voice")
            self.admission.take(spec, tenant, name, self.now_ms)
            self.begun.append(name)
            if self.on_asked is not None:
                self.on_asked(asker)
            else:
                self._unanswered.append(asker)

        def told(position: Position) -> None:
            asker.positions.append(position.position)
            asker.estimates.append(position.estimate_ms)

        def refused(error: AntiphonError) -> None:
            assert asker.error is None
            asker.error = error
            on_end(asker)

        asker = Asker(self, name, on_end, Opening(spec, tenant, priority, begin, told, refused))
        self.askers[name] = asker
        self.openings.ask(asker.opening, self.now_ms)
        self.settle()
        return asker

    def settle(self) -> None:
        """Workers answer what they were asked."""
        while self.answers and self._unanswered:
            self.answer(self._unanswered.pop(0))

    def answer(self, asker: Asker) -> None:
        """The workers of a session answer."""
        spec = asker.opening.pipeline
        for stage in spec.stages:
            room = self.rooms.get(stage)
            held = sum(stage in other.opening.pipeline.stages for other in self._opened)
            error: AntiphonError | None = None
            if stage in self.missing:
                error = CapacityExceeded("no worker is ready", code="engine_unavailable")
            elif asker.opening.tenant in self.share:
                error = TenantShareExceeded("your share is taken")
            elif room is not None and room < 0:
                error = SessionTooLarge("it would never fit")
            elif room is not None and held >= room:
                error = CapacityExceeded(f"no bytes on {stage}")
            if error is not None:
                self._give_back(asker, opened=False)
                self.openings.failed(asker.opening, error, stage, self.now_ms)
                return
        asker.open = True
        self._opened[asker] = None
        self.openings.opened(asker.opening, self.now_ms)
        self.openings.serve(self.now_ms)
        asker.on_end(asker)

    def ends(self, name: str) -> None:
        """A session ends."""
        asker = self.askers[name]
        asker.open = False
        del self._opened[asker]
        self._give_back(asker, opened=True)
        for stage in asker.opening.pipeline.stages:
            self.openings.room_on(stage)
        self.openings.serve(self.now_ms)
        self.settle()

    def waits_until(self, now_ms: float) -> None:
        """Time passes, and what is due is done."""
        while (due := self.openings.deadline_ms) is not None and due <= now_ms:
            self.now_ms = max(self.now_ms, due)
            self.openings.serve(self.now_ms)
            self.settle()
        self.now_ms = now_ms

    def _give_back(self, asker: Asker, *, opened: bool) -> None:
        name = asker.opening.pipeline.name
        self.admission.give_back(name, asker.name, self.now_ms, opened=opened)

    def _evict(self, spec: Pipeline, tenant: str) -> bool:
        if not self.victims:
            return False
        self.evicted.append(self.victims.pop(0))
        return True


def seen(it: Gateway, *lengths_ms: float, name: str = "voice") -> None:
    """Sessions of these lengths have ended before."""
    for length_ms in lengths_ms:
        it.admission.forecast.ended(name, length_ms)
