"""What config may set on a stage whose engine is `ar`."""

from __future__ import annotations

from typing import Literal, Self

import pydantic
from pydantic import Field

from workers.models import check_reference

DEFAULT_MODEL = "gemma-3-270m"

PromptStyle = Literal["few-shot", "chat-template"]


class ArOptions(pydantic.BaseModel):
    """Options of an AR stage. Those of the other back end are refused, not ignored."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    backend: Literal["llamacpp", "openai"] = "llamacpp"

    model: str = DEFAULT_MODEL
    """llamacpp: a name that `antiphon models` lists, or the path of a GGUF file.
    openai: the name that the server knows the model by."""

    sessions: int = Field(8, ge=1, le=1024)
    """Sessions that may be open at once; each keeps `context_tokens` of memory."""

    context_tokens: int = Field(2048, ge=512)
    """What one session may hold, prompt and reply together (llamacpp)."""

    threads: int | None = Field(None, ge=1, le=512)
    """Threads that compute (llamacpp); None: one a core, at most 8."""

    prompt: PromptStyle | None = None
    """How a conversation becomes a prompt (llamacpp). None: few-shot for the default
    model, which is not instruction-tuned, and a file's own chat template for others."""

    sentences: int = Field(2, ge=1, le=100)
    """Sentences of a few-shot reply where the session's instructions say nothing else."""

    max_output_tokens: int = Field(400, ge=1, le=4096)
    """The longest reply where the turn itself sets no limit."""

    temperature: float | None = Field(None, ge=0.0, le=2.0)
    """0 always takes the likeliest token. None: 0 for few-shot, 0.7 for chat-template,
    the server's own default for openai."""

    top_p: float | None = Field(None, gt=0.0, le=1.0)
    """Only tokens that make up this much of the probability. None: 0.95, or the server's
    own default for openai."""

    seed: int | None = Field(None, ge=0, le=0xFFFF_FFFE)

    base_url: str | None = None
    """openai: where the API lies, with its version, like `http://127.0.0.1:8000/v1`."""

    api_key: pydantic.SecretStr | None = None
    """openai: the bearer token, if the server wants one."""

    connect_timeout_s: float = Field(5.0, gt=0.0, le=600.0)
    """openai: for the connection, and for a free one where `sessions` are in use."""

    read_timeout_s: float = Field(60.0, gt=0.0, le=3600.0)
    """openai: the longest silence before and between pieces of a reply."""

    @pydantic.field_validator("model")
    @classmethod
    def _model_here(cls, model: str, info: pydantic.ValidationInfo) -> str:
        return check_reference(model) if info.data.get("backend") == "llamacpp" else model

    @pydantic.model_validator(mode="after")
    def _one_backend(self) -> Self:
        local = {"context_tokens", "threads", "prompt", "sentences"}
        remote = {"base_url", "api_key", "connect_timeout_s", "read_timeout_s"}
        foreign = self.model_fields_set & (local if self.backend == "openai" else remote)
        if foreign:
            raise ValueError(
                f"not an option of backend {self.backend}: {', '.join(sorted(foreign))}"
            )
        if self.backend == "openai":
            if self.base_url is None:
                raise ValueError("backend openai needs base_url")
            if "model" not in self.model_fields_set:
                raise ValueError("backend openai needs model: the name that the server knows it by")
        return self

    def prompt_style(self) -> PromptStyle:
        """The prompt style in effect."""
        if self.prompt is not None:
            return self.prompt
        return "few-shot" if self.model == DEFAULT_MODEL else "chat-template"
