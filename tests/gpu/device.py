"""The CUDA device that the tests here run on."""

from __future__ import annotations

import pytest
import torch

DEVICE = "cuda:0"


def need_device() -> torch.device:
    """Called when a test module is imported: without a device all of it is skipped, and why."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device here", allow_module_level=True)
    return torch.device(DEVICE)
