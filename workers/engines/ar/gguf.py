"""What a GGUF file says of its model, read from its header alone.

The format is llama.cpp's: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Its
own Python reader builds an object for every token of the vocabulary and takes 12 s where
this takes milliseconds.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

from protocol.errors import ModelFileError

Value = int | float | bool | str | list[int]

_METADATA_BYTES = 64 << 20
_STRING, _ARRAY = 8, 9
_SCALARS = {
    **{0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f"},
    **{7: "<?", 10: "<Q", 11: "<q", 12: "<d"},
}
_LONGEST_KEPT_ARRAY = 4096
"""Numbers: what is kept for each layer is shorter, and vocabularies are longer."""

_CACHE_ELEMENT_BYTES = 2
"""llama.cpp keeps keys and values as 16-bit floats unless it is told otherwise."""


def is_gguf(path: Path) -> bool:
    """Whether `path` is a file that begins like a GGUF file."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def has_chat_template(path: Path) -> bool:
    """Whether a GGUF file brings a chat template (its metadata lies at the front)."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.find(b"tokenizer.chat_template", 0, min(len(data), _METADATA_BYTES)) >= 0


def cache_bytes_per_token(path: Path) -> int:
    """Bytes that one token takes in the model's key-value cache; 0 where the file does not say.

    For every layer its heads times the lengths of key and value. Raises ModelFileError for
    a header that is damaged.
    """
    found = _architecture(path)
    try:
        layers = _number(found["block_count"])
        heads = found.get("attention.head_count_kv", found["attention.head_count"])
        if "attention.key_length" in found:
            key = _number(found["attention.key_length"])
        else:
            key = _number(found["embedding_length"]) // _most(found["attention.head_count"])
        value = _number(found.get("attention.value_length", key))
    except (KeyError, TypeError, ZeroDivisionError):
        return 0  # Of a kind that keeps something else, or none.
    in_all = sum(heads) if isinstance(heads, list) else layers * _number(heads)
    return in_all * (key + value) * _CACHE_ELEMENT_BYTES


def attention_window(path: Path) -> int | None:
    """Tokens that layers with a sliding window look back; None where the file names no window.

    Raises ModelFileError for a header that is damaged.
    """
    window = _architecture(path).get("attention.sliding_window")
    return window if isinstance(window, int) else None


def _architecture(path: Path) -> dict[str, Value]:
    """The metadata of the model's own architecture, without its name in front."""
    found: dict[str, Value] = {}
    try:
        for key, value in _metadata(path):
            found[key] = value
            if key.startswith("tokenizer."):
                break  # Writers put the vocabulary, which is long, after the architecture.
    except (struct.error, ValueError, KeyError, IndexError) as error:
        raise ModelFileError(f"{path} is damaged: its header cannot be read ({error})") from None
    name = found.get("general.architecture", "")
    prefix = f"{name}."
    return {key.removeprefix(prefix): v for key, v in found.items() if key.startswith(prefix)}


def _metadata(path: Path) -> Iterator[tuple[str, Value]]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        magic, version, _, entries = struct.unpack_from("<4sIQQ", data, 0)
        if magic != b"GGUF" or version < 2:
            raise ValueError(f"magic {magic!r}, version {version}")
        at = struct.calcsize("<4sIQQ")
        for _ in range(entries):
            key, at = _string(data, at)
            (kind,) = struct.unpack_from("<I", data, at)
            value, at = _value(data, at + 4, kind)
            yield key, value


def _value(data: mmap.mmap, at: int, kind: int) -> tuple[Value, int]:
    if kind == _STRING:
        return _string(data, at)
    if kind != _ARRAY:
        (value,) = struct.unpack_from(_SCALARS[kind], data, at)
        return value, at + struct.calcsize(_SCALARS[kind])
    inner, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if inner == _STRING:
        for _ in range(count):
            (length,) = struct.unpack_from("<Q", data, at)
            at += 8 + length
        return [], at
    size = struct.calcsize(_SCALARS[inner])
    kept: list[int] = []
    if count <= _LONGEST_KEPT_ARRAY:
        kept = [struct.unpack_from(_SCALARS[inner], data, at + i * size)[0] for i in range(count)]
    return kept, at + count * size


def _string(data: mmap.mmap, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", data, at)
    if length > len(data):
        raise ValueError(f"a text of {length} bytes")
    at += 8
    return data[at : at + length].decode(errors="replace"), at + length


def _number(value: Value) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is no number")
    return value


def _most(value: Value) -> int:
    return max(value) if isinstance(value, list) else _number(value)
