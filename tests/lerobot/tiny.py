"""Policies of LeRobot with few, random weights, written as their authors would publish them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import draccus
import torch
from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, SmolVLMConfig, SmolVLMProcessor
from transformers.models.smolvlm.image_processing_smolvlm import SmolVLMImageProcessor
from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor

JOINTS, ACTIONS = 6, 4
HEIGHT, WIDTH = 48, 64
TOP, WRIST = "observation.images.top", "observation.images.wrist"

FORM: dict[str, Any] = {
    "device": "cpu",
    "input_features": {
        "observation.state": {"type": "STATE", "shape": [JOINTS]},
        TOP: {"type": "VISUAL", "shape": [3, HEIGHT, WIDTH]},
        WRIST: {"type": "VISUAL", "shape": [3, HEIGHT, WIDTH]},
    },
    "output_features": {"action": {"type": "ACTION", "shape": [ACTIONS]}},
}

ACT: dict[str, Any] = {
    **FORM,
    "type": "act",
    "chunk_size": 8,
    "n_action_steps": 6,
    "dim_model": 32,
    "n_heads": 2,
    "dim_feedforward": 64,
    "n_encoder_layers": 1,
    "n_decoder_layers": 1,
    "n_vae_encoder_layers": 1,
    "latent_dim": 8,
    "pretrained_backbone_weights": None,
}

DIFFUSION: dict[str, Any] = {
    **FORM,
    "type": "diffusion",
    "n_obs_steps": 2,
    "horizon": 8,
    "n_action_steps": 4,
    "drop_n_last_frames": 3,
    "crop_shape": [40, 56],
    "crop_is_random": False,
    "down_dims": [16, 32],
    "n_groups": 4,
    "diffusion_step_embed_dim": 16,
    "spatial_softmax_num_keypoints": 4,
    "num_train_timesteps": 10,
    "num_inference_steps": 4,
}

SMOLVLA: dict[str, Any] = {
    **FORM,
    "type": "smolvla",
    "chunk_size": 8,
    "n_action_steps": 8,
    "max_state_dim": 8,
    "max_action_dim": 8,
    "resize_imgs_with_padding": [32, 32],
    "tokenizer_max_length": 8,
    "num_steps": 3,
    "num_vlm_layers": 2,
    "expert_width_multiplier": 0.5,
}

STATISTICS: dict[str, dict[str, torch.Tensor]] = {
    "observation.state": {
        "mean": torch.arange(JOINTS) / 10,
        "std": torch.full((JOINTS,), 2.0),
        "min": torch.full((JOINTS,), -3.0),
        "max": torch.full((JOINTS,), 5.0),
    },
    "action": {
        "mean": torch.arange(ACTIONS) - 1.0,
        "std": torch.full((ACTIONS,), 3.0),
        "min": torch.full((ACTIONS,), -2.0),
        "max": torch.full((ACTIONS,), 4.0),
    },
    **{
        name: {
            "mean": torch.full((3, 1, 1), 0.4),
            "std": torch.full((3, 1, 1), 0.3),
            "min": torch.zeros((3, 1, 1)),
            "max": torch.ones((3, 1, 1)),
        }
        for name in (TOP, WRIST)
    },
}


def save(config: dict[str, Any], folder: Path) -> Path:
    """Write the policy and its processors to `folder`, by LeRobot's own means."""
    if config["type"] == "smolvla":
        config = {**config, "vlm_model_name": str(save_vlm(folder / "vlm"))}
    parsed = draccus.decode(PreTrainedConfig, config)
    torch.manual_seed(1)
    policy = get_policy_class(parsed.type)(parsed)
    before, after = make_pre_post_processors(parsed, dataset_stats=STATISTICS)
    for part in (policy, before, after):
        part.save_pretrained(folder)
    return folder


def save_vlm(folder: Path) -> Path:
    """Write what SmolVLA takes from its vision-language model's repository: config, tokenizer and
    image processor."""
    words = "<unk> <pad> <image> <fake_token_around_image> <global-img> <end_of_utterance>".split()
    vocabulary = [*words, *"pick up the red cup now and put it down".split()]
    tokens = Tokenizer(WordLevel({word: i for i, word in enumerate(vocabulary)}, "<unk>"))
    tokens.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        unk_token="<unk>",
        pad_token="<pad>",
        extra_special_tokens={
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
    )
    processor = SmolVLMProcessor(
        image_processor=SmolVLMImageProcessor(),
        tokenizer=tokenizer,
        video_processor=SmolVLMVideoProcessor(),
    )
    processor.save_pretrained(folder)
    config = SmolVLMConfig(
        text_config={
            "model_type": "llama",
            "vocab_size": len(vocabulary),
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "pad_token_id": 1,
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 8,
        },
        scale_factor=2,
        pad_token_id=1,
    )
    config.save_pretrained(folder)
    return folder
