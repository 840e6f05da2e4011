"""Child process of the durability tests: stores one batch, step by step, and closes.

`python -m tests.stores.traced_life PATH DURABILITY`; each step is announced on stdout, which is how
it is found in the trace.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.stores.nvme_parts import open_nvme
from tiered_kv.testing.conformance.blocks import (
    StoreArguments,
    aligned_copy,
    content,
    new_block,
    reserved,
)

STEPS = ("open", "reserve", "write", "publish", "close", "end")


def step(name: str) -> None:
    os.write(1, f"step {name}\n".encode())


def main(path: Path, durability: str) -> None:
    step("open")
    store = open_nvme(StoreArguments(path, extra=(("durability", durability),)))
    step("reserve")
    places = reserved(store, [new_block(n) for n in range(8)])
    step("write")
    store.write(places, [aligned_copy(content(n)) for n in range(8)])
    step("publish")
    store.publish(places)
    step("close")
    store.close()
    step("end")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
