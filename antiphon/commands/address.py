"""Where a command finds the gateway when it is not told."""

from __future__ import annotations

import argparse
import os


def add_url(parser: argparse.ArgumentParser, *, again: bool = False) -> None:
    """The option `--url`: by default this machine, at ANTIPHON_PORT or 8080.

    `again` for an action of a command that has the option itself, whose value then stays.
    """
    port = os.environ.get("ANTIPHON_PORT") or "8080"
    parser.add_argument(
        "--url",
        default=argparse.SUPPRESS if again else f"http://127.0.0.1:{port}",
        help="address of the gateway (default: this machine, ANTIPHON_PORT or 8080)",
    )
