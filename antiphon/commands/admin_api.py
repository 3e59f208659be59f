"""What commands for operators ask of a running gateway: its admin API."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any
from urllib.parse import quote

import httpx
from rich.console import Console
from rich.table import Table

from antiphon.commands.address import add_url
from protocol.addresses import is_loopback
from protocol.errors import AntiphonError, InvalidRequest

TIMEOUT_S = 10.0
PARK_S = 600.0
"""How long a large state may take on its way into the store."""
_PIPED_COLUMNS = 200


class GatewayUnreachable(AntiphonError):
    """The gateway did not answer, or not as a gateway does."""

    code = "gateway_unreachable"


class SessionBusy(AntiphonError):
    """The session cannot be parked, or evicted, now."""

    code = "session_busy"


class NotDone(AntiphonError):
    """The gateway could not do what was asked of it with the session."""

    code = "not_done"


class NoSuchSession(AntiphonError):
    """The gateway has no session of that id."""

    code = "session_not_found"


def add_admin_options(parser: argparse.ArgumentParser, *, again: bool = False) -> None:
    """Where the gateway is, the key for it, and the form of the answer.

    `again` for an action of a command that has these options itself: either place will do.
    """
    add_url(parser, again=again)
    parser.add_argument(
        "--key",
        default=argparse.SUPPRESS if again else os.environ.get("ANTIPHON_ADMIN_KEY"),
        help="admin key of the gateway (default: the environment's ANTIPHON_ADMIN_KEY)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        default=argparse.SUPPRESS if again else False,
        help="print the answer as JSON",
    )


class AdminClient:
    """A gateway as its operator sees it.

    Its methods raise GatewayUnreachable, and InvalidRequest for a key that is refused.
    """

    def __init__(self, url: str, key: str | None) -> None:
        self._base = f"{url.rstrip('/')}/v1/admin"
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def sessions(self) -> list[dict[str, Any]]:
        """All sessions."""
        return self._all("sessions")

    def workers(self) -> list[dict[str, Any]]:
        """All workers."""
        return self._all("workers")

    def session(self, session: str) -> dict[str, Any]:
        """One session. Raises NoSuchSession."""
        address = f"{self._base}/sessions/{quote(session, safe='')}"
        try:
            found = self._ask("GET", address, session).json()
        except ValueError:
            found = None
        if not isinstance(found, dict) or "id" not in found:
            raise GatewayUnreachable(f"{address} does not answer like a gateway")
        return found

    def park(self, session: str) -> tuple[list[str], dict[str, str]]:
        """Put a session's state away: the stages where it is, and why it is not at others.

        Raises NoSuchSession, SessionBusy, and NotDone where it could be put away nowhere.
        """
        answer = self._command(session, "park", PARK_S)
        return list(answer["parked"]), dict(answer["kept"])

    def restore(self, session: str) -> tuple[dict[str, str], dict[str, str]]:
        """Have a session's state brought back: where it is from by stage, and why the others have
        nothing of it.

        Raises NoSuchSession, and NotDone where it came back nowhere.
        """
        answer = self._command(session, "restore", PARK_S)
        return dict(answer["restored"]), dict(answer["lost"])

    def evict(self, session: str) -> None:
        """End a session to make room. Raises NoSuchSession or SessionBusy."""
        self._command(session, "evict")

    def stop(self, session: str, stopped: bool) -> dict[str, Any]:
        """Have a robot's session stand still, or go on: its `session` and whether it is `stopped`.

        Raises NoSuchSession, and NotDone for one that is no robot's.
        """
        return self._command(session, "stop" if stopped else "release")

    def stop_robots(self, pipeline: str | None, stopped: bool) -> dict[str, Any]:
        """The same for all of a pipeline, or of all: the sessions in `pipelines` by name.

        Raises InvalidRequest where there is no such robot pipeline.
        """
        which = "robots" if pipeline is None else f"pipelines/{quote(pipeline, safe='')}"
        address = f"{self._base}/{which}/{'stop' if stopped else 'release'}"
        return self._answer(address)

    def _command(self, session: str, name: str, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        address = f"{self._base}/sessions/{quote(session, safe='')}/{name}"
        return self._answer(address, session, timeout_s)

    def _answer(
        self, address: str, session: str | None = None, timeout_s: float = TIMEOUT_S
    ) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = self._ask("POST", address, session, timeout_s).json()
        except ValueError:
            raise GatewayUnreachable(f"{address} does not answer like a gateway") from None
        return answer

    def close(self, session: str) -> None:
        """Close a session. Raises NoSuchSession."""
        self._ask("DELETE", f"{self._base}/sessions/{quote(session, safe='')}", session)

    def _all(self, what: str) -> list[dict[str, Any]]:
        address = f"{self._base}/{what}"
        try:
            return list(self._ask("GET", address).json()[what])
        except (ValueError, KeyError, TypeError):
            raise GatewayUnreachable(f"{address} does not answer like a gateway") from None

    def _ask(
        self,
        method: str,
        address: str,
        session: str | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> httpx.Response:
        try:
            # A proxy is for other machines.
            proxied = not is_loopback(httpx.URL(address).host)
            timeout = httpx.Timeout(TIMEOUT_S, read=timeout_s)
            answer = httpx.request(
                method, address, headers=self._headers, timeout=timeout, trust_env=proxied
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise GatewayUnreachable(f"no answer from {address}: {error}") from None
        if answer.status_code in (401, 403):
            raise InvalidRequest(
                f"{address} refuses this key: give an admin key with --key or ANTIPHON_ADMIN_KEY"
            )
        if answer.status_code == 404 and session is not None:
            raise NoSuchSession(f"there is no session {session}")
        reason = _reason(answer)
        if session is not None and reason is not None:
            refused = SessionBusy if answer.status_code == 409 else NotDone
            raise refused(f"{session}: {reason}")
        if reason is not None and answer.status_code in (400, 404):
            raise InvalidRequest(reason)
        if not answer.is_success:
            words = " ".join(answer.text.split())[:200]
            raise GatewayUnreachable(f"{address} answered {answer.status_code}: {words}")
        return answer


def _reason(answer: httpx.Response) -> str | None:
    """Why the gateway refused something, in its own words; None: no gateway has."""
    if answer.is_success:
        return None
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return None


def print_table(table: Table) -> None:
    """As wide as the terminal, or as wide as it needs to be for a file."""
    Console(width=None if sys.stdout.isatty() else _PIPED_COLUMNS).print(table)
