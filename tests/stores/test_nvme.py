"""The nvme store: the shared behaviour."""

from __future__ import annotations

from tests.stores.nvme_parts import open_nvme
from tests.stores.store_behaviour import StoreBehaviour


class TestNvmeStore(StoreBehaviour):
    opener = staticmethod(open_nvme)
