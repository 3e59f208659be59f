"""Opens that have not become sessions yet: tried in order, made to wait, or refused.

Those of the highest priority come first, then who came first. What one of them lacks (a
place of its pipeline, one of its tenant's, room on a stage) is not given to who comes after it
and needs the same; who needs something else is not held up. Nothing is held while one waits.

Who is refused is promised a place where its time can be foretold (`sessions.promises`).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from itertools import takewhile
from math import ceil

from protocol.errors import (
    AntiphonError,
    CapacityExceeded,
    ErrorKind,
    SessionTooLarge,
    TenantShareExceeded,
)
from sessions.admission import Admission
from sessions.forecast import EXPECTED
from sessions.lack import Lack, of_pipeline, of_stage, of_tenant
from sessions.opening import Opening, Position
from sessions.pipeline import Pipeline
from sessions.promises import Promises, Supply
from sessions.shortages import Shortages

AT_ONCE = 8
"""Sessions of a pipeline whose opens wait that are opened at the same time."""

_OUT_OF_ROOM = frozenset({CapacityExceeded.code, TenantShareExceeded.code})
"""Refusals that end when others give their room up."""


class Openings:
    """All opens of a gateway. Times are monotonic ms.

    `evict(pipeline, tenant)` ends a session that may go to make room for one of this tenant;
    whether there is one.
    """

    def __init__(self, admission: Admission, evict: Callable[[Pipeline, str], bool]) -> None:
        self._admission = admission
        self._evict = evict
        self._openings: list[Opening] = []
        self._shortages = Shortages()
        self.over: AntiphonError | None = None
        """Why nobody is let in any more."""
        self._promises = Promises(admission.forecast)
        self._number = 0
        self._tried_ms = 0.0
        self._serving = False
        self._again = False

    # What is told to it

    def ask(self, opening: Opening, now_ms: float) -> None:
        """Open a session now, wait for it, or refuse it."""
        if self.over is not None:
            opening.on_refused(self.over)
            return
        opening.since_ms = now_ms
        ticket = self._promises.claim(opening.pipeline.name, opening.tenant, now_ms)
        opening.returning = ticket is not None
        opening.number = self._next_number() if ticket is None else ticket
        insort(self._openings, opening, key=lambda known: (-known.priority, known.number))
        self._try(now_ms)
        if (
            opening in self._openings
            and not (opening.trying or opening.evicting)
            and not self._may_wait(opening)
        ):
            self._refuse(opening, now_ms)
        self._tell(now_ms)

    def withdraw(self, opening: Opening, now_ms: float) -> None:
        """Nobody wants it any more; what it is opening is the caller's to close."""
        if opening in self._openings:
            self._remove(opening)
            self.serve(now_ms)

    def opened(self, opening: Opening, now_ms: float) -> None:
        """Its session is open; `serve` lets in who can go on for that."""
        if opening in self._openings:
            attempt = opening.attempt
            assert attempt is not None
            self._remove(opening)
            if opening.returning:
                self._promises.came_true(opening.pipeline.name, kept=True)
            for lack in opening.stages():
                self._shortages.found_some(attempt, lack)
                self._shortages.holds(lack, self._had(lack, now_ms))

    def failed(
        self, opening: Opening, error: AntiphonError, stage: str | None, now_ms: float
    ) -> None:
        """Its session could not be opened, and is gone again; `stage` did not take it."""
        if opening not in self._openings:
            return
        attempt, opening.attempt = opening.attempt, None
        assert attempt is not None
        lack = None if stage is None else of_stage(stage, opening.tenant, error)
        self._shortages.fail(attempt, lack)
        told = error if lack is None or error.kind is not ErrorKind.CAPACITY else _of(lack, error)
        opening.reason = told
        if self.over is not None or not _wants_room(error):
            self._remove(opening)
            opening.on_refused(told)
        else:
            if lack is not None:
                self._shortages.found_none(attempt, lack, error)
                if error.code in _OUT_OF_ROOM:
                    self._shortages.full_with(lack, self._had(lack, now_ms))
                # The stages that were asked before this one had room.
                for other in takewhile(lambda other: other.name != stage, opening.stages()):
                    self._shortages.found_some(attempt, other)
            if now_ms >= opening.until_ms:
                self._refuse(opening, now_ms, told)
            elif lack is not None:
                self._shortages.shut(attempt, lack, now_ms)
        self.serve(now_ms)

    def _had(self, lack: Lack, now_ms: float) -> int:
        """How many sessions have what is lacking for certain: who tries may be refused as well."""
        tries = sum(known.trying and lack in known.needs() for known in self._openings)
        return max(0, len(lack.holders(self._admission, now_ms)) - tries)

    def room_on(self, stage: str, changed: bool = True) -> None:
        """There may be room on `stage` again, because something has `changed` there, or for all
        that is known; to be followed by `serve`."""
        attempts = (known.attempt for known in self._openings)
        self._shortages.heard_of(
            stage, changed, [attempt for attempt in attempts if attempt is not None]
        )

    def close(self, error: AntiphonError) -> None:
        """Refuse all that wait, and whoever comes or fails from now on."""
        self.over = error
        for opening in list(self._openings):
            if not opening.trying:
                self._remove(opening)
                opening.on_refused(error)

    @property
    def deadline_ms(self) -> float | None:
        """When `serve` is due at the latest."""
        waiting = [opening for opening in self._openings if not opening.trying]
        times = [opening.until_ms for opening in waiting]
        if times:
            # A pause that is over lets nobody in whom another stage holds up.
            eager = next((opening for opening in waiting if opening.returning), waiting[0])
            pauses = self._shortages.pauses_ms(eager.returning)
            times += [pause_ms for pause_ms in pauses if pause_ms > self._tried_ms]
            if (expiry_ms := self._promises.deadline_ms) is not None:
                times.append(expiry_ms)
        return min(times, default=None)

    def serve(self, now_ms: float) -> None:
        """Open what there may be room for now, and refuse who has waited too long."""
        if self._serving:
            self._again = True
            return
        self._promises.expire(now_ms)
        for opening in list(self._openings):
            if opening in self._openings and not opening.trying and now_ms >= opening.until_ms:
                self._refuse(opening, now_ms)
        self._try(now_ms)
        self._tell(now_ms)

    # What it tells

    def waiting(self, pipeline: str) -> list[Opening]:
        """The opens of a pipeline that are not sessions yet, in their order."""
        return [known for known in self._openings if known.pipeline.name == pipeline]

    def forks(self, session: str) -> bool:
        """Whether any of them is to begin as this session is."""
        return any(known.fork == session for known in self._openings)

    def __len__(self) -> int:
        return len(self._openings)

    def full(self, pipeline: Pipeline, now_ms: float) -> bool:
        """Whether one more of this pipeline, of a tenant that has none, would have to wait for
        something else than a place, or behind others, as far as is known."""
        another = Opening(
            pipeline, "", pipeline.priority, _nothing, _nothing, _nothing, number=self._number + 1
        )
        others = (known.lack for known in self._openings if known.lack is not None)
        if any(lack in another.needs() for lack in (*others, *self._shortages.unchanged())):
            return True
        return self._lack_beside_places(another, now_ms) is not None

    def why(self, opening: Opening) -> str | None:
        """What an open that waits lacks, in words; None where that is nothing any more."""
        if opening.lack is None:
            return None if opening.reason is None else opening.reason.message
        return self._refusal(opening, opening.lack).message

    def freeze(self, now_ms: float) -> tuple[object, ...]:
        """The canonical state, with times as seen from now."""
        return (
            tuple((o.pipeline.name, o.priority, o.trying, o.evicting) for o in self._openings),
            self._shortages.freeze(),
            self._promises.freeze(now_ms),
        )

    # Trying

    def _try(self, now_ms: float) -> None:
        self._tried_ms = now_ms
        self._serving = True
        try:
            self._again = True
            while self._again:
                self._again = False
                self._try_each(now_ms)
        finally:
            self._serving = False

    def _try_each(self, now_ms: float) -> None:
        lacking: set[Lack] = set()
        for opening in list(self._openings):
            if opening.trying or opening not in self._openings:
                continue
            lack = next((lack for lack in opening.needs() if lack in lacking), None)
            lack = lack or self._lack(opening, now_ms)
            if lack is None:
                self._begin(opening)
                continue
            lacking.add(lack)
            opening.lack = lack
            full = self._admission.lacking(opening.pipeline, opening.tenant) is not None
            if full and not opening.evicting:
                opening.evicting = self._evict(opening.pipeline, opening.tenant)

    def _begin(self, opening: Opening) -> None:
        opening.attempt, opening.lack = self._shortages.begin(opening.stages()), None
        try:
            opening.begin()
        except AntiphonError as error:
            self._remove(opening)
            opening.on_refused(error)

    def _lack(self, opening: Opening, now_ms: float) -> Lack | None:
        """What stands in its way, as far as is known here."""
        pipeline, tenant = opening.pipeline, opening.tenant
        if self._admission.tenant_full(pipeline, tenant):
            return of_tenant(pipeline, tenant)
        if self._admission.held(pipeline.name) >= pipeline.limits.sessions:
            return of_pipeline(pipeline)
        return self._lack_beside_places(opening, now_ms)

    def _lack_beside_places(self, opening: Opening, now_ms: float) -> Lack | None:
        pipeline = opening.pipeline
        if not opening.returning:
            for lack in opening.needs():
                if self._promised(lack, opening, now_ms):
                    return lack
        if opening.queued:
            trying = sum(known.trying for known in self.waiting(pipeline.name))
            if trying >= AT_ONCE:
                return of_pipeline(pipeline)
        shut = self._shortages
        keeps_out = (o for o in opening.stages() if shut.keeps_out(o, opening.returning, now_ms))
        return next(keeps_out, None)

    # Refusing

    def _remove(self, opening: Opening) -> None:
        self._openings.remove(opening)
        if opening.attempt is not None:
            self._shortages.give_up(opening.attempt)

    def _refuse(self, opening: Opening, now_ms: float, error: AntiphonError | None = None) -> None:
        """Refuse it, for the `error` that it has just met or for what stands in its way."""
        self._remove(opening)
        if error is None:
            lack = self._lack(opening, now_ms) or opening.lack or of_pipeline(opening.pipeline)
            error = self._refusal(opening, lack)
        why = error.message
        if opening.told is not None or opening.returning:
            why += f"; this open has waited for {(now_ms - opening.since_ms) / 1000:.1f} s"
        retry_after_ms = None
        if error.code in _OUT_OF_ROOM:
            if opening.returning:
                self._promises.came_true(opening.pipeline.name, kept=False)
            retry_after_ms = self._promise(opening, now_ms)
        opening.on_refused(
            CapacityExceeded(why, field=error.field, code=error.code, retry_after_ms=retry_after_ms)
        )

    def _refusal(self, opening: Opening, lack: Lack) -> AntiphonError:
        """What to say of an open that lacks this."""
        pipeline = opening.pipeline
        full = self._admission.lacking(pipeline, opening.tenant)
        if lack.kind != "stage" and full is not None:
            return CapacityExceeded(full, field="model")
        if lack.kind == "stage" and (said := self._shortages.said(lack)) is not None:
            return _of(lack, said)
        if opening.reason is not None:
            return opening.reason
        what = f"stage {lack.name}: what is free" if lack.kind == "stage" else "what is free"
        return CapacityExceeded(
            f"{what} for pipeline {pipeline.name} is promised to who came before", field="model"
        )

    # Foretelling

    def _may_wait(self, opening: Opening) -> bool:
        """Whether the queue has room for it, beyond those for whom there are places.

        Who waits for a place that its own tenant holds takes no room of others: of those as many
        may wait, of each tenant.
        """
        pipeline, tenant = opening.pipeline, opening.tenant
        if opening.returning:
            return True
        if not opening.queued:
            return False
        others = [known for known in self.waiting(pipeline.name) if known is not opening]
        if self._admission.tenant_full(pipeline, tenant):
            mine = sum(known.tenant == tenant and not known.trying for known in others)
            return mine < pipeline.limits.waiting
        places = 0
        if not any(lack in self._shortages for lack in opening.stages()):
            places = max(0, pipeline.limits.sessions - self._admission.held(pipeline.name))
        ahead = sum(
            not (known.trying or known.evicting)
            and not self._admission.tenant_full(pipeline, known.tenant)
            for known in others
        )
        return ahead < pipeline.limits.waiting + places

    def _supply(self, lack: Lack, opening: Opening, now_ms: float) -> Supply | None:
        """What is known of something that `opening` may lack; None where that is nothing."""
        pipeline, holders = opening.pipeline, lack.holders(self._admission, now_ms)
        capacity: int | None = pipeline.limits.sessions
        if lack.kind == "tenant":
            capacity = pipeline.limits.sessions_per_tenant
        elif lack.kind == "stage":
            capacity = self._shortages.capacity(lack)
        if capacity is None:
            return None
        ahead = [
            known
            for known in self._openings
            if not (known is opening or known.trying or known.evicting) and lack in known.needs()
        ]
        returning = [known.pipeline.name for known in ahead if known.returning]
        return Supply(lack, holders, capacity - len(holders), len(ahead), returning)

    def _promised(self, lack: Lack, opening: Opening, now_ms: float) -> bool:
        """Whether a promise could not be kept if `opening` were let in."""
        if not self._promises.binding(lack, opening.number):
            return False
        supply = self._supply(lack, opening, now_ms)
        name = opening.pipeline.name
        return supply is not None and self._promises.broken(supply, opening.number, name, now_ms)

    def _promise(self, opening: Opening, now_ms: float) -> int | None:
        """In how many ms it would be let in; None where that is not known."""
        supplies = (self._supply(lack, opening, now_ms) for lack in opening.needs())
        known = [supply for supply in supplies if supply is not None]
        number, name = self._next_number(), opening.pipeline.name
        return self._promises.make(known, number, name, opening.tenant, now_ms)

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _tell(self, now_ms: float) -> None:
        """Tell those whose position has changed, with when they may expect to be let in."""
        by_pipeline: dict[str, list[Opening]] = {}
        for opening in self._openings:
            by_pipeline.setdefault(opening.pipeline.name, []).append(opening)
        told: list[tuple[Opening, Position]] = []
        for name, openings in by_pipeline.items():
            changed = [
                (opening, position)
                for position, opening in enumerate(openings, 1)
                if (
                    not opening.trying
                    if opening.told is None
                    else opening.told.position != position
                )
            ]
            if changed:
                estimate = self._estimates(name, now_ms)
                told += [(o, Position(position, estimate(position))) for o, position in changed]
        for opening, position in told:
            opening.told = position
            opening.on_position(position)

    def _estimates(self, pipeline: str, now_ms: float) -> Callable[[int], int | None]:
        """When about the opens of a pipeline are let in, by position."""
        holders = self._admission.holders(now_ms, pipeline=pipeline)
        first_ms = self._admission.forecast.wait_ms(holders, 1, EXPECTED)
        mean_ms = self._admission.forecast.mean_ms(holders)
        if first_ms is None or mean_ms is None:
            return lambda position: None
        each_ms = mean_ms / len(holders)
        return lambda position: ceil(first_ms + (position - 1) * each_ms)


def _of(lack: Lack, error: AntiphonError) -> AntiphonError:
    """What a stage has refused, with its name."""
    return CapacityExceeded(
        f"stage {lack.name}: {error.message}", field=error.field, code=error.code
    )


def _nothing(*_: object) -> None:
    pass


def _wants_room(error: AntiphonError) -> bool:
    """Whether a session may find room later that was refused for `error`."""
    return error.kind is ErrorKind.CAPACITY and error.code != SessionTooLarge.code
