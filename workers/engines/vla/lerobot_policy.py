"""LeRobot's policies, registered as `lerobot`.

LeRobot asks for versions of its own, so that its stage has an environment of its own (`python`
of the stage). What its processors do before and after the model is theirs: names, resizing,
normalisation, tokens.
"""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pydantic
import torch

from protocol.errors import InvalidRequest, ModelFileError
from workers.engines.vla.lerobot_heads import Head, head_of
from workers.engines.vla.policy import Batch, State
from workers.engines.vla.torch_policy import TorchBatch, TorchInferred, TorchOptions, TorchPolicy

PROMPT = "task"
"""LeRobot's name for what a robot is to do."""


class LeRobotOptions(TorchOptions):
    """Which policy, and how clients name what it senses."""

    path: str | None = None
    """What `save_pretrained` wrote: a folder, or a repository of the Hugging Face hub."""
    revision: str | None = None
    """Of that repository."""
    config: dict[str, Any] | None = None
    """Instead of a path, what a `config.json` holds: random weights, the same for each `seed`."""
    rename: dict[str, str] = {}
    """LeRobot's names for what clients call otherwise; `prompt` is always its `task`."""

    @pydantic.model_validator(mode="after")
    def _can_be_loaded(self) -> LeRobotOptions:
        if (self.path is None) == (self.config is None):
            raise ValueError("needs either a path or a config")
        if self.revision is not None and self.path is None:
            raise ValueError("a revision is of a path")
        if importlib.util.find_spec("lerobot") is None:
            raise ValueError("lerobot is not installed in the stage's environment")
        return self


class LeRobotPolicy(TorchPolicy):
    """A policy of LeRobot: its chunk for each observation, as `predict_action_chunk` has it."""

    Options: ClassVar[type[pydantic.BaseModel]] = LeRobotOptions

    _head: Head

    def load(self) -> dict[str, Any]:
        """Load policy and processors, and ask it once."""
        metadata = super().load()
        example = {
            name: np.zeros((1, *feature.shape), np.float32)
            for name, feature in self._config.input_features.items()
        }
        states = {name: values[np.newaxis] for name, values in self.initial_state({}).items()}
        self.infer(Batch(1, example, states))
        return metadata

    def build(self) -> torch.nn.Module:
        """The policy with its weights, and its processors."""
        from lerobot.policies.factory import get_policy_class, make_pre_post_processors

        logging.getLogger("lerobot").setLevel(logging.WARNING)
        try:
            folder = None if self.options.path is None else self._folder(self.options.path)
            config = self._config = self._read_config(folder)
            self._head = head_of(config)
            self._before, self._after = make_pre_post_processors(
                config,
                pretrained_path=folder,
                preprocessor_overrides={"device_processor": {"device": config.device}},
            )
            kind = get_policy_class(config.type)
            if folder is not None:
                policy = kind.from_pretrained(folder, config=config)
            else:
                torch.manual_seed(self.options.seed)
                policy = kind(config)
        except Exception as error:
            # What comes of a file that is not as it should be differs by library and policy.
            raise ModelFileError(f"{self._name}: {type(error).__name__}: {error}") from error
        module: torch.nn.Module = policy
        return module

    def metadata(self) -> dict[str, Any]:
        """Kind and form of the policy, and what it senses by LeRobot's names."""
        config = self._config
        return {
            "policy": f"lerobot/{config.type}",
            "action_horizon": self._head.horizon,
            "n_action_steps": config.n_action_steps,
            "action_dim": config.action_feature.shape[0],
            "observation": {name: list(f.shape) for name, f in config.input_features.items()},
        }

    def initial_state(self, settings: dict[str, Any]) -> State:
        """Random numbers and observations, as far as the policy's kind has them.

        The setting `seed` is what its random numbers begin with.
        """
        if unknown := settings.keys() - {"seed"}:
            raise InvalidRequest("there is no such setting", field=f"settings.{min(unknown)}")
        random = self.random_state(settings)
        return {**(random if self._head.draws else {}), **self._head.initial_state()}

    def act(self, batch: TorchBatch) -> TorchInferred:
        """Through the processor before, the policy, and the processor after it."""
        prepared = self._before(self._observation(batch))
        chunks, states = self._head.act(self.module, prepared, batch)
        # The processor after it is made for single actions.
        actions = self._after(chunks.reshape(-1, chunks.shape[-1])).reshape(chunks.shape)
        return TorchInferred({"actions": actions}, states)

    def _observation(self, batch: TorchBatch) -> dict[str, Any]:
        """By LeRobot's names, as it prepares what robots sense. Raises InvalidRequest for what
        is missing or has another form."""
        rename = {"prompt": PROMPT, **self.options.rename}
        given = {rename.get(name, name): value for name, value in batch.observations.items()}
        observation: dict[str, Any] = {PROMPT: _prompts(given.get(PROMPT), batch.size)}
        images = self._config.image_features
        for name, feature in self._config.input_features.items():
            if name in given:
                convert = _image if name in images else _vector
                observation[name] = convert(name, given[name], tuple(feature.shape))
            elif name not in images or self._head.all_images:
                raise InvalidRequest(f"the observation has no {name}", field=name)
        if images and observation.keys().isdisjoint(images):
            raise InvalidRequest(f"the observation has none of {', '.join(images)}")
        return observation

    def _read_config(self, folder: str | None) -> Any:
        import draccus
        from lerobot.configs.policies import PreTrainedConfig

        if folder is None:
            config = draccus.decode(PreTrainedConfig, self.options.config)
        else:
            config = PreTrainedConfig.from_pretrained(folder)
            if hasattr(config, "pretrained_backbone_weights"):
                # Those are about to be replaced, and not worth a download.
                config.pretrained_backbone_weights = None
        config.device = str(self.device)
        return config

    def _folder(self, path: str) -> str:
        if Path(path).expanduser().is_dir():
            return str(Path(path).expanduser())
        from huggingface_hub import snapshot_download

        found: str = snapshot_download(
            path, revision=self.options.revision, allow_patterns=["*.json", "*.safetensors"]
        )
        return found

    @property
    def _name(self) -> str:
        return self.options.path or "the policy of options.config"


def _prompts(given: Any, size: int) -> list[str]:
    prompts = [""] * size if given is None else given
    if not isinstance(prompts, list) or not all(isinstance(each, str) for each in prompts):
        raise InvalidRequest(f"{PROMPT} is a text", field=PROMPT)
    return prompts


def _vector(name: str, values: Any, shape: tuple[int, ...]) -> torch.Tensor:
    if not isinstance(values, torch.Tensor) or tuple(values.shape[1:]) != shape:
        raise InvalidRequest(f"{name} is an array of shape {shape}", field=name)
    return values.to(torch.float32)


def _image(name: str, values: Any, shape: tuple[int, ...]) -> torch.Tensor:
    """Bytes are height x width x colours, as cameras give them; floats are colours x height x
    width and from 0 to 1, as LeRobot has them."""
    colours = shape[0]
    if isinstance(values, torch.Tensor) and values.ndim == 4:
        if values.dtype == torch.uint8 and values.shape[3] == colours:
            return values.permute(0, 3, 1, 2).contiguous().to(torch.float32) / 255
        if values.is_floating_point() and values.shape[1] == colours:
            return values.to(torch.float32)
    raise InvalidRequest(
        f"{name} is an image of height x width x {colours} bytes, or {colours} x height x width "
        "floats",
        field=name,
    )
