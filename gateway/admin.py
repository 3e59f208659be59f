"""The operator's endpoints: `/v1/admin/...`."""

from __future__ import annotations

from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.access import Access
from gateway.hosting import SessionHost


class AdminApi:
    """Sessions and workers of this gateway, for who has an admin key."""

    def __init__(self, host: SessionHost, access: Access) -> None:
        self._host = host
        self._access = access

    def routes(self) -> list[Route]:
        """The routes, to be mounted at the root."""
        return [
            Route("/v1/admin/sessions", self.list_sessions, methods=["GET"]),
            Route("/v1/admin/sessions/{session}", self.get_session, methods=["GET"]),
            Route("/v1/admin/sessions/{session}", self.close_session, methods=["DELETE"]),
            Route("/v1/admin/sessions/{session}/park", self.park_session, methods=["POST"]),
            Route("/v1/admin/sessions/{session}/restore", self.restore_session, methods=["POST"]),
            Route("/v1/admin/waiting", self.list_waiting, methods=["GET"]),
            Route("/v1/admin/workers", self.list_workers, methods=["GET"]),
        ]

    async def list_sessions(self, request: Request) -> Response:
        """`GET /v1/admin/sessions`."""
        self._access.check_admin(request.scope)
        return JSONResponse({"sessions": [asdict(entry) for entry in self._host.sessions()]})

    async def get_session(self, request: Request) -> Response:
        """`GET /v1/admin/sessions/{id}`."""
        self._access.check_admin(request.scope)
        return JSONResponse(asdict(self._host.summary(request.path_params["session"], None)))

    async def close_session(self, request: Request) -> Response:
        """`DELETE /v1/admin/sessions/{id}`: close it now."""
        self._access.check_admin(request.scope)
        session = request.path_params["session"]
        self._host.close_session(session)
        return JSONResponse({"id": session, "closing": True}, status_code=202)

    async def park_session(self, request: Request) -> Response:
        """`POST /v1/admin/sessions/{id}/park`: put its state away, where that can be done now."""
        self._access.check_admin(request.scope)
        session = request.path_params["session"]
        stages = self._host.park_session(session)
        return JSONResponse({"id": session, "parked": stages}, status_code=202)

    async def restore_session(self, request: Request) -> Response:
        """`POST /v1/admin/sessions/{id}/restore`: bring back what is parked of it."""
        self._access.check_admin(request.scope)
        session = request.path_params["session"]
        stages = self._host.restore_session(session)
        return JSONResponse({"id": session, "restored": stages}, status_code=202)

    async def list_waiting(self, request: Request) -> Response:
        """`GET /v1/admin/waiting`: the opens that wait for a place."""
        self._access.check_admin(request.scope)
        return JSONResponse({"waiting": [asdict(entry) for entry in self._host.waiting()]})

    async def list_workers(self, request: Request) -> Response:
        """`GET /v1/admin/workers`."""
        self._access.check_admin(request.scope)
        return JSONResponse({"workers": [asdict(entry) for entry in self._host.workers()]})
