"""`antiphon sessions`: the sessions of a running gateway."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from protocol.errors import AntiphonError, InvalidRequest

TIMEOUT_S = 10.0


class GatewayUnreachable(AntiphonError):
    """The gateway did not answer, or not with a list of sessions."""

    code = "gateway_unreachable"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `antiphon sessions`."""
    port = os.environ.get("ANTIPHON_PORT") or "8080"
    parser.add_argument(
        "--url",
        default=f"http://127.0.0.1:{port}",
        help="address of the gateway (default: this machine, ANTIPHON_PORT or 8080)",
    )
    parser.add_argument(
        "--key",
        default=os.environ.get("ANTIPHON_ADMIN_KEY"),
        help="admin key of the gateway (default: the environment's ANTIPHON_ADMIN_KEY)",
    )
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the sessions. Raises GatewayUnreachable or InvalidRequest (a refused key)."""
    sessions = list_sessions(arguments.url, arguments.key)
    if arguments.json:
        print(json.dumps(sessions, indent=2))
        return 0
    console = Console()
    if not sessions:
        console.print("no sessions")
        return 0
    columns = list(dict.fromkeys(key for session in sessions for key in session))
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for session in sessions:
        table.add_row(*(_cell(session.get(column)) for column in columns))
    console.print(table)
    return 0


def list_sessions(url: str, key: str | None) -> list[dict[str, Any]]:
    """The sessions that the gateway at `url` tells an admin of."""
    address = f"{url.rstrip('/')}/v1/admin/sessions"
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.get(address, headers=headers, timeout=TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise GatewayUnreachable(f"no answer from {address}: {error}") from None
    if answer.status_code in (401, 403):
        raise InvalidRequest(
            f"{address} refuses this key: give an admin key with --key or ANTIPHON_ADMIN_KEY"
        )
    if answer.status_code != httpx.codes.OK:
        words = " ".join(answer.text.split())[:200]
        raise GatewayUnreachable(f"{address} answered {answer.status_code}: {words}")
    try:
        sessions = answer.json()["sessions"]
    except (ValueError, KeyError, TypeError):
        raise GatewayUnreachable(f"{address} does not answer like a gateway") from None
    return list(sessions)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value)
