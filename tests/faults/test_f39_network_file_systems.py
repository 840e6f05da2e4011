"""F39: LMDB is not put on a file system that machines share, nor on one in user space, unless
somebody insists."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.stores.lmdb_parts import open_into_map, open_lmdb
from tests.stores.nvme_parts import open_nvme
from tiered_kv.contracts import BlockStore
from tiered_kv.errors import TieredKVError, UnsupportedError
from tiered_kv.index import directory, writemap
from tiered_kv.testing.conformance.blocks import StoreArguments, assert_held, put

Opener = Callable[[StoreArguments], BlockStore]
MAGIC = {"NFS": 0x6969, "CIFS": 0xFF534D42, "SMB2": 0xFE534D42, "FUSE": 0x65735546}


def pretend(monkeypatch: pytest.MonkeyPatch, magic: int) -> None:
    for module in (directory, writemap):
        monkeypatch.setattr(module, "file_system_magic", lambda _: magic)


@pytest.mark.parametrize("opener", [open_lmdb, open_into_map, open_nvme])
@pytest.mark.parametrize("name", list(MAGIC))
def test_f39_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opener: Opener, name: str
) -> None:
    arguments = StoreArguments(tmp_path / "tier")
    pretend(monkeypatch, MAGIC[name])
    refusals: list[TieredKVError] = []
    try:
        opener(arguments).close()
    except TieredKVError as error:
        refusals.append(error)
    print(refusals)
    assert [type(error) for error in refusals] == [UnsupportedError]
    assert name in str(refusals[0])
    assert list(tmp_path.rglob("data.mdb")) == []


@pytest.mark.parametrize("opener", [open_lmdb, open_into_map])
@pytest.mark.parametrize("name", list(MAGIC))
def test_f39_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opener: Opener, name: str
) -> None:
    pretend(monkeypatch, MAGIC[name])
    store = opener(StoreArguments(tmp_path / "tier", extra=(("force", True),)))
    assert store.stat().modes["writemap"].startswith("off")
    put(store, range(3))
    assert_held(store, range(3))
    store.close()


def test_f39_the_file_system_is_asked_for_real(tmp_path: Path) -> None:
    assert directory.file_system_magic(Path("/proc")) == 0x9FA0
    assert directory.file_system_magic(tmp_path) not in {0, *MAGIC.values()}
    with pytest.raises(OSError, match="No such file") as raised:
        directory.file_system_magic(tmp_path / "missing")
    assert raised.value.errno == errno.ENOENT
