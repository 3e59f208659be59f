"""The environment of the official client, which `make setup-test` makes."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]


def client_python() -> Path:
    """The Python that has the official client and nothing of ours."""
    python = ROOT / ".venv-client" / "bin" / "python"
    assert python.exists(), f"{python} is missing: run `make setup-test`"
    return python
