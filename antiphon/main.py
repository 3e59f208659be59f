"""The command `antiphon`: one module in `antiphon.commands` for each sub-command."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import sys
from collections.abc import Sequence

from protocol.errors import AntiphonError, ConfigError, InvalidRequest, ModelFileError
from protocol.exit_status import ExitStatus

COMMANDS = {
    "serve": "run a gateway and the workers that a config names",
    "talk": "speak to a running gateway and hear the answer",
    "eval": "judge a policy in closed loop, through a running gateway",
    "sessions": "list, show, park and end the sessions of a running gateway",
    "ledger": "show the bytes that the workers of a running gateway have reserved",
    "models": "list, fetch and verify model files",
    "bench": "run a benchmark of the repository",
    "check": "check a config and point at what is wrong",
}
"""Every sub-command; `antiphon.commands.NAME` has `add_arguments(parser)` and `run(arguments)`."""

EPILOG = """\
start with:
  antiphon check examples/voice.yaml
  antiphon serve -c examples/voice.yaml
  antiphon talk --url http://127.0.0.1:8080 --in question.wav --out answer.wav

environment:
  ANTIPHON_PORT        port that serve listens on, and talk, eval, sessions and ledger ask
  ANTIPHON_KEY         key that talk and eval send
  ANTIPHON_ADMIN_KEY   key that sessions and ledger send
  ANTIPHON_CACHE       folder of joined model files (default: ~/.cache/antiphon/models)
  ANTIPHON_LOG_FORMAT  text or json (default: text on a terminal)
  ANTIPHON_LOG_LEVEL   debug, info, warning or error (default: info)

exit status: 0 done, 1 failed, 2 wrong usage or config, 3 model file missing or wrong;
`antiphon COMMAND --help` says more.
"""

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (without the program's name); returns the exit status.

    One of `ExitStatus`, or 130 when interrupted. What went wrong is said on standard
    error. Exits through SystemExit on `--help` and wrong usage.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = _parser(words).parse_args(words)
    command = importlib.import_module(f"antiphon.commands.{arguments.command}")
    try:
        status: int = command.run(arguments)
    except (ConfigError, InvalidRequest) as error:
        _complain(error)
        return ExitStatus.CONFIG
    except ModelFileError as error:
        _complain(error)
        return ExitStatus.MODEL
    except AntiphonError as error:
        _complain(error)
        return ExitStatus.FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    return status


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """A parser that has loaded only the module of the sub-command that `words` name."""
    parser = argparse.ArgumentParser(
        prog="antiphon",
        description="A realtime gateway with pluggable engine workers.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = importlib.metadata.version("antiphon")
    parser.add_argument("--version", action="version", version=f"antiphon {version}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((word for word in words if not word.startswith("-")), None)
    for name, summary in COMMANDS.items():
        below = commands.add_parser(name, help=summary, description=f"{summary.capitalize()}.")
        if name == chosen:
            importlib.import_module(f"antiphon.commands.{name}").add_arguments(below)
    return parser


def _complain(error: AntiphonError) -> None:
    for line in error.message.splitlines():
        print(f"antiphon: {line}", file=sys.stderr)
