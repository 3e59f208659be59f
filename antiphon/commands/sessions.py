"""`antiphon sessions`: list, show and close the sessions of a running gateway."""

from __future__ import annotations

import argparse
import json
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
_PIPED_COLUMNS = 200

_HEADINGS = {"age_s": "age", "idle_s": "idle"}


class GatewayUnreachable(AntiphonError):
    """The gateway did not answer, or not as a gateway does."""

    code = "gateway_unreachable"


class NoSuchSession(AntiphonError):
    """The gateway has no session of that id."""

    code = "session_not_found"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `antiphon sessions`."""
    parser.description = "List the sessions of a running gateway, show one, or close one."
    add_url(parser)
    parser.add_argument(
        "--key",
        default=os.environ.get("ANTIPHON_ADMIN_KEY"),
        help="admin key of the gateway (default: the environment's ANTIPHON_ADMIN_KEY)",
    )
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    actions = parser.add_subparsers(dest="action", metavar="[ACTION]", title="actions")
    actions.add_parser("list", help="list all (what happens without an action)")
    for name, summary in (("show", "all that is known of one"), ("close", "close one now")):
        action = actions.add_parser(name, help=summary)
        action.add_argument("session", metavar="ID", help="the session's id, sess_...")


def run(arguments: argparse.Namespace) -> int:
    """Carry out the action.

    Raises GatewayUnreachable, InvalidRequest (a refused key) or NoSuchSession.
    """
    gateway = _Gateway(arguments.url, arguments.key)
    match arguments.action:
        case "show":
            _show(gateway.session(arguments.session), arguments.json)
        case "close":
            gateway.close(arguments.session)
            if arguments.json:
                print(json.dumps({"id": arguments.session, "closing": True}))
            else:
                print(f"{arguments.session}: closing")
        case _:
            _list(gateway.sessions(), arguments.json)
    return 0


class _Gateway:
    """The operator's side of a gateway's HTTP API."""

    def __init__(self, url: str, key: str | None) -> None:
        self._base = f"{url.rstrip('/')}/v1/admin/sessions"
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def sessions(self) -> list[dict[str, Any]]:
        """All sessions."""
        answer = self._ask("GET", self._base)
        try:
            return list(answer.json()["sessions"])
        except (ValueError, KeyError, TypeError):
            raise GatewayUnreachable(f"{self._base} does not answer like a gateway") from None

    def session(self, session: str) -> dict[str, Any]:
        """One session. Raises NoSuchSession."""
        address = f"{self._base}/{quote(session, safe='')}"
        try:
            found = self._ask("GET", address, session).json()
        except ValueError:
            found = None
        if not isinstance(found, dict) or "id" not in found:
            raise GatewayUnreachable(f"{address} does not answer like a gateway")
        return found

    def close(self, session: str) -> None:
        """Close a session. Raises NoSuchSession."""
        self._ask("DELETE", f"{self._base}/{quote(session, safe='')}", session)

    def _ask(self, method: str, address: str, session: str | None = None) -> httpx.Response:
        try:
            # A proxy is for other machines.
            proxied = not is_loopback(httpx.URL(address).host)
            answer = httpx.request(
                method, address, headers=self._headers, timeout=TIMEOUT_S, trust_env=proxied
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise GatewayUnreachable(f"no answer from {address}: {error}") from None
        if answer.status_code in (401, 403):
            raise InvalidRequest(
                f"{address} refuses this key: give an admin key with --key or ANTIPHON_ADMIN_KEY"
            )
        if answer.status_code == 404 and session is not None:
            raise NoSuchSession(f"there is no session {session}")
        if not answer.is_success:
            words = " ".join(answer.text.split())[:200]
            raise GatewayUnreachable(f"{address} answered {answer.status_code}: {words}")
        return answer


def _list(sessions: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(sessions, indent=2))
        return
    if not sessions:
        print("no sessions")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = list(dict.fromkeys(key for session in sessions for key in session))
    for column in columns:
        table.add_column(
            _HEADINGS.get(column, column),
            justify="right" if column.endswith("_s") or column in ("epoch", "turns") else "left",
            # An id that is cut cannot be shown or closed.
            no_wrap=column == "id",
        )
    for session in sessions:
        table.add_row(*(_cell(column, session.get(column)) for column in columns))
    Console(width=None if sys.stdout.isatty() else _PIPED_COLUMNS).print(table)


def _show(session: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(session, indent=2))
        return
    width = max(map(len, session))
    for name, value in session.items():
        print(f"{_HEADINGS.get(name, name):{width}}  {_cell(name, value)}")


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name.endswith("_s") and isinstance(value, (int, float)):
        return _duration(value)
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value)


def _duration(seconds: float) -> str:
    """Seconds in words of at most two units."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
