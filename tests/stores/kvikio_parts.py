"""The nvme store with KvikIO under the fake CUDA driver; importable by the suite's processes."""

from __future__ import annotations

import importlib

from tests.stores.nvme_parts import open_nvme
from tiered_kv.contracts import BlockStore
from tiered_kv.testing.conformance.blocks import StoreArguments


def open_kvikio(arguments: StoreArguments) -> BlockStore:
    """KvikIO between host memory and the disk."""
    importlib.import_module("tests.fakes.loaded_cuda_driver")
    return open_nvme(arguments.with_(extra=(("io", "kvikio"),)))


def open_direct(arguments: StoreArguments) -> BlockStore:
    """KvikIO between the engine's device and the disk."""
    importlib.import_module("tests.fakes.loaded_cuda_driver")
    return open_nvme(arguments.with_(extra=(("gpu_direct", "on"),)))
