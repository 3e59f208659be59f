"""Environments that are made for a test: an interpreter beside the one that runs the tests."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[1]


def bare_python(directory: Path) -> Path:
    """The interpreter of a new environment in which nothing is installed."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True, timeout=60
    )
    return directory / "bin" / "python"


def lent_python(directory: Path) -> Path:
    """The interpreter of a new environment that has what this one has, the tests included."""
    python = bare_python(directory)
    lent = sysconfig.get_path("purelib")
    (site_packages(python) / "lent.pth").write_text(
        f"import site; site.addsitedir({lent!r})\n{ROOT}\n"
    )
    return python


def site_packages(python: Path) -> Path:
    """Where the environment of `python` keeps its packages."""
    (found,) = python.parents[1].glob("lib/python*/site-packages")
    return found
