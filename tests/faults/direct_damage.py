"""Damaged blocks on the direct way between the disk and the engine's device, in a process of their
own."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

from tests.fakes.cuda_driver import FakeCudaDriver
from tests.fakes.kvikio_process import perform
from tests.stores.kvikio_direct import BLOCKS, CORRUPT, MISSING, OK, Rig, key, sized, statuses
from tests.stores.nvme_parts import segment_files
from tiered_kv.contracts import VerifyMode
from tiered_kv.engine.verification import TierVerification
from tiered_kv.stats import StatsRecorder
from tiered_kv.values import ChecksumKind

LENGTH = 65_536
HALF = BLOCKS // 2


def overwrite(folder: Path, block: bytes, start: int, data: bytes) -> None:
    """Bytes from `start` on, where a block lies on the disk."""
    for file in segment_files(folder):
        at = file.read_bytes().find(block)
        if at >= 0:
            with file.open("r+b") as out:
                out.seek(at + start)
                out.write(data)
            return
    raise AssertionError("the block is in no file")


def judge(rig: Rig, bad: list[int], originals: list[bytes]) -> None:
    """Load the first half into the second: what is bad is found, not a byte of it arrives, it is
    gone from the store and can be stored again; the others are right."""
    before = [rig.bytes_of(HALF + i) for i in range(HALF)]
    found = statuses(rig.load(range(HALF), range(HALF, BLOCKS)))
    assert found == [CORRUPT if i in bad else OK for i in range(HALF)], found
    for i in range(HALF):
        right = before[i] if i in bad else originals[i]
        assert rig.bytes_of(HALF + i) == right, i
    assert rig.store.contains([key(i) for i in range(HALF)]) == [i not in bad for i in range(HALF)]
    assert set(statuses(rig.load(bad, bad))) == {MISSING}
    assert set(statuses(rig.save(bad))) == {OK}
    assert set(statuses(rig.load(range(HALF), range(HALF, BLOCKS)))) == {OK}
    assert [rig.bytes_of(HALF + i) for i in range(HALF)] == originals


def flipped(folder: Path) -> int:
    """One bit of each of many blocks, anywhere, with both kinds of checksum."""
    choice = random.Random(5)
    found = 0
    for turn in range(8):
        rig = Rig(folder / str(turn), sized(LENGTH))
        originals = [rig.bytes_of(i) for i in range(HALF)]
        if turn % 2:
            rig.put(rig.store, range(HALF), ChecksumKind.XXH3)
        else:
            assert set(statuses(rig.save(range(HALF)))) == {OK}
        bad = [i for i in range(HALF) if i % 3]
        for i in bad:
            place = choice.randrange(LENGTH)
            changed = bytes([originals[i][place] ^ (1 << choice.randrange(8))])
            overwrite(rig.arguments.path, originals[i], place, changed)
        judge(rig, bad, originals)
        found += len(bad)
        rig.close()
    return found


def damaged(folder: Path) -> int:
    """Zeroed, torn, another block's bytes, a foreign tail."""
    rig = Rig(folder, sized(LENGTH))
    originals = [rig.bytes_of(i) for i in range(HALF)]
    other = rig.bytes_of(HALF)
    assert set(statuses(rig.save(range(HALF)))) == {OK}
    overwrite(rig.arguments.path, originals[1], 0, bytes(LENGTH))
    overwrite(rig.arguments.path, originals[4], LENGTH // 2, other[LENGTH // 2 :])
    overwrite(rig.arguments.path, originals[6], 0, originals[7])
    overwrite(rig.arguments.path, originals[9], LENGTH - 100, other[-100:])
    judge(rig, [1, 4, 6, 9], originals)
    rig.close()
    return 4


def verified_first(folder: Path) -> int:
    """`verify: first`: compared by the first load alone, and again when it was stored anew;
    `never`: not compared."""
    stats = StatsRecorder("rank 0")
    first = TierVerification(VerifyMode.FIRST, "ssd", stats)
    rig = Rig(folder / "first", sized(LENGTH), verification=first)
    originals = [rig.bytes_of(i) for i in range(HALF)]
    assert set(statuses(rig.save(range(HALF)))) == {OK}
    overwrite(rig.arguments.path, originals[3], 7, bytes([originals[3][7] ^ 1]))
    judge(rig, [3], originals)
    assert stats.snapshot().tier("ssd").unverified == HALF - 1
    rotten = bytes([originals[5][7] ^ 1])
    overwrite(rig.arguments.path, originals[5], 7, rotten)
    assert statuses(rig.load([5], [HALF])) == [OK]
    assert rig.bytes_of(HALF) == originals[5][:7] + rotten + originals[5][8:]
    rig.close()

    never = TierVerification(VerifyMode.NEVER, "ssd", stats)
    rig = Rig(folder / "never", sized(LENGTH), verification=never)
    assert statuses(rig.save([0])) == [OK]
    overwrite(rig.arguments.path, originals[0], 0, bytes([originals[0][0] ^ 1]))
    assert statuses(rig.load([0], [HALF])) == [OK]
    rig.close()
    return 1


def every_damage(folder: Path, _: FakeCudaDriver | None) -> Mapping[str, object]:
    """How many bad blocks were found; none was served."""
    return {
        "found": {
            "flipped": flipped(folder / "flipped"),
            "damaged": damaged(folder / "damaged"),
            "verified first": verified_first(folder / "first"),
        }
    }


if __name__ == "__main__":
    perform({"every_damage": every_damage})
