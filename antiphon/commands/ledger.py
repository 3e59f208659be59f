"""`antiphon ledger`: the bytes that the workers of a running gateway have reserved."""

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
        "each said within the last second; resident is the memory of its process."
    )
    add_admin_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print every device of every worker.

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
    return 0


def _size(size_bytes: Any) -> str:
    return "-" if size_bytes is None else binary_size(size_bytes)
