"""`antiphon ledger`: what the workers of a running gateway have reserved, and what they use."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.table import Table

from antiphon.commands.admin_api import AdminClient, add_admin_options, print_table
from protocol.device_bytes import binary_size

_ACCOUNTS = ("budget", "reserved", "engine", "pool", "sessions", "kept", "arena", "free")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `antiphon ledger`."""
    parser.description = (
        "What the workers of a running gateway have reserved of their devices, by account, as "
        "each said within the last second; resident is the memory of its process. Below it what "
        "they use of the processor: the cores that their sessions may count on, those in use, what "
        "one session takes, and the processor time of a turn."
    )
    add_admin_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print every device of every worker, and the processor.

    Raises GatewayUnreachable or InvalidRequest (a refused key).
    """
    workers = AdminClient(arguments.url, arguments.key).workers()
    if arguments.json:
        print(json.dumps(workers, indent=2))
        return 0
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("worker", "device"):
        table.add_column(column, no_wrap=True)
    for column in (*_ACCOUNTS, "resident"):
        table.add_column(column, justify="right")
    for worker in workers:
        for device, held in worker["devices"].items():
            sizes = [_size(held[account]) for account in _ACCOUNTS]
            table.add_row(worker["worker"], device, *sizes, _size(worker["resident_bytes"]))
        if not worker["devices"]:
            table.add_row(worker["worker"], f"({worker['state']})")
    print_table(table)
    print()
    print_table(_processor(workers))
    return 0


def _processor(workers: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("worker", no_wrap=True)
    for column in ("cores", "used", "a session", "a turn"):
        table.add_column(column, justify="right")
    for worker in workers:
        use = worker["compute"]
        cores = "any" if use["cores"] is None else f"{use['cores']:.2f}"
        session = f"{use['session']:.3f}" if use["session"] else "-"
        turn = f"{use['turn_ms']:.1f} ms" if use["turn_ms"] else "-"
        table.add_row(worker["worker"], cores, f"{use['used']:.2f}", session, turn)
    return table


def _size(size_bytes: Any) -> str:
    return "-" if size_bytes is None else binary_size(size_bytes)
