"""Find model files on this machine, and make sure that they are the pinned ones.

Packages lie in a folder of their own inside the environment (`package_folder`), off
the import path, so that what they hold cannot be imported by accident. Files that
come in parts are joined once into a cache (`cache_folder`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import structlog
from pydantic import AfterValidator

from protocol.errors import ModelFileError
from workers.model_registry import MODELS, Model, ModelFile, Package, Part

_log = structlog.get_logger(__name__)
_BLOCK_BYTES = 1 << 20
_FETCH = "run `antiphon models fetch`"
_FILE_SUFFIXES = frozenset({".bin", ".dict", ".gguf", ".onnx", ".safetensors"})


class ModelState(StrEnum):
    """How far the files of a model are, as `antiphon models` shows it."""

    VERIFIED = "verified"
    FETCHED = "fetched"
    MISSING = "missing"


class _Stamp(msgspec.Struct, frozen=True):
    """What a file looked like when its hash was last computed."""

    path: str
    size_bytes: int
    mtime_ns: int
    sha256: str


def package_folder() -> Path:
    """Where `antiphon models fetch` installs packages: beside the environment's own."""
    return Path(sys.prefix) / "share" / "antiphon" / "packages"


def cache_folder() -> Path:
    """Where joined files and verification stamps lie: ANTIPHON_CACHE, or the user's cache.

    Raises ModelFileError when neither exists.
    """
    chosen = os.environ.get("ANTIPHON_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "antiphon" / "models"
    except RuntimeError:
        raise ModelFileError("there is no home folder to cache in: set ANTIPHON_CACHE") from None


def resolve(name_or_path: str) -> Path:
    """The model that a config names: a file or folder of the user's, or one of `MODELS`.

    Text with a slash, or that ends like a model file, is a path; its content is the
    user's own business and is not verified. Raises ModelFileError.
    """
    path = _as_path(name_or_path)
    return locate(name_or_path) if path is None else _existing(path)


def check_reference(name_or_path: str) -> str:
    """`name_or_path`, if it names a model of `MODELS` or something that exists.

    Reads nothing, so that a config can be checked where no model is installed. Raises
    ValueError, as a validator of engine options.
    """
    path = _as_path(name_or_path)
    try:
        if path is None:
            _model(name_or_path)
        else:
            _existing(path)
    except ModelFileError as error:
        raise ValueError(error.message) from None
    return name_or_path


ModelReference = Annotated[str, AfterValidator(check_reference)]
"""An engine option that names a model: one of `MODELS`, or a file or folder of the user's."""


def _as_path(name_or_path: str) -> Path | None:
    path = Path(name_or_path).expanduser()
    return path if "/" in name_or_path or path.suffix in _FILE_SUFFIXES else None


def _existing(path: Path) -> Path:
    if not path.exists():
        raise ModelFileError(f"model file {path} does not exist (looked from {Path.cwd()})")
    return path.absolute()


def locate(name: str) -> Path:
    """The verified file, or folder of files, of the model `name` in `MODELS`.

    Joins parts where the model comes in parts; that and the first verification
    take a second or two, later calls a few milliseconds. Raises ModelFileError,
    saying what to do.
    """
    model = _model(name)
    paths = _joined_files(model) if model.joined else _installed_files(model)
    return paths[0].parent if model.folder else paths[0]


def state(model: Model) -> ModelState:
    """How far the files of `model` are. Hashes nothing and creates nothing."""
    folder = _joined_folder(model)
    joined = [folder / file.name for file in model.files] if model.joined else []
    if joined and all(map(_is_stamped, joined, model.files)):
        return ModelState.VERIFIED
    installed = [[find_part(part) for part in file.parts] for file in model.files]
    if any(path is None for paths in installed for path in paths):
        return ModelState.MISSING
    whole = [paths[0] for paths in installed if paths[0] is not None]
    if not model.joined and all(map(_is_stamped, whole, model.files)):
        return ModelState.VERIFIED
    return ModelState.FETCHED


def verify(name: str) -> Path:
    """As `locate`, but hashes every file again, whatever was remembered."""
    model = _model(name)
    path = locate(name)
    for file in model.files:
        used = path / file.name if model.folder else path
        if _sha256(used) != file.sha256:
            _forget(used)
    return locate(name)


def missing_packages(models: Iterable[Model]) -> list[Package]:
    """The packages that `models` need and that are not, or not wholly, installed."""
    parts = (part for model in models for part in model.parts)
    return list(dict.fromkeys(part.package for part in parts if find_part(part) is None))


def find_part(part: Part) -> Path | None:
    """Where `part` is installed. Reads metadata only; nothing of the package runs."""
    distribution = _distribution(part.package)
    if distribution is None:
        return None
    path = Path(str(distribution.locate_file(part.path)))
    return path if path.is_file() else None


def _model(name: str) -> Model:
    if name not in MODELS:
        raise ModelFileError(f"there is no model called {name}; known are {', '.join(MODELS)}")
    return MODELS[name]


def _distribution(package: Package) -> importlib.metadata.Distribution | None:
    found = importlib.metadata.distributions(
        name=package.name, path=[str(package_folder()), *sys.path]
    )
    return next((each for each in found if each.version == package.version), None)


def _part_path(model: Model, part: Part) -> Path:
    path = find_part(part)
    if path is None:
        package = part.package
        raise ModelFileError(
            f"model {model.name}: {part.path} of package {package.name} {package.version} "
            f"is not installed: {_FETCH}"
        )
    return path


def _installed_files(model: Model) -> list[Path]:
    paths = []
    for file in model.files:
        path = _part_path(model, file.parts[0])
        if not _is_stamped(path, file):
            found = _sha256(path)
            if found != file.sha256:
                raise ModelFileError(_wrong(model, path, file, found))
            _write_stamp(path, file)
        paths.append(path)
    return paths


def _joined_folder(model: Model) -> Path:
    return cache_folder() / f"{model.name}-{model.digest}"


def _joined_files(model: Model) -> list[Path]:
    folder = _joined_folder(model)
    paths = [folder / file.name for file in model.files]
    if all(map(_is_stamped, paths, model.files)):
        return paths
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder):
            for path, file in zip(paths, model.files, strict=True):
                _ensure_joined(model, file, path)
    except OSError as error:
        raise ModelFileError(
            f"model {model.name}: cannot be put together in {folder}: {error.strerror}; "
            "free some space or set ANTIPHON_CACHE to a folder that can be written"
        ) from None
    return paths


def _ensure_joined(model: Model, file: ModelFile, target: Path) -> None:
    """Make `target` the verified join of the parts. The caller holds the folder's lock."""
    if _is_stamped(target, file):
        return
    if target.is_file() and _sha256(target) == file.sha256:
        _write_stamp(target, file)
        return
    sources = [_part_path(model, part) for part in file.parts]
    _log.info("joining model file", model=model.name, file=file.name, bytes=file.size_bytes)
    partial = target.with_name(f"{file.name}.partial")
    digest = hashlib.sha256()
    try:
        with partial.open("wb") as stream:
            for source in sources:
                for block in _blocks(source):
                    digest.update(block)
                    stream.write(block)
            stream.flush()
            os.fsync(stream.fileno())
        if digest.hexdigest() != file.sha256:
            raise ModelFileError(_wrong(model, sources[0].parent, file, digest.hexdigest()))
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    _write_stamp(target, file)


def _wrong(model: Model, path: Path, file: ModelFile, found: str) -> str:
    return (
        f"model {model.name}: {path} is not the pinned {file.name}: SHA-256 is {found}, "
        f"must be {file.sha256}; run `antiphon models fetch --again {model.name}`"
    )


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """One process at a time; released by the kernel however the process ends."""
    with (folder / ".lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            yield block


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _stamp_path(path: Path) -> Path:
    key = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:32]
    return cache_folder() / "verified" / f"{key}.json"


def _stamp_of(path: Path, sha256: str) -> _Stamp:
    status = path.stat()
    return _Stamp(str(path.absolute()), status.st_size, status.st_mtime_ns, sha256)


def _is_stamped(path: Path, file: ModelFile) -> bool:
    """Whether `path` was verified as `file` and has not been touched since."""
    try:
        stamp = msgspec.json.decode(_stamp_path(path).read_bytes(), type=_Stamp)
        return stamp == _stamp_of(path, file.sha256)
    except (OSError, msgspec.DecodeError):
        return False


def _forget(path: Path) -> None:
    stamp = _stamp_path(path)
    try:
        stamp.unlink(missing_ok=True)
    except OSError as error:
        raise ModelFileError(
            f"{path} is not the pinned file, but {stamp} says it is and cannot be removed: "
            f"{error.strerror}"
        ) from None


def _write_stamp(path: Path, file: ModelFile) -> None:
    """Remember a verification; where the cache cannot be written it is done again next time."""
    target = _stamp_path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as stream:
            stream.write(msgspec.json.encode(_stamp_of(path, file.sha256)))
        os.replace(stream.name, target)
    except OSError as error:
        _log.warning("verification not remembered", file=str(path), reason=error.strerror)
