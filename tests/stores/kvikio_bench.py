"""`tiered-kv bench` where blocks can pass host memory by: real KvikIO under the fake driver."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.fakes.cuda_driver import FakeCudaDriver
from tests.fakes.kvikio_process import perform
from tiered_kv.cli import main

DEPLOYMENT = """\
tiers:
  - {{name: host, type: cpu, capacity: 32MiB}}
  - {{name: ssd, type: nvme, path: {0}/ssd, capacity: 256MiB, min_free: 0%, gpu_direct: on}}
limits: {{staging: 2MiB}}
"""


def bench(folder: Path, driver: FakeCudaDriver | None) -> Mapping[str, object]:
    """Both ways, each with and without verification."""
    file = folder / "deployment.yaml"
    file.write_text(DEPLOYMENT.format(folder))
    small = ("--size", "1MiB", "--rounds", "1", "--block-size", "64KiB", "--tier", "ssd")
    sys.argv = ["tiered-kv", "bench", str(file), *small, "--json", "-"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main()
    (tier,) = json.loads(printed.getvalue())["tiers"]
    assert tier["problem"] is None, tier
    (size,) = tier["sizes"]
    found = [(f["name"], f["verify"], f["limit"]) for f in size["figures"] if f["kind"] == "chain"]
    for name in ("ssd->gpu", "ssd->cpu->gpu"):
        assert (name, "always", "disk read") in found
        assert (name, "never", "disk read") in found
    assert ("gpu->ssd", None, "disk write") in found
    assert ("gpu->cpu->ssd", None, "disk write") in found
    assert [path for path in folder.iterdir() if path.name.startswith(".tiered-kv")] == []
    return {"chains": len(found), "io": tier["modes"]["ssd->gpu"]["io"]}


if __name__ == "__main__":
    perform({"bench": bench})
