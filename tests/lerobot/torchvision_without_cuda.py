"""Lets torchvision be imported beside a PyTorch without CUDA.

The torchvision that the package index has for Linux is built for CUDA: beside another PyTorch
its operators cannot be loaded, and it fails to be imported where it describes two of them. No
policy uses them. `scripts/setup lerobot` puts this into the test environment, which imports it
at its start.
"""

import importlib.abc
import sys


class _Declaring(importlib.abc.MetaPathFinder):
    """Declares the two operators when torchvision is about to be imported."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != "torchvision":
            return None
        sys.meta_path.remove(self)
        import torch

        if torch.version.cuda is None:
            for operator in ("nms", "qnms"):
                torch.library.define(
                    f"torchvision::{operator}",
                    "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
                )
        return None


sys.meta_path.insert(0, _Declaring())
