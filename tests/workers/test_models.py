"""Model files are found without importing their packages, joined once, and verified."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from protocol.errors import ModelFileError
from workers import models
from workers.model_fetch import fetch, requirements
from workers.model_registry import MODELS, Model, ModelFile, Package, Part
from workers.models import (
    ModelState,
    check_reference,
    locate,
    missing_packages,
    resolve,
    state,
    verify,
)

ROOT = Path(__file__).parent.parent.parent

REAL_MODELS = list(MODELS.values())

ONE = Package("synthetic-one", "1.0.0", "1" * 64)
TWO = Package("synthetic-two", "1.0.0", "2" * 64)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def whole(name: str, content: bytes, package: Package = ONE) -> ModelFile:
    part = Part(package, f"{package.name.replace('-', '_')}/data/{name}")
    return ModelFile(name, len(content), sha256(content), (part,))


SINGLE = Model("single", "tests", "MIT", "", (whole("voice.onnx", b"voice"),), folder=False)
FOLDER = Model(
    "folder",
    "tests",
    "MIT",
    "",
    (whole("voice.onnx", b"voice"), whole("voice.json", b"{}")),
    folder=True,
)
JOINED = Model(
    "joined",
    "tests",
    "MIT",
    "",
    (
        ModelFile(
            "model.bin",
            9,
            sha256(b"firstlast"),
            (
                Part(ONE, "synthetic_one/data/model.part1"),
                Part(TWO, "synthetic_two/data/model.part2"),
            ),
        ),
        whole("config.json", b"{}", TWO),
    ),
    folder=True,
)


def install(site: Path, package: Package, files: dict[str, bytes], version: str = "") -> None:
    """Lay out what pip leaves of a wheel whose code must never run."""
    version = version or package.version
    module = package.name.replace("-", "_")
    data = site / module / "data"
    data.mkdir(parents=True, exist_ok=True)
    (site / module / "__init__.py").write_text("raise RuntimeError('imported')\n")
    for name, content in files.items():
        (data / name).write_bytes(content)
    info = site / f"{module}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {package.name}\nVersion: {version}\n"
    )


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty package folder, an empty cache and three synthetic models."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.setattr(models, "package_folder", lambda: folder)
    monkeypatch.setenv("ANTIPHON_CACHE", str(tmp_path / "cache"))
    for name in list(MODELS):
        monkeypatch.delitem(MODELS, name)
    for model in (SINGLE, FOLDER, JOINED):
        monkeypatch.setitem(MODELS, model.name, model)
    return folder


@pytest.fixture
def installed(site: Path) -> Path:
    install(site, ONE, {"voice.onnx": b"voice", "voice.json": b"{}", "model.part1": b"first"})
    install(site, TWO, {"model.part2": b"last", "config.json": b"{}"})
    return site


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are hashed whole, in order, from here on."""
    paths: list[Path] = []
    original = models._sha256

    def spy(path: Path) -> str:
        paths.append(path)
        return original(path)

    monkeypatch.setattr(models, "_sha256", spy)
    return paths


def test_a_single_file_is_used_where_it_was_installed(installed: Path) -> None:
    path = locate("single")
    assert path == installed / "synthetic_one" / "data" / "voice.onnx"
    assert path.read_bytes() == b"voice"


def test_a_folder_model_is_the_folder_of_its_files(installed: Path) -> None:
    assert locate("folder") == installed / "synthetic_one" / "data"


def test_parts_are_joined_into_the_cache(installed: Path, tmp_path: Path) -> None:
    folder = locate("joined")
    assert folder.is_relative_to(tmp_path / "cache")
    assert (folder / "model.bin").read_bytes() == b"firstlast"
    assert (folder / "config.json").read_bytes() == b"{}"
    assert not list(folder.glob("*.partial"))


def test_a_joined_model_needs_its_packages_no_longer(installed: Path) -> None:
    folder = locate("joined")
    for path in (installed / "synthetic_one" / "data").iterdir():
        path.unlink()
    assert locate("joined") == folder
    assert state(JOINED) is ModelState.VERIFIED


def test_verification_is_remembered(installed: Path, hashed: list[Path]) -> None:
    path = locate("single")
    assert hashed == [path]
    assert locate("single") == path
    assert hashed == [path]


def test_a_touched_file_is_hashed_again(installed: Path, hashed: list[Path]) -> None:
    path = locate("single")
    os.utime(path, ns=(1, 1))
    locate("single")
    assert hashed == [path, path]


def test_verify_trusts_no_memory(installed: Path) -> None:
    path = locate("single")
    before = path.stat()
    path.write_bytes(b"vOice")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert locate("single") == path
    with pytest.raises(ModelFileError):
        verify("single")


def test_a_wrong_hash_names_the_file_and_the_way_out(installed: Path) -> None:
    path = installed / "synthetic_one" / "data" / "voice.onnx"
    path.write_bytes(b"noise")
    with pytest.raises(ModelFileError) as caught:
        locate("single")
    assert str(path) in caught.value.message
    assert sha256(b"noise") in caught.value.message
    assert "antiphon models fetch --again single" in caught.value.message


def test_a_wrong_part_is_refused_and_leaves_nothing(installed: Path, tmp_path: Path) -> None:
    (installed / "synthetic_two" / "data" / "model.part2").write_bytes(b"lost")
    with pytest.raises(ModelFileError, match=r"not the pinned model\.bin"):
        locate("joined")
    assert not [path for path in (tmp_path / "cache").rglob("model.bin*") if path.is_file()]


def test_a_damaged_join_is_made_again(installed: Path) -> None:
    joined = locate("joined") / "model.bin"
    joined.write_bytes(b"damaged")
    locate("joined")
    assert joined.read_bytes() == b"firstlast"


def test_a_missing_package_says_what_to_do(site: Path) -> None:
    with pytest.raises(ModelFileError, match=r"synthetic-one 1\.0\.0.*antiphon models fetch"):
        locate("single")
    assert state(SINGLE) is ModelState.MISSING


def test_another_version_is_not_the_pinned_one(site: Path) -> None:
    install(site, ONE, {"voice.onnx": b"voice"}, version="2.0.0")
    with pytest.raises(ModelFileError, match="is not installed"):
        locate("single")


def test_a_half_installed_package_is_missing(installed: Path) -> None:
    assert missing_packages(MODELS.values()) == []
    (installed / "synthetic_two" / "data" / "model.part2").unlink()
    assert missing_packages(MODELS.values()) == [TWO]


def test_states_follow_the_files(installed: Path) -> None:
    assert [state(SINGLE), state(JOINED)] == [ModelState.FETCHED, ModelState.FETCHED]
    locate("single")
    locate("joined")
    assert [state(SINGLE), state(JOINED)] == [ModelState.VERIFIED, ModelState.VERIFIED]


def test_a_cache_that_is_a_file_is_said(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ANTIPHON_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelFileError, match="set ANTIPHON_CACHE"):
        locate("joined")
    assert locate("single").name == "voice.onnx"


def test_an_unknown_name_lists_the_known_ones(site: Path) -> None:
    with pytest.raises(ModelFileError, match="known are single, folder, joined"):
        locate("llama")


def test_paths_are_taken_as_they_are(site: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.gguf"
    mine.write_bytes(b"GGUF")
    assert resolve(str(mine)) == mine
    assert resolve(str(tmp_path)) == tmp_path
    with pytest.raises(ModelFileError, match=r"other\.gguf does not exist"):
        resolve("other.gguf")
    with pytest.raises(ModelFileError, match="no model called mine"):
        resolve("mine")


def test_a_reference_is_checked_without_reading_anything(site: Path, tmp_path: Path) -> None:
    # `site` has no package installed.
    assert check_reference("single") == "single"
    assert check_reference(str(tmp_path)) == str(tmp_path)
    with pytest.raises(ValueError, match=r"no model called two; known are single"):
        check_reference("two")
    with pytest.raises(ValueError, match=r"gone\.onnx does not exist"):
        check_reference("gone.onnx")


def test_nothing_is_fetched_when_nothing_is_missing(installed: Path) -> None:
    assert fetch(MODELS.values()) == []


def test_requirements_pin_version_and_hash() -> None:
    assert requirements([ONE, TWO]) == (
        f"synthetic-one==1.0.0 --hash=sha256:{'1' * 64}\n"
        f"synthetic-two==1.0.0 --hash=sha256:{'2' * 64}\n"
    )


def test_every_real_model_is_told_of_in_the_readme() -> None:
    rows = (ROOT / "README.md").read_text().splitlines()
    for model in REAL_MODELS:
        (row,) = (row for row in rows if row.startswith(f"| `{model.name}` "))
        assert model.licence in row
        first = model.packages[0]
        assert f"`{first.name}` {first.version}" in row or first.name.endswith("-part1")


def test_every_real_model_is_pinned_by_hash() -> None:
    hashes = [file.sha256 for model in REAL_MODELS for file in model.files]
    hashes += [package.wheel_sha256 for model in REAL_MODELS for package in model.packages]
    assert all(len(bytes.fromhex(digest)) == 32 for digest in hashes)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MODELS))
def test_the_installed_model_is_the_pinned_one(name: str) -> None:
    model = MODELS[name]
    path = verify(name)
    sizes = [((path / file.name) if model.folder else path).stat().st_size for file in model.files]
    assert sizes == [file.size_bytes for file in model.files]
