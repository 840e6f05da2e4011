"""F20: a disk that is really full, of bytes or of inodes, costs room; it comes back by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.full_disk import Batches
from tests.faults.namespaces import run_mounted
from tests.faults.tracing import injected
from tests.stores.nvme_parts import MIB, open_nvme, open_striped, segment_files, stripes_of
from tiered_kv.testing.conformance.blocks import StoreArguments
from tiered_kv_nvme import stripes

pytestmark = pytest.mark.faults

MODULE = "tests.faults.full_disk"


@pytest.mark.parametrize("kind", ["nvme", "lmdb"])
@pytest.mark.parametrize("file_system", ["ext4", "tmpfs"])
@pytest.mark.parametrize("scenario", ["no_bytes", "no_inodes"])
def test_f20_a_full_disk_refuses_and_recovers(
    scenario: str, file_system: str, kind: str, tmp_path: Path
) -> None:
    arguments = (scenario, kind, str(tmp_path), file_system)
    said = run_mounted(MODULE, *arguments, image=file_system == "ext4")
    assert said.endswith("done\n")


def test_f20_one_full_disk_does_not_stop_the_others(tmp_path: Path) -> None:
    arguments = ("one_full_of_two", "nvme", str(tmp_path), "ext4")
    assert run_mounted(MODULE, *arguments, image=True).endswith("done\n")


@pytest.mark.parametrize("reason", ["ENOSPC", "EDQUOT"])
def test_f20_a_quota_costs_one_try_each_while(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system has room, and yet no file can be made: blocks go on in the segments that
    are there, and the next file is tried later."""
    monkeypatch.setattr(stripes, "RETRY_SECONDS", 3600.0)
    arguments = StoreArguments(tmp_path / "tier")
    store = open_nvme(arguments)
    batches = Batches(store)
    assert batches.put(2) == {True: 2}
    before = len(segment_files(arguments.path))
    with injected(f"fallocate:error={reason}", log=tmp_path / "log") as hits:
        outcomes = batches.put(20)
    held = batches.check()
    after = len(segment_files(arguments.path))
    print(f"{len(hits)} files refused, {outcomes}, {held} blocks held in {after} segments")
    assert len(hits) == 1
    assert outcomes == {True: 20}
    assert after == before
    assert held >= 8
    store.close()
    monkeypatch.setattr(stripes, "RETRY_SECONDS", 0.0)
    store = batches.store = open_nvme(arguments)
    assert batches.put(20) == {True: 20}
    assert store.stat().blocks > held
    assert len(segment_files(arguments.path)) > before
    store.close()


def test_f20_a_full_directory_is_left_alone_and_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stripes, "RETRY_SECONDS", 0.0)
    arguments = StoreArguments(tmp_path / "tier", 64 * MIB)
    store = open_striped(arguments)
    batches = Batches(store)
    third = stripes_of(arguments.path)[2]
    named = [third / f"segment-{(2 << 26) + number:06d}" for number in range(40)]
    with injected("openat:error=ENOSPC", paths=named, log=tmp_path / "log") as hits:
        outcomes = batches.put(30)
    files = [len(segment_files(path)) for path in stripes_of(arguments.path)]
    print(f"{len(hits)} files refused, {outcomes}, segments {files}")
    assert hits
    assert outcomes == {True: 30}
    assert files[2] == 0
    assert batches.put(30) == {True: 30}
    files = [len(segment_files(path)) for path in stripes_of(arguments.path)]
    print(f"then {files}, {batches.check()} blocks held")
    assert files[2] > 0
    store.close()
