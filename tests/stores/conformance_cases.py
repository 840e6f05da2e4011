"""Our stores as the conformance suite wants them."""

from __future__ import annotations

import os

from tests.stores.lmdb_parts import look_after_lmdb, look_after_map, open_into_map, open_lmdb
from tests.stores.nvme_parts import (
    look_after_nvme,
    look_after_striped,
    open_nvme,
    open_striped,
)
from tiered_kv.testing.conformance.stores import StoreCase

KILLS = int(os.environ.get("TIERED_KV_TEST_KILLS", "3"))
"""Rounds of the crash tests: a few per commit, hundreds at night."""
EXAMPLES = 200 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 6

NVME = StoreCase(open_nvme, kills=KILLS, examples=EXAMPLES, open_maintenance=look_after_nvme)
STRIPED = StoreCase(
    open_striped, kills=KILLS, examples=EXAMPLES, open_maintenance=look_after_striped
)
LMDB = StoreCase(open_lmdb, kills=KILLS, examples=EXAMPLES, open_maintenance=look_after_lmdb)
LMDB_MAP = StoreCase(open_into_map, kills=KILLS, examples=EXAMPLES, open_maintenance=look_after_map)
