"""A policy in a file: ONNX whose inputs are named like the members of an observation.

What else there is to know is in the model's metadata, under `antiphon`: `metadata`, the map that
clients are told first; and `prompts`, where the model has an input `prompt`, which then is the
number (int64) of one of them. A model with the inputs `action_prefix` (batch, steps, dimensions)
and `action_prefix_length` takes actions that are already decided (real-time chunking); an
observation without them has none. What is no input of the model is refused. The output is
`actions`, (batch, horizon, dimensions).
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt
import pydantic

from protocol.errors import InvalidRequest, ModelFileError
from workers.engines.vla.policy import Batch, Inferred, Policy

PROMPT = "prompt"
PREFIX = "action_prefix"
PREFIX_LENGTH = "action_prefix_length"
ABOUT = "antiphon"
"""The key of the model's metadata."""

_DTYPES = {
    "tensor(uint8)": np.uint8,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
    "tensor(float16)": np.float16,
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(bool)": np.bool_,
}


class OnnxOptions(pydantic.BaseModel):
    """Which file, and how many threads of the processor work on one call."""

    model_config = pydantic.ConfigDict(extra="forbid")

    model: Path
    threads: Annotated[int, pydantic.Field(ge=1, le=64, strict=True)] = 1


class _About(msgspec.Struct, forbid_unknown_fields=True):
    metadata: dict[str, Any] = {}
    prompts: list[str] = []


class OnnxPolicy(Policy):
    """Registered as `onnx`. It keeps nothing of a session."""

    Options: ClassVar[type[pydantic.BaseModel]] = OnnxOptions

    def load(self) -> dict[str, Any]:
        """Load the file and run it once.

        Raises ModelFileError for one that is not there, or is no such model.
        """
        # Not above: a config is checked without the libraries of its engines.
        import onnxruntime

        path: Path = self.options.model
        session_options = onnxruntime.SessionOptions()
        session_options.intra_op_num_threads = self.options.threads
        session_options.inter_op_num_threads = 1
        try:
            content = path.read_bytes()
            self._session = onnxruntime.InferenceSession(
                content, session_options, providers=["CPUExecutionProvider"]
            )
            said = self._session.get_modelmeta().custom_metadata_map.get(ABOUT, "{}")
            about = msgspec.json.decode(said, type=_About)
        except OSError as error:
            raise ModelFileError(f"{path} cannot be read: {error.strerror}") from error
        except Exception as error:
            raise ModelFileError(f"{path} is no policy: {error}") from error
        self._digest = hashlib.sha256(content).hexdigest()
        self._inputs = {value.name: value for value in self._session.get_inputs()}
        self._prompts = {prompt: number for number, prompt in enumerate(about.prompts)}
        outputs = {value.name for value in self._session.get_outputs()}
        unknown = {v.type for v in self._inputs.values()} - _DTYPES.keys()
        if "actions" not in outputs or unknown or (PROMPT in self._inputs) > bool(self._prompts):
            raise ModelFileError(
                f"{path} is no policy: inputs {sorted(self._inputs)}, outputs {sorted(outputs)}, "
                f"{len(self._prompts)} prompts"
            )
        metadata = dict(about.metadata)
        if self._prompts:
            metadata["prompts"] = about.prompts
        if PREFIX in self._inputs:
            metadata[PREFIX] = list(self._inputs[PREFIX].shape[1:])
        self._session.run(
            ["actions"],
            {name: self._zeros(name, 1) for name in self._inputs},
        )
        return metadata

    def infer(self, batch: Batch) -> Inferred:
        """One call. Raises InvalidRequest for a member that is missing, not as it should be, or
        no input: what a robot believes to be heard must not be nobody's."""
        for name in batch.observations:
            if name not in self._inputs:
                known = ", ".join(map(repr, self._inputs))
                raise InvalidRequest(f"the policy takes {known}, no {name!r:.64}", field=str(name))
        fed = {name: self._fed(name, batch) for name in self._inputs}
        if PREFIX not in batch.observations and fed.get(PREFIX_LENGTH, np.zeros(1)).any():
            raise InvalidRequest(f"{PREFIX_LENGTH!r} counts rows of {PREFIX!r}", field=PREFIX)
        (actions,) = self._session.run(["actions"], fed)
        return Inferred({"actions": actions})

    def weights(self) -> str:
        """The file's SHA-256."""
        return self._digest

    def _fed(self, name: str, batch: Batch) -> npt.NDArray[Any]:
        """What the batch has for one of the model's inputs."""
        given = batch.observations.get(name)
        if name == PROMPT:
            return np.array([self._number(prompt) for prompt in given or [None]], np.int64)
        if given is None and name in (PREFIX, PREFIX_LENGTH):
            return self._zeros(name, batch.size)
        value = self._inputs[name]
        if name == PREFIX_LENGTH and isinstance(given, list | np.ndarray):
            # An array without dimensions is a number too.
            given = self._lengths(given)
        if not isinstance(given, np.ndarray):
            raise InvalidRequest(f"an observation has the array {name!r}", field=name)
        shape, dtype = tuple(value.shape[1:]), np.dtype(_DTYPES[value.type])
        if given.shape[1:] != shape or given.dtype != dtype:
            raise InvalidRequest(
                f"{name!r} is an array of {dtype} with the shape {shape}, "
                f"not of {given.dtype} with {given.shape[1:]}",
                field=name,
            )
        return np.ascontiguousarray(given)

    def _number(self, prompt: object) -> int:
        number = self._prompts.get(prompt) if isinstance(prompt, str) else None
        if number is None:
            known = ", ".join(map(repr, self._prompts))
            raise InvalidRequest(f"the policy knows the prompts {known}", field=PROMPT)
        return number

    def _lengths(self, given: list[Any] | npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        most = self._inputs[PREFIX].shape[1] if PREFIX in self._inputs else 0
        for length in given:
            whole = isinstance(length, int | np.integer) and not isinstance(length, bool)
            if not whole or not 0 <= length <= most:
                raise InvalidRequest(
                    f"{PREFIX_LENGTH!r} is a whole number from 0 to {most}", field=PREFIX_LENGTH
                )
        return np.array(given, np.int64)

    def _zeros(self, name: str, size: int) -> npt.NDArray[Any]:
        value = self._inputs[name]
        return np.zeros((size, *value.shape[1:]), _DTYPES[value.type])
