"""`antiphon sessions`: list, show and close the sessions of a running gateway."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.table import Table

from antiphon.commands.admin_api import AdminClient, add_admin_options, print_table
from protocol.device_bytes import binary_size

_HEADINGS = {"age_s": "age", "idle_s": "idle"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `antiphon sessions`."""
    parser.description = "List the sessions of a running gateway; show, park or close one."
    add_admin_options(parser)
    actions = parser.add_subparsers(dest="action", metavar="[ACTION]", title="actions")
    actions.add_parser("list", help="list all (what happens without an action)")
    for name, summary in (
        ("show", "all that is known of one"),
        ("park", "put the state of one away, where its engines can"),
        ("restore", "bring back what is parked of one, before anybody needs it"),
        ("close", "close one now"),
    ):
        action = actions.add_parser(name, help=summary)
        action.add_argument("session", metavar="ID", help="the session's id, sess_...")


def run(arguments: argparse.Namespace) -> int:
    """Carry out the action.

    Raises GatewayUnreachable, InvalidRequest (a refused key), NoSuchSession or SessionBusy.
    """
    gateway = AdminClient(arguments.url, arguments.key)
    match arguments.action:
        case "show":
            _show(gateway.session(arguments.session), arguments.json)
        case "park":
            _say(arguments, "parked", gateway.park(arguments.session))
        case "restore":
            _say(arguments, "restored", gateway.restore(arguments.session))
        case "close":
            gateway.close(arguments.session)
            if arguments.json:
                print(json.dumps({"id": arguments.session, "closing": True}))
            else:
                print(f"{arguments.session}: closing")
        case _:
            _list(gateway.sessions(), arguments.json)
    return 0


def _say(arguments: argparse.Namespace, what: str, stages: list[str]) -> None:
    if arguments.json:
        print(json.dumps({"id": arguments.session, what: stages}))
    else:
        print(f"{arguments.session}: {what} {', '.join(stages) or 'nothing'}")


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
        shown = {**session}
        if (by_stage := session.get("bytes")) is not None:
            shown["bytes"] = binary_size(sum(sum(held.values()) for held in by_stage.values()))
        table.add_row(*(_cell(column, shown.get(column)) for column in columns))
    print_table(table)


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
    if name == "parked":
        return ", ".join(value) or "-"
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value)


def _duration(seconds: float) -> str:
    """Seconds in words of at most two units."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
