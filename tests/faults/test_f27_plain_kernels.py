"""F27: kernels and file systems that lack a call cost speed at most."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.namespaces import run_mounted
from tests.faults.tracing import injected
from tests.stores.lmdb_parts import open_into_map, open_lmdb
from tests.stores.nvme_parts import open_nvme, open_striped
from tiered_kv.contracts import BlockStore
from tiered_kv.errors import TieredKVError
from tiered_kv.memory import HostBlockPool
from tiered_kv.testing.conformance.blocks import StoreArguments, assert_held, put

pytestmark = pytest.mark.faults

STORES: dict[str, Callable[[StoreArguments], BlockStore]] = {
    "nvme": open_nvme,
    "striped": open_striped,
    "lmdb": open_lmdb,
    "lmdb into the map": open_into_map,
}
XATTR = ("setxattr", "fsetxattr", "getxattr", "fgetxattr", "fadvise64")


@contextmanager
def borne() -> Iterator[None]:
    """What is refused inside is nobody's error."""
    try:
        yield
    except (OSError, TieredKVError) as error:
        raise AssertionError(f"a call that was refused came out as {error!r}") from error


@pytest.mark.parametrize("reason", ["EOPNOTSUPP", "EINVAL"])
@pytest.mark.parametrize("kind", STORES)
def test_f27_no_space_can_be_taken_ahead(kind: str, reason: str, tmp_path: Path) -> None:
    """`fallocate` is refused by the kernel, and the C library's own way of it by direct I/O; so
    are extended attributes, if anybody asked for them."""
    arguments = StoreArguments(tmp_path / "tier")
    calls = [f"{name}:error={reason}" for name in ("fallocate", *XATTR)]
    with injected(*calls, log=tmp_path / "log") as hits, borne():
        store = STORES[kind](arguments)
        put(store, range(32))
        assert_held(store, range(32))
        modes = dict(store.stat().modes)
    print(f"{kind}: {len(hits)} calls refused; in effect: {modes}")
    if kind == "lmdb":
        assert not hits, "it takes no space ahead"
    else:
        assert hits
    if kind in {"nvme", "striped"}:
        assert modes["space"] == "sparse"
    if kind == "lmdb into the map":
        # Where the kernel does not know the call, the C library writes to every block.
        assert modes["writemap"].startswith("off (" if reason == "EINVAL" else "on")
    store.close()
    store = STORES[kind](arguments)
    assert_held(store, range(32))
    store.close()


def test_f27_no_nameless_files(tmp_path: Path) -> None:
    """`O_TMPFILE` is refused: a named file is tried in its place, and is gone afterwards."""
    arguments = StoreArguments(tmp_path / "tier")
    open_nvme(arguments).close()
    refused = "openat:error=EOPNOTSUPP:when=1"
    with injected(refused, paths=[arguments.path], log=tmp_path / "log") as hits, borne():
        store = open_nvme(arguments)
    put(store, range(8))
    assert_held(store, range(8))
    mode = store.stat().modes["io"]
    print(f"{len(hits)} calls refused, the I/O is {mode}: {hits.calls}")
    assert any("O_TMPFILE" in call for call in hits.calls)
    assert mode == "direct"
    assert not list(arguments.path.glob("*.tmp"))
    store.close()


@pytest.mark.parametrize(
    ("what", "kind", "mode"),
    [
        ("ramfs", "nvme", "buffered (the file system refuses O_DIRECT)"),
        ("journal", "nvme", "buffered (the file system takes O_DIRECT but buffers silently)"),
        ("journal", "lmdb", "'writemap': 'off'"),
    ],
)
def test_f27_no_direct_io(what: str, kind: str, mode: str, tmp_path: Path) -> None:
    """For real: ramfs refuses it at open, and does not say how large it is; ext4 with journalled
    data takes it, and buffers."""
    module = "tests.faults.plain_file_systems"
    said = run_mounted(module, what, kind, str(tmp_path), image=True)
    assert "in effect:" in said
    assert mode in said


def test_f27_no_advice_on_memory(tmp_path: Path) -> None:
    """`madvise` knows nothing: the host pool works, and says what it lacks."""
    with injected("madvise:error=EINVAL", log=tmp_path / "log") as hits, borne():
        pool = HostBlockPool(128, 0, 64 * 1024)
        modes = pool.state().modes()
    print(f"{len(hits)} calls refused: {modes}")
    assert len(hits) >= 3
    view = pool.as_array(pool.slots - 1)
    view[:] = 7
    assert int(view.sum()) == 7 * view.nbytes
    assert any("can't prefault" in text for text in modes.values())
    pool.close()
