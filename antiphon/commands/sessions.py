"""`antiphon sessions`: list, show, park, stop and end the sessions of a running gateway."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.table import Table

from antiphon.commands.admin_api import AdminClient, add_admin_options, print_table
from protocol.device_bytes import binary_size

_HEADINGS = {
    "age_s": "age",
    "idle_s": "idle",
    "ends_in_s": "ends in",
    "idle_left_s": "idle left",
    "age_left_s": "age left",
    "grace_left_s": "grace left",
}
_CLOCKS = ("idle_left_s", "age_left_s", "grace_left_s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `antiphon sessions`."""
    parser.description = "List the sessions of a running gateway; show, park, stop or end one."
    add_admin_options(parser)
    actions = parser.add_subparsers(dest="action", metavar="[ACTION]", title="actions")
    every = actions.add_parser("list", help="list all (what happens without an action)")
    add_admin_options(every, again=True)
    for name, summary in (
        ("show", "all that is known of one"),
        ("park", "put the state of one away, where its engines can"),
        ("restore", "bring back what is parked of one, before anybody needs it"),
        ("evict", "end one to make room, if no turn of it is in flight"),
        ("close", "close one now"),
    ):
        action = actions.add_parser(name, help=summary)
        add_admin_options(action, again=True)
        action.add_argument("session", metavar="ID", help="the session's id, sess_...")
    for name, summary in (
        ("stop", "emergency stop: a robot's session stands still at once, whatever runs"),
        ("release", "let it go on"),
    ):
        action = actions.add_parser(name, help=summary)
        add_admin_options(action, again=True)
        which = action.add_mutually_exclusive_group(required=True)
        which.add_argument("session", metavar="ID", nargs="?", help="the session's id, sess_...")
        which.add_argument("--pipeline", metavar="NAME", help="all robots of a pipeline")
        which.add_argument("--all", action="store_true", help="all robots of this gateway")


def run(arguments: argparse.Namespace) -> int:
    """Carry out the action.

    Raises GatewayUnreachable, InvalidRequest (a refused key, no such pipeline), NoSuchSession,
    SessionBusy or NotDone.
    """
    gateway = AdminClient(arguments.url, arguments.key)
    match arguments.action:
        case "show":
            _show(gateway.session(arguments.session), arguments.json)
        case "park":
            _say_parked(arguments, *gateway.park(arguments.session))
        case "restore":
            _say_restored(arguments, *gateway.restore(arguments.session))
        case "stop" | "release":
            _stop(gateway, arguments)
        case "evict":
            gateway.evict(arguments.session)
            _say_closing(arguments)
        case "close":
            gateway.close(arguments.session)
            _say_closing(arguments)
        case _:
            _list(gateway.sessions(), arguments.json)
    return 0


def _say_parked(arguments: argparse.Namespace, stages: list[str], kept: dict[str, str]) -> None:
    if arguments.json:
        print(json.dumps({"id": arguments.session, "parked": stages, "kept": kept}))
        return
    print(f"{arguments.session}: parked {', '.join(stages)}")
    for reason in kept.values():
        print(f"{arguments.session}: {reason}")


def _say_restored(
    arguments: argparse.Namespace, restored: dict[str, str], lost: dict[str, str]
) -> None:
    if arguments.json:
        print(json.dumps({"id": arguments.session, "restored": restored, "lost": lost}))
        return
    stages = [f"{stage} ({origin})" for stage, origin in restored.items()]
    print(f"{arguments.session}: restored {', '.join(stages) or 'nothing'}")
    for stage, reason in lost.items():
        print(f"{arguments.session}: {stage}: {reason}")


def _stop(gateway: AdminClient, arguments: argparse.Namespace) -> None:
    stopped = arguments.action == "stop"
    if arguments.session is not None:
        answer = gateway.stop(arguments.session, stopped)
        sessions = {arguments.session: answer["stopped"]}
    else:
        answer = gateway.stop_robots(arguments.pipeline, stopped)
        touched = answer["pipelines"]
        sessions = {session: stopped for found in touched.values() for session in found}
    if arguments.json:
        print(json.dumps(answer))
        return
    for session, still in sessions.items():
        print(f"{session}: {'stopped' if still else 'released'}")
    for pipeline in answer.get("pipelines", {}):
        print(f"{pipeline}: {'stopped' if stopped else 'released'}, new sessions included")


def _say_closing(arguments: argparse.Namespace) -> None:
    if arguments.json:
        print(json.dumps({"id": arguments.session, "closing": True}))
    else:
        print(f"{arguments.session}: closing")


def _list(sessions: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(sessions, indent=2))
        return
    if not sessions:
        print("no sessions")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    sessions = [_with_the_next_end(session) for session in sessions]
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


def _with_the_next_end(session: dict[str, Any]) -> dict[str, Any]:
    """A session for the list: of its clocks the one that ends it first."""
    known = {name: value for name, value in session.items() if name not in (*_CLOCKS, "noted")}
    clocks = [session[name] for name in _CLOCKS if session.get(name) is not None]
    if len(known) < len(session):
        known["ends_in_s"] = min(clocks, default=None)
    return known


def _show(session: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(session, indent=2))
        return
    known = {name: value for name, value in session.items() if name not in ("noted", "timeline")}
    width = max(map(len, known))
    for name, value in known.items():
        print(f"{_HEADINGS.get(name, name):{width}}  {_cell(name, value)}")
    if (timeline := session.get("timeline")) is not None:
        _print_timeline(timeline)


def _print_timeline(timeline: dict[str, Any]) -> None:
    print("\ntimeline, from the begin of the open")
    if timeline["dropped"]:
        print(f"{'':>13}  ({timeline['dropped']} earlier entries are not kept)")
    for entry in timeline["entries"]:
        details = [
            f"{name.removesuffix('_ms')} {value:.0f} ms"
            if name.endswith("_ms")
            else f"{name} {value}"
            for name, value in entry.items()
            if name not in ("at_ms", "event")
        ]
        event = entry["event"].replace("_", " ")
        print(f"{entry['at_ms'] / 1000:11.3f} s  {event:14}  {', '.join(details)}".rstrip())


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
