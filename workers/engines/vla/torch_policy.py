"""Policies whose model is a PyTorch module.

The arrays of a batch come as tensors of the same memory, or on the module's device; weights
are in the ledger; and what a session's random numbers have come to is kept in its state, so
that a session that was parked goes on as if it had not been.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pydantic
import torch

from protocol.errors import ConfigError, InvalidRequest
from workers.engine import DeviceUse
from workers.engines.vla.policy import Batch, Inferred, Policy
from workers.storages import storage_bytes

GENERATOR = "torch_generator"
"""The name in a session's state of what its random numbers have come to."""
SEEDS = 1 << 63


class TorchOptions(pydantic.BaseModel):
    """Where a module runs, and with what a session's random numbers begin."""

    model_config = pydantic.ConfigDict(extra="forbid")

    device: str = "cpu"
    """As PyTorch names it, such as `cuda:0`."""
    threads: int | None = pydantic.Field(default=None, ge=1, le=1024)
    """Of the processor, for one call; by default PyTorch's choice."""
    seed: int = pydantic.Field(default=0, ge=0, lt=SEEDS)
    """Of each session that names none."""

    @pydantic.field_validator("device")
    @classmethod
    def _is_a_device(cls, name: str) -> str:
        try:
            torch.device(name)
        except RuntimeError as error:
            raise ValueError(str(error).splitlines()[0]) from None
        return name


@dataclass(frozen=True)
class TorchBatch:
    """A `Batch` whose arrays are tensors on the module's device; never write to them.

    Arrays of what PyTorch has no dtype for, such as text, stay arrays. `generators` has one
    for each session, on the CPU, of policies that put `random_state` into their state.
    """

    size: int
    observations: dict[Any, Any]
    states: dict[str, torch.Tensor]
    generators: list[torch.Generator]
    device: torch.device

    def normal(self, *shape: int) -> torch.Tensor:
        """Standard normal numbers of `shape` for each session, from its own generator: they do
        not depend on who else is in the batch."""
        drawn = [torch.randn((1, *shape), generator=each) for each in self.generators]
        return torch.cat(drawn).to(self.device)


@dataclass(frozen=True)
class TorchInferred:
    """`Inferred` with tensors, on any device. Brain floats are told as 32-bit floats."""

    answers: Mapping[str, Any]
    states: Mapping[str, torch.Tensor]


class TorchPolicy(Policy):
    """A policy with a PyTorch module. Derived classes have `build` and `act`."""

    Options: ClassVar[type[pydantic.BaseModel]] = TorchOptions

    module: torch.nn.Module
    """Once it is loaded: on its device, for inference alone."""

    @abstractmethod
    def build(self) -> torch.nn.Module:
        """The module with its weights, on any device. In the policy's thread.

        Raises protocol.errors.ModelFileError for files that are missing or wrong.
        """

    @abstractmethod
    def act(self, batch: TorchBatch) -> TorchInferred:
        """The answers to a batch, as `infer`; without gradients, in inference mode."""

    def metadata(self) -> dict[str, Any]:
        """What clients are told first. Called once the module is loaded."""
        return {}

    @property
    def device(self) -> torch.device:
        """Where the module is to run."""
        return torch.device(self.options.device)

    def load(self) -> dict[str, Any]:
        """Build the module and bring it to its device.

        Raises ConfigError when that is not there.
        """
        if self.options.threads is not None:
            torch.set_num_threads(self.options.threads)
        try:
            torch.empty(0, device=self.device)
        except (AssertionError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"options.device: {self.device}: {reason}") from None
        self.module = self.build().to(self.device).eval().requires_grad_(False)
        self._weights = _digest(self.module)
        return self.metadata()

    def random_state(self, settings: dict[str, Any]) -> dict[str, npt.NDArray[Any]]:
        """For `initial_state` of policies that draw: what a session's random numbers begin with.

        That is the setting `seed`, or the option. Raises InvalidRequest for another than 0 to
        2^63 - 1.
        """
        seed = settings.get("seed", self.options.seed)
        if type(seed) is not int or not 0 <= seed < SEEDS:
            raise InvalidRequest("a seed is a number from 0 to 2^63 - 1", field="settings.seed")
        return {GENERATOR: torch.Generator().manual_seed(seed).get_state().numpy()}

    def infer(self, batch: Batch) -> Inferred:
        """`act` on the batch as tensors."""
        states = dict(batch.states)
        generators = [_generator(state) for state in states.pop(GENERATOR, ())]
        with torch.inference_mode():
            inferred = self.act(
                TorchBatch(
                    batch.size,
                    _tensors(batch.observations, self.device),
                    _tensors(states, self.device),
                    generators,
                    self.device,
                )
            )
            drawn = {}
            if generators:
                drawn[GENERATOR] = np.stack([each.get_state().numpy() for each in generators])
            return Inferred(_arrays(inferred.answers), _arrays(inferred.states) | drawn)

    def weights(self) -> str:
        """A digest of the module's parameters and buffers."""
        return self._weights

    def devices(self) -> dict[str, DeviceUse]:
        """The bytes of its parameters and buffers, each storage once; of a GPU all that PyTorch
        has set aside by now."""
        held = storage_bytes([*self.module.parameters(), *self.module.buffers()])
        return {device: _device_use(device, size) for device, size in held.items()}


def _device_use(device: str, size_bytes: int) -> DeviceUse:
    if not device.startswith("cuda"):
        return DeviceUse(size_bytes)
    reserved = torch.cuda.max_memory_reserved(device)
    total = torch.cuda.get_device_properties(device).total_memory
    return DeviceUse(max(size_bytes, reserved), total=total)


def _generator(state: npt.NDArray[Any]) -> torch.Generator:
    generator = torch.Generator()
    generator.set_state(_shared(state))
    return generator


def _tensors(values: Any, device: torch.device) -> Any:
    """`values` with tensors in the place of arrays."""
    if isinstance(values, dict):
        return {key: _tensors(value, device) for key, value in values.items()}
    if isinstance(values, np.ndarray):
        try:
            return _shared(values).to(device)
        except TypeError:
            return values
    return values


class _Writable:
    """An array's memory, said to be writable."""

    def __init__(self, values: npt.NDArray[Any]) -> None:
        interface = values.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}
        self._values = values


def _shared(values: npt.NDArray[Any]) -> torch.Tensor:
    """A tensor of the array's memory; copied is what PyTorch cannot address.

    Raises TypeError for a dtype that it does not have.
    """
    if not values.dtype.isnative:
        values = values.astype(values.dtype.newbyteorder("="))
    if any(stride < 0 or stride % values.itemsize for stride in values.strides):
        values = np.ascontiguousarray(values)
    if not values.flags.writeable and values.size:
        # PyTorch has no read-only tensors and warns of each, for all threads of the process.
        values = np.asarray(_Writable(values))
    return torch.from_numpy(values)


def _arrays(values: Any) -> Any:
    """`values` with arrays in the place of tensors."""
    if isinstance(values, Mapping):
        return {key: _arrays(value) for key, value in values.items()}
    if isinstance(values, torch.Tensor):
        return (values.float() if values.dtype == torch.bfloat16 else values).cpu().numpy()
    return values


def _digest(module: torch.nn.Module) -> str:
    digest = hashlib.blake2b(digest_size=32)
    for name, values in sorted(_named(module), key=lambda named: named[0]):
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
        flat = values.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _named(module: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
