"""The environments of the official clients, which `make setup-test` makes."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]


def client_python() -> Path:
    """The Python that has the official Realtime client and nothing of ours."""
    return _python(".venv-client")


def openpi_python() -> Path:
    """The Python that has the official OpenPI client (numpy < 2) and nothing of ours."""
    return _python(".venv-openpi")


def _python(environment: str) -> Path:
    python = ROOT / environment / "bin" / "python"
    assert python.exists(), f"{python} is missing: run `make setup-test`"
    return python
