"""The operator's endpoints: `/v1/admin/...`."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.access import Access
from gateway.hosting import SessionHost
from gateway.live import LiveOverview, overview


class AdminApi:
    """Sessions and workers of this gateway, for who has an admin key."""

    def __init__(self, host: SessionHost, access: Access) -> None:
        self._host = host
        self._access = access
        self._live = LiveOverview(host)

    def routes(self) -> list[Route]:
        """The routes, to be mounted at the root."""
        one = "/v1/admin/sessions/{session}"
        return [
            Route("/v1/admin/sessions", self.list_sessions, methods=["GET"]),
            Route(one, self.get_session, methods=["GET"]),
            Route(one, self.close_session, methods=["DELETE"]),
            Route(f"{one}/park", self.park_session, methods=["POST"]),
            Route(f"{one}/restore", self.restore_session, methods=["POST"]),
            Route(f"{one}/evict", self.evict_session, methods=["POST"]),
            Route(f"{one}/cameras", self.cameras, methods=["GET"]),
            Route(f"{one}/stop", self.stop_session, methods=["POST"]),
            Route(f"{one}/release", self.release_session, methods=["POST"]),
            Route("/v1/admin/pipelines/{pipeline}/stop", self.stop_robots, methods=["POST"]),
            Route("/v1/admin/pipelines/{pipeline}/release", self.release_robots, methods=["POST"]),
            Route("/v1/admin/robots/stop", self.stop_robots, methods=["POST"]),
            Route("/v1/admin/robots/release", self.release_robots, methods=["POST"]),
            Route("/v1/admin/waiting", self.list_waiting, methods=["GET"]),
            Route("/v1/admin/workers", self.list_workers, methods=["GET"]),
            Route("/v1/admin/overview", self.overview, methods=["GET"]),
            Route("/v1/admin/live", self.live, methods=["GET"]),
        ]

    async def list_sessions(self, request: Request) -> Response:
        """`GET /v1/admin/sessions`."""
        self._access.check_admin(request.scope)
        return _json({"sessions": self._host.sessions()})

    async def get_session(self, request: Request) -> Response:
        """`GET /v1/admin/sessions/{id}`: with its timeline."""
        self._access.check_admin(request.scope)
        history = self._host.history(request.path_params["session"])
        return _json({**msgspec.to_builtins(history.summary), "timeline": history.timeline})

    async def close_session(self, request: Request) -> Response:
        """`DELETE /v1/admin/sessions/{id}`: close it now."""
        self._access.check_admin(request.scope)
        session = request.path_params["session"]
        self._host.close_session(session)
        return _json({"id": session, "closing": True}, 202)

    async def park_session(self, request: Request) -> Response:
        """`POST /v1/admin/sessions/{id}/park`: put its state away; the answer comes when it is."""
        self._access.check_admin(request.scope)
        session = request.path_params["session"]
        stages, kept = await self._host.park_session(session)
        return _json({"id": session, "parked": stages, "kept": kept})

    async def restore_session(self, request: Request) -> Response:
        """`POST /v1/admin/sessions/{id}/restore`: bring back what is parked of it; the answer
        comes when it is."""
        self._access.check_admin(request.scope)
        session = request.path_params["session"]
        restored, lost = await self._host.restore_session(session)
        return _json({"id": session, "restored": restored, "lost": lost})

    async def evict_session(self, request: Request) -> Response:
        """`POST /v1/admin/sessions/{id}/evict`: end it to make room, if no turn is in flight."""
        self._access.check_admin(request.scope)
        session = request.path_params["session"]
        self._host.evict_session(session)
        return _json({"id": session, "closing": True}, 202)

    async def cameras(self, request: Request) -> Response:
        """`GET /v1/admin/sessions/{id}/cameras`: what a robot's cameras saw last."""
        self._access.check_admin(request.scope)
        answer = _json(await self._host.seen(request.path_params["session"]))
        answer.headers["cache-control"] = "no-store"
        return answer

    async def stop_session(self, request: Request) -> Response:
        """`POST /v1/admin/sessions/{id}/stop`: a robot's stands still at once, whatever runs."""
        return self._stop_session(request, True)

    async def release_session(self, request: Request) -> Response:
        """`POST /v1/admin/sessions/{id}/release`: it goes on, if its
        pipeline does."""
        return self._stop_session(request, False)

    async def stop_robots(self, request: Request) -> Response:
        """`POST /v1/admin/pipelines/{name}/stop`, or `/v1/admin/robots/stop` for all: those that
        come later stand still as well."""
        return self._stop_robots(request, True)

    async def release_robots(self, request: Request) -> Response:
        """`POST /v1/admin/pipelines/{name}/release`, or `/v1/admin/robots/release` for all: what
        was stopped otherwise stands still."""
        return self._stop_robots(request, False)

    def _stop_session(self, request: Request, stopped: bool) -> Response:
        self._access.check_admin(request.scope)
        session = request.path_params["session"]
        return _json({"session": session, "stopped": self._host.stop_session(session, stopped)})

    def _stop_robots(self, request: Request, stopped: bool) -> Response:
        self._access.check_admin(request.scope)
        touched = self._host.stop_robots(request.path_params.get("pipeline"), stopped)
        return _json({"stopped": stopped, "pipelines": touched})

    async def list_waiting(self, request: Request) -> Response:
        """`GET /v1/admin/waiting`: the opens that wait for a place."""
        self._access.check_admin(request.scope)
        return _json({"waiting": self._host.waiting()})

    async def list_workers(self, request: Request) -> Response:
        """`GET /v1/admin/workers`."""
        self._access.check_admin(request.scope)
        return _json({"workers": self._host.workers()})

    async def overview(self, request: Request) -> Response:
        """`GET /v1/admin/overview`: all that operators see."""
        self._access.check_admin(request.scope)
        return _json(overview(self._host))

    async def live(self, request: Request) -> Response:
        """`GET /v1/admin/live`: the overview whenever it changes, as server-sent events."""
        self._access.check_admin(request.scope)
        return self._live.stream(body=request.method != "HEAD")


def _json(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
