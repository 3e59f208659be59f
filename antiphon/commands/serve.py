"""`antiphon serve`: check the config, then become the supervisor."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from protocol.config import check_binding, read_config
from workers.check import check_machine, check_stages


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `antiphon serve`. What is not given is left to the config."""
    parser.add_argument(
        "-c", "--config", type=Path, required=True, metavar="FILE", help="the deployment's config"
    )
    parser.add_argument(
        "--port",
        type=_port,
        default=os.environ.get("ANTIPHON_PORT") or None,
        help="port to listen on (default: the environment's ANTIPHON_PORT, then the config's)",
    )
    parser.add_argument("--host", help="address to listen on")
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="allow an address that other machines reach without any keys",
    )
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate chain (PEM)")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key (PEM)")


def run(arguments: argparse.Namespace) -> int:
    """Replace this process by the supervisor. Raises ConfigError if the config is unusable."""
    file = read_config(arguments.config)
    given = {
        name: value
        for name in ("host", "port", "tls_cert", "tls_key")
        if (value := getattr(arguments, name)) is not None
    }
    gateway = file.config.gateway.model_copy(update=given)
    check_binding(gateway, insecure=arguments.insecure)
    if gateway.tls_cert is not None:
        # The gateway would find out, after the models have been loaded for nothing.
        from gateway.server import check_tls

        check_tls(gateway.tls_cert, gateway.tls_key)
    check_stages(file)
    check_machine(file)
    # -P: a file of the working directory must not pass for a module of ours.
    command = [sys.executable, "-P", "-m", "workers.supervisor", "-c", str(arguments.config)]
    for name, value in given.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    if arguments.insecure:
        command.append("--insecure")
    sys.stdout.flush()
    os.execv(sys.executable, command)


def _port(text: str) -> int:
    try:
        port = int(text)
    except ValueError:
        port = -1
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (0 to 65535)")
    return port
