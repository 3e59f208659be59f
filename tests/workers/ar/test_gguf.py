"""What a GGUF header says of the memory that a context takes."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ModelFileError
from workers.engines.ar.gguf import (
    attention_window,
    cache_bytes_per_token,
    has_chat_template,
    is_gguf,
)

GEMMA = {
    "general.architecture": "gemma3",
    "general.tags": ["text", "chat"],
    "gemma3.rope.freq_base": 1e6,
    "gemma3.block_count": 18,
    "gemma3.embedding_length": 640,
    "gemma3.attention.head_count": 4,
    "gemma3.attention.head_count_kv": 1,
    "gemma3.attention.key_length": 256,
    "gemma3.attention.value_length": 256,
    "tokenizer.ggml.tokens": ["a", "b"],
}
WITHOUT_LENGTHS = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.embedding_length": 64,
    "llama.attention.head_count": 8,
}


def value(item: Any) -> bytes:
    match item:
        case str():
            return struct.pack("<I", 8) + text(item)
        case int():
            return struct.pack("<II", 4, item)
        case float():
            return struct.pack("<If", 6, item)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(item)) + b"".join(map(text, item))
        case list():
            return struct.pack(f"<IIQ{len(item)}i", 9, 5, len(item), *item)
    raise AssertionError(item)


def text(item: str) -> bytes:
    return struct.pack("<Q", len(item)) + item.encode()


def written(folder: Path, metadata: dict[str, Any], version: int = 3) -> Path:
    path = folder / "model.gguf"
    header = struct.pack("<4sIQQ", b"GGUF", version, 0, len(metadata))
    path.write_bytes(header + b"".join(text(key) + value(item) for key, item in metadata.items()))
    return path


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (GEMMA, 18 * 1 * (256 + 256) * 2),
        # Every query head has a key of its own, and a value as long.
        (WITHOUT_LENGTHS, 2 * 8 * (8 + 8) * 2),
        # Some layers keep nothing, others have more heads.
        ({**GEMMA, "gemma3.attention.head_count_kv": [4, 0, 2]}, 6 * 512 * 2),
        ({**GEMMA, "gemma3.attention.value_length": 128}, 18 * 384 * 2),
        # Of a kind that keeps something else.
        ({"general.architecture": "mamba", "mamba.block_count": 24}, 0),
        ({"general.name": "nobody's"}, 0),
        ({**WITHOUT_LENGTHS, "llama.attention.head_count": 0}, 0),
    ],
)
def test_a_token_takes_what_its_keys_and_values_take(
    tmp_path: Path, metadata: dict[str, Any], expected: int
) -> None:
    path = written(tmp_path, metadata)
    assert is_gguf(path)
    assert cache_bytes_per_token(path) == expected


@pytest.mark.parametrize("length", [3, 20, 60, 150])
def test_a_header_that_ends_too_soon_is_damaged(tmp_path: Path, length: int) -> None:
    path = written(tmp_path, GEMMA)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ModelFileError, match="damaged"):
        cache_bytes_per_token(path)


def test_a_header_that_lies_about_lengths_is_damaged(tmp_path: Path) -> None:
    path = written(tmp_path, GEMMA)
    data = bytearray(path.read_bytes())
    data[24:32] = struct.pack("<Q", 1 << 60)
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match="damaged"):
        cache_bytes_per_token(path)


def test_an_older_version_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="version 1"):
        cache_bytes_per_token(written(tmp_path, GEMMA, version=1))


def test_a_chat_template_is_found(tmp_path: Path) -> None:
    assert not has_chat_template(written(tmp_path, GEMMA))
    assert has_chat_template(written(tmp_path, {**GEMMA, "tokenizer.chat_template": "{{ x }}"}))


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({**GEMMA, "gemma3.attention.sliding_window": 512}, 512),
        (GEMMA, None),
        ({**GEMMA, "llama.attention.sliding_window": 512}, None),
    ],
)
def test_a_window_is_that_of_the_models_own_architecture(
    tmp_path: Path, metadata: dict[str, Any], expected: int | None
) -> None:
    # In front of the vocabulary, as writers put it.
    architecture = {key: item for key, item in metadata.items() if not key.startswith("tokenizer")}
    assert attention_window(written(tmp_path, architecture)) == expected
