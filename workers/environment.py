"""Other environments than this process's, which stages may name for their workers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from protocol.errors import ConfigError
from workers.stage_report import StageQuestion, StageReport, installed_version

_LIMIT_S = 120
"""How long an interpreter may take to import an engine: large libraries are slow when they are
read for the first time."""


def ask(python: Path, question: StageQuestion) -> StageReport:
    """The report on a stage in the environment of the interpreter `python`.

    Raises ConfigError when that cannot run workers of this deployment.
    """
    # As the workers are started: see workers.child.
    flags = ["-P"] if sys.flags.safe_path else []
    try:
        done = subprocess.run(
            [str(python), *flags, "-m", "workers.stage_report"],
            input=msgspec.json.encode(question),
            capture_output=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _unusable(f"{python} has not answered within {_LIMIT_S} s") from None
    except OSError as error:
        raise _unusable(f"{python} cannot be started: {error.strerror}") from None
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        reason = said[-1] if said else f"it ended with status {done.returncode}"
        raise _unusable(f"{python} cannot run workers: {reason}; {_remedy()}")
    try:
        report = msgspec.json.decode(done.stdout, type=StageReport)
    except msgspec.DecodeError:
        raise _unusable(f"{python} runs something else than workers of this version") from None
    here = installed_version()
    # Without a version of its own it runs the source that is here, by PYTHONPATH.
    if report.version not in ("", here):
        reason = f"{python} has antiphon {report.version}, and here is {here}"
        raise _unusable(f"{reason}; {_remedy()}")
    return report


def _remedy() -> str:
    return f"install antiphon {installed_version()} in that environment"


def _unusable(reason: str) -> ConfigError:
    return ConfigError(reason, field="python")
