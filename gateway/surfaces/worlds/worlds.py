"""The requests of worlds: `/v1/worlds` and what lies below it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.access import Access
from gateway.hosting import OnPosition, SessionHost
from gateway.http_errors import error_body, error_response, error_status
from gateway.metrics import GatewayMetrics
from gateway.surfaces.native.outputs import limits_out
from gateway.surfaces.opening import OpenAnswer, wants_events
from gateway.surfaces.worlds.documents import DOCUMENTS
from gateway.surfaces.worlds.form import Form, check_kind, form_of
from gateway.surfaces.worlds.pictures import FORMATS, Look, Shot, Studio
from gateway.surfaces.worlds.stepping import Change, Steppers, StepRefused, living
from protocol.errors import AntiphonError, CapacityExceeded, InvalidRequest, NotFound
from protocol.native.frames import ForkedFrom
from protocol.worlds import (
    BatchAnswer,
    BatchAnswers,
    BatchBody,
    BatchEntry,
    EmptyBody,
    OpenWorldBody,
    ResetBody,
    RewindBody,
    StepAnswer,
    StepBody,
    StepFrame,
    WorldBody,
    read_body,
)
from sessions.pipeline import Kind
from sessions.steps.events import Checkpoint, Reset, Restore, Rewind, StepDone

MSGPACK = "application/msgpack"
FULL_RETRY_MS = 1_000
"""When to try again where there is no room, and nobody knows when there will be."""


class Worlds:
    """Open, look at, step, reset and close worlds, each tenant its own."""

    def __init__(
        self, host: SessionHost, access: Access, metrics: GatewayMetrics, studio: Studio
    ) -> None:
        self._host = host
        self._access = access
        self._metrics = metrics
        self._studio = studio
        self._steppers = Steppers(host)

    def routes(self) -> list[Route]:
        """The routes, to be mounted at the root."""
        one = "/v1/worlds/{session}"
        return [
            Route("/v1/worlds", self.open, methods=["POST"]),
            Route("/v1/worlds/schema", self.schema, methods=["GET"]),
            Route("/v1/worlds/asyncapi.json", self.asyncapi, methods=["GET"]),
            Route("/v1/worlds/step", self.step_several, methods=["POST"]),
            Route(one, self.get, methods=["GET"]),
            Route(one, self.close, methods=["DELETE"]),
            Route(f"{one}/step", self.step, methods=["POST"]),
            Route(f"{one}/reset", self.reset, methods=["POST"]),
            Route(f"{one}/checkpoint", self.checkpoint, methods=["POST"]),
            Route(f"{one}/rewind", self.rewind, methods=["POST"]),
            Route(f"{one}/restore", self.restore, methods=["POST"]),
            Route(f"{one}/fork", self.fork, methods=["POST"]),
            Route(f"{one}/close", self.close, methods=["POST"]),
        ]

    async def open(self, request: Request) -> OpenAnswer[WorldBody]:
        """`POST /v1/worlds`: a world that waits for its player for `grace_s`.

        While there is no room for it the answer waits, or says where the open stands.
        """
        with self._refusals_counted():
            tenant = self._access.tenant(request.scope)
            body = read_body(await request.body(), OpenWorldBody)
        return self._opened(request, tenant, body)

    async def fork(self, request: Request) -> OpenAnswer[WorldBody]:
        """`POST /v1/worlds/{id}/fork`: the same for a world that begins as this one is now."""
        with self._refusals_counted():
            session, tenant = self._named(request)
            body = read_body(await request.body(), OpenWorldBody)
            if body.fork is not None:
                raise InvalidRequest("the world is named by the path", field="fork")
        return self._opened(
            request, tenant, msgspec.structs.replace(body, fork=ForkedFrom(session))
        )

    def _opened(self, request: Request, tenant: str, body: OpenWorldBody) -> OpenAnswer[WorldBody]:
        with self._refusals_counted():
            fork = None if body.fork is None else body.fork.session
            if fork is not None:
                self._check_source(fork, tenant, in_body="session" not in request.path_params)
            pipeline = self._pipeline(body.model, fork, tenant)

        async def open_session(on_position: OnPosition) -> WorldBody:
            with self._refusals_counted():
                secret = f"secret_{secrets.token_urlsafe(24)}"
                attachment = await self._host.open(
                    pipeline=pipeline,
                    fork=fork,
                    tenant=tenant,
                    settings_patch=body.settings,
                    limits=msgspec.to_builtins(body.limits),
                    priority=body.priority,
                    secret=secret,
                    on_position=on_position,
                )
                try:
                    return self._describe(attachment.session, tenant, secret)
                except AntiphonError:
                    attachment.close("client")
                    raise

        def undo(opened: WorldBody) -> None:
            self._host.close_session(opened.id, tenant)

        return OpenAnswer(open_session, _created, undo, events=wants_events(request))

    async def get(self, request: Request) -> Response:
        """`GET /v1/worlds/{id}`."""
        session, tenant = self._named(request)
        self._check_lives(session, tenant)
        return _json(self._describe(session, tenant))

    async def close(self, request: Request) -> Response:
        """`DELETE /v1/worlds/{id}` or `POST .../close`: end it, if it has not ended already."""
        session, tenant = self._named(request)
        read_body(await request.body(), EmptyBody)
        if not self._host.ended(session, tenant):
            check_kind(self._host.summary(session, tenant))
        self._host.close_session(session, tenant)
        return Response(status_code=204)

    async def step(self, request: Request) -> Response:
        """`POST /v1/worlds/{id}/step`: so many frames further, exactly once by its number."""
        session, tenant = self._named(request)
        body = read_body(await request.body(), StepBody)
        packed = _wants_msgpack(request)
        try:
            answer = await self._step(session, tenant, body, packed)
        except StepRefused as refused:
            return _refused(refused)
        return _answer(answer, packed)

    async def step_several(self, request: Request) -> Response:
        """`POST /v1/worlds/step`: steps of several worlds, which do not wait for each other."""
        tenant = self._access.tenant(request.scope)
        body = read_body(await request.body(), BatchBody)
        packed = _wants_msgpack(request)
        answers = await asyncio.gather(
            *(self._one_of_several(tenant, entry, packed) for entry in body.worlds)
        )
        return _answer(BatchAnswers(answers), packed)

    async def reset(self, request: Request) -> Response:
        """`POST /v1/worlds/{id}/reset`: begin anew."""
        session, tenant = self._named(request)
        body = read_body(await request.body(), ResetBody)
        return await self._change(session, tenant, lambda ref: Reset(body.settings, ref))

    async def checkpoint(self, request: Request) -> Response:
        """`POST /v1/worlds/{id}/checkpoint`: keep the state as it is."""
        session, tenant = self._named(request)
        read_body(await request.body(), EmptyBody)
        return await self._change(session, tenant, Checkpoint)

    async def rewind(self, request: Request) -> Response:
        """`POST /v1/worlds/{id}/rewind`: go back to a state that was kept."""
        session, tenant = self._named(request)
        body = read_body(await request.body(), RewindBody)
        return await self._change(session, tenant, lambda ref: Rewind(body.step, ref))

    async def restore(self, request: Request) -> Response:
        """`POST /v1/worlds/{id}/restore`: go on from what is stored of a state that is lost."""
        session, tenant = self._named(request)
        read_body(await request.body(), EmptyBody)
        return await self._change(session, tenant, Restore)

    async def schema(self, request: Request) -> Response:
        """`GET /v1/worlds/schema`: every frame and body as JSON Schema."""
        return _json(DOCUMENTS.json_schema)

    async def asyncapi(self, request: Request) -> Response:
        """`GET /v1/worlds/asyncapi.json`: the stream as an AsyncAPI document."""
        return _json(DOCUMENTS.asyncapi)

    async def _change(self, session: str, tenant: str, change: Callable[[str], Change]) -> Response:
        form = self._form(session, tenant)
        try:
            stepper = await self._steppers.of(session, tenant, form)
            return _json(await stepper.change(change))
        except AntiphonError:
            self._check_lives(session, tenant)
            raise

    # Parts of these

    async def _one_of_several(self, tenant: str, entry: BatchEntry, packed: bool) -> BatchAnswer:
        try:
            answer = await self._step(entry.id, tenant, entry, packed)
        except AntiphonError as error:
            committed = error.committed_step if isinstance(error, StepRefused) else None
            return BatchAnswer(entry.id, error_status(error), None, error.info(), committed)
        return BatchAnswer(entry.id, 200, answer)

    async def _step(self, session: str, tenant: str, asked: StepBody, packed: bool) -> StepAnswer:
        form = self._form(session, tenant)
        look = Look(asked.format or ("raw" if packed else "png"), asked.quality).check()
        # Before it takes the world from a player who may come back.
        form.check_rows(asked.actions, asked.frames)
        if asked.scene is not None:
            form.check_scene(asked.scene)
        try:
            stepper = await self._steppers.of(session, tenant, form)
            done = await stepper.step(asked)
        except AntiphonError as refused:
            # What ends with its world is told to be cancelled before that is told to be over.
            self._check_lives(session, tenant)
            if isinstance(refused, StepRefused):
                _say_when(refused)
            raise
        return await self._told(done, look)

    async def _told(self, done: StepDone, look: Look) -> StepAnswer:
        shots = self._studio.shots(done, 0.0)
        pictures = [await _frame(shot, look) for shot in shots]
        return StepAnswer(done.step, done.committed_step, pictures)

    def _named(self, request: Request) -> tuple[str, str]:
        return request.path_params["session"], self._access.tenant(request.scope)

    def _check_lives(self, session: str, tenant: str) -> None:
        living(self._host, session, tenant)

    def _check_source(self, fork: str, tenant: str, *, in_body: bool) -> None:
        """Raise as that for a world to fork, whose name may stand in the body."""
        try:
            self._check_lives(fork, tenant)
        except InvalidRequest as error:
            if in_body:
                error.field = "fork.session"
            raise

    def _form(self, session: str, tenant: str) -> Form:
        self._check_lives(session, tenant)
        return form_of(self._host, self._host.describe(session, tenant), FORMATS)

    def _pipeline(self, model: str | None, fork: str | None, tenant: str) -> str:
        """The pipeline that is meant. Raises NotFound."""
        if model is None and fork is not None:
            return self._host.summary(fork, tenant).pipeline
        worlds = [name for name, it in self._host.pipelines.items() if it.kind is Kind.WORLD]
        if model is None and worlds:
            return worlds[0]
        name = self._host.resolve(model)
        if name not in worlds:
            raise NotFound(f"{name} is no world", field="model", code="model_not_found")
        return name

    @contextmanager
    def _refusals_counted(self) -> Iterator[None]:
        try:
            yield
        except AntiphonError as error:
            self._metrics.open_refused(error.code)
            raise

    def _describe(self, session: str, tenant: str, secret: str | None = None) -> WorldBody:
        known = self._host.describe(session, tenant)
        summary = known.summary
        return WorldBody(
            id=summary.id,
            model=summary.pipeline,
            state=summary.state,
            stream=f"/v1/worlds/{summary.id}/stream",
            world=form_of(self._host, known, FORMATS).capabilities,
            facts=summary.facts,
            settings=known.settings,
            limits=limits_out(known.limits),
            age_s=summary.age_s,
            idle_s=summary.idle_s,
            expires_at_s=known.expires_at_s,
            bytes=summary.bytes,
            secret=secret,
        )


def _say_when(error: AntiphonError) -> None:
    """Who finds no room for a step is told when to come back."""
    if error.code == CapacityExceeded.code and error.retry_after_ms is None:
        error.retry_after_ms = FULL_RETRY_MS


async def _frame(shot: Shot, look: Look) -> StepFrame:
    picture = await shot.picture(look)
    return StepFrame(
        frame=shot.attribute("frame"),
        action_sequence=shot.attribute("action_sequence"),
        denoising_steps=shot.attribute("steps"),
        made_ms=shot.attribute("made_ms", 0.0),
        format=look.format,
        width=picture.width,
        height=picture.height,
        data=picture.data,
        scene=shot.attribute("scene", None),
    )


def _refused(error: StepRefused) -> Response:
    answer = error_response(error)
    body = {**error_body(error), "committed_step": error.committed_step}
    return Response(
        msgspec.json.encode(body),
        answer.status_code,
        {name: answer.headers[name] for name in _RETRY if name in answer.headers},
        media_type="application/json",
    )


_RETRY = ("retry-after", "retry-after-ms")


def _wants_msgpack(request: Request) -> bool:
    accepted = request.headers.get("accept", "")
    return any(part.partition(";")[0].strip() == MSGPACK for part in accepted.split(","))


def _created(body: WorldBody) -> Response:
    answer = _json(body, 201)
    answer.headers["location"] = f"/v1/worlds/{body.id}"
    return answer


def _answer(body: Any, packed: bool) -> Response:
    if not packed:
        return _json(body)
    return Response(
        msgspec.msgpack.encode(body), 200, {"cache-control": "no-store"}, media_type=MSGPACK
    )


def _json(body: Any, status: int = 200) -> Response:
    # What is said here belongs to who asked, and a secret is in one of the answers.
    return Response(
        msgspec.json.encode(body),
        status,
        {"cache-control": "no-store"},
        media_type="application/json",
    )
