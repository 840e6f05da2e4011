"""A striped tier by real KvikIO's device path: a scenario for a child process.

`python -m tests.stores.kvikio_striped striped FOLDER`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from tests.fakes.cuda_driver import FakeCudaDriver
from tests.fakes.kvikio_process import perform
from tests.stores.kvikio_direct import Rig, key, sized, statuses, the
from tests.stores.nvme_parts import MIB
from tiered_kv.values import BlockStatus
from tiered_kv_nvme import stripes
from tiered_kv_nvme.spreading import place_of

OK, MISSING = BlockStatus.OK, BlockStatus.MISSING


def striped(folder: Path, driver: FakeCudaDriver | None) -> Mapping[str, object]:
    """A batch goes to both directories and back; with one of them away its blocks are missing, and
    the others' bytes are right."""
    stripes.RETRY_SECONDS = 0.0
    paths = (folder / "a", folder / "b")
    rig = Rig(folder, sized(MIB), areas=16, paths=paths)
    before = the(driver).copies()
    originals = [rig.bytes_of(i) for i in range(12)]
    assert statuses(rig.save(range(12))) == [OK] * 12
    with rig.store.reading([key(n) for n in range(12)], [MIB] * 12) as batch:
        where = {one.position: place_of(one.spot.extent.number) for one in batch.found}
    assert statuses(rig.load(range(12), range(12, 24))) == [OK] * 12
    assert [rig.bytes_of(12 + i) for i in range(12)] == originals
    paths[1].rename(folder / "elsewhere")
    assert statuses(rig.save([12], offset=1000)) == [OK]
    assert rig.store.contains([key(1012)]) == [True]
    stripe_is_out = rig.store.stripes.failed(1)
    assert stripe_is_out
    expected = [OK if where[i] == 0 else MISSING for i in range(12)]
    assert statuses(rig.load(range(12), range(12, 24))) == expected
    assert statuses(rig.save(range(12), offset=2000)) == [OK] * 12
    (folder / "elsewhere").rename(paths[1])
    assert statuses(rig.load(range(12), range(12, 24))) == [OK] * 12
    assert [rig.bytes_of(12 + i) for i in range(12)] == originals
    copies = the(driver).copies() - before
    rig.close()
    count = Counter(where.values())
    assert count == {0: 6, 1: 6}
    return {"device copies": copies, "in the directories": dict(count)}


if __name__ == "__main__":
    perform({"striped": striped})
