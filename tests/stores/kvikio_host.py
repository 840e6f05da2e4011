"""Host memory by way of real KvikIO: scenarios for child processes.

`python -m tests.stores.kvikio_host SCENARIO FOLDER`
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.fakes.kvikio_process import perform
from tests.stores.nvme_parts import MIB, open_nvme, random_block, segment_files, slot
from tiered_kv.checksum import BlockChecksum
from tiered_kv.contracts import NewBlock
from tiered_kv.errors import UnsupportedError
from tiered_kv.testing.conformance.blocks import (
    StoreArguments,
    content,
    get,
    key,
    keys,
    put,
    reserved,
)
from tiered_kv.values import PAGE_BYTES, BlockKey, BlockStatus
from tiered_kv_nvme import kvikio_io
from tiered_kv_nvme.headers import SlotEntry
from tiered_kv_nvme.kvikio_io import Kvikio

if TYPE_CHECKING:
    from tests.fakes.cuda_driver import FakeCudaDriver
    from tiered_kv.contracts import BlockStore

SIZES = (
    *(1, 511, 512, 4095, 4096, 4097, 65_536, 66_048, 262_144 + 17),
    *(MIB - 1, 3_098_112, 4 * MIB + 1, 8 * MIB),
)
HOST_READS = "cuPointerGetAttributes"
"""KvikIO asks this once for each call."""


def tier(folder: Path, engine: str, **settings: Any) -> StoreArguments:
    extra = {"segment": 9 * MIB, "io": engine} | settings
    return StoreArguments(folder / "tier", 160 * MIB, extra=tuple(extra.items()))


def calls(driver: FakeCudaDriver | None) -> int:
    assert driver is not None
    return driver.calls().get(HOST_READS, 0)


def _read(store: BlockStore, blocks: Sequence[tuple[NewBlock, memoryview]]) -> None:
    views = [slot(block.checksum.length) for block, _ in blocks]
    results = store.read([block.key for block, _ in blocks], views)
    for (block, data), view, result in zip(blocks, views, results, strict=True):
        assert result.checksum == block.checksum, (block.checksum.length, result)
        assert view[: data.nbytes] == data, block.checksum.length
        assert not any(view[data.nbytes :]), "bytes behind the block were touched"


def sizes(folder: Path, driver: FakeCudaDriver | None) -> Mapping[str, object]:
    """Each engine reads what each engine wrote."""
    moved: dict[str, int] = {}
    for number, writer in enumerate(("kvikio", "posix")):
        blocks = [random_block(100 * number + i, size) for i, size in enumerate(SIZES)]
        before = calls(driver)
        store = open_nvme(tier(folder, writer))
        assert store.stat().modes["engine"] == writer
        places = reserved(store, [block for block, _ in blocks])
        store.write(places, [view for _, view in blocks])
        store.publish(places)
        store.close()
        moved[f"written by {writer}"] = calls(driver) - before
        for reader in ("kvikio", "posix"):
            before = calls(driver)
            store = open_nvme(tier(folder, reader))
            _read(store, blocks)
            store.close()
            moved[f"{writer}, read by {reader}"] = calls(driver) - before
    assert {name: count > 0 for name, count in moved.items()} == {
        name: name.endswith("kvikio") for name in moved
    }
    return {"sizes": len(SIZES), **moved}


def huge(folder: Path, driver: FakeCudaDriver | None) -> Mapping[str, object]:
    """The largest block that anybody stores, in a segment of its own."""
    length = 256 * MIB
    view = slot(length)
    np.frombuffer(view, np.uint8)[:] = np.random.default_rng(7).integers(0, 256, length, np.uint8)
    moved = 0
    for engine in ("kvikio", "posix"):
        name = BlockKey(engine.encode())
        block = NewBlock(name, BlockChecksum.capture(name, 0, view))
        arguments = StoreArguments(
            folder / "tier", 1024 * MIB, block_bytes=(length,), extra=(("io", engine),)
        )
        store = open_nvme(arguments)
        places = reserved(store, [block])
        store.write(places, [view])
        store.publish(places)
        read = slot(length)
        assert store.read([name], [read])[0].checksum == block.checksum
        assert np.array_equal(np.frombuffer(read, np.uint8), np.frombuffer(view, np.uint8))
        store.close()
        moved += read.nbytes
    return {"bytes": moved}


def joined(folder: Path, driver: FakeCudaDriver | None) -> Mapping[str, object]:
    """What lies side by side in file and memory goes in one call; what does not, in a call each,
    several at once."""
    arguments = tier(folder, "kvikio", segment=64 * MIB)
    count, length = 32, 65_536
    store = open_nvme(arguments)
    together = slot(count * length)
    for i in range(count):
        together[i * length : (i + 1) * length] = content(i)
    side_by_side = [together[i * length : (i + 1) * length] for i in range(count)]
    apart = [slot(2 * length)[:length] for _ in range(count)]
    put(store, range(count))
    store.read(keys(range(count)), apart)
    before = calls(driver)
    assert {r.status for r in store.read(keys(range(count)), side_by_side)} == {BlockStatus.OK}
    one_call = calls(driver) - before
    assert {r.status for r in store.read(keys(range(count)), apart)} == {BlockStatus.OK}
    many_calls = calls(driver) - before - one_call
    for i in range(count):
        assert bytes(side_by_side[i]) == bytes(apart[i]) == content(i)
    store.close()
    assert (one_call, many_calls) == (1, count)
    return {"side by side": one_call, "apart": many_calls}


def headers(folder: Path, _: FakeCudaDriver | None) -> Mapping[str, object]:
    """The segments' header tables hold an entry for each block."""
    store = open_nvme(tier(folder, "kvikio"))
    put(store, range(40))
    store.close()
    found = set()
    for file in segment_files(folder / "tier"):
        data = file.read_bytes()
        for at in range(PAGE_BYTES, len(data), 512):
            entry = SlotEntry.unpack(data[at : at + SlotEntry.PACKED_BYTES])
            if entry is not None:
                found.add(entry.key)
    assert found == set(keys(range(40)))
    return {"entries": len(found)}


def truncated(folder: Path, _: FakeCudaDriver | None) -> Mapping[str, object]:
    """Blocks behind the end of a file are gone; those before it are read all the same."""
    arguments = tier(folder, "kvikio", segment=64 * MIB)
    store = open_nvme(arguments)
    put(store, range(16))
    [file] = segment_files(arguments.path)
    end = file.stat().st_size
    data = file.read_bytes()
    last = max(data.index(content(i)) for i in range(16))
    os.truncate(file, last + 4096)
    assert end > last + 4096
    reads = get(store, range(16))
    sound = [i for i, read in enumerate(reads) if read.sound]
    lost = [i for i, read in enumerate(reads) if read.result.status is BlockStatus.MISSING]
    assert len(sound) == 15
    assert len(lost) == 1
    assert not store.contains([key(lost[0])])[0]
    store.close()
    return {"read": len(sound), "gone": len(lost)}


def close(folder: Path, _: FakeCudaDriver | None) -> Mapping[str, object]:
    """A store that was closed holds no file, of its own or of KvikIO's."""
    arguments = tier(folder, "kvikio")

    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    open_nvme(arguments).close()
    before = descriptors()
    open_at_once = []
    for turn in range(3):
        store = open_nvme(arguments)
        put(store, range(turn * 8, turn * 8 + 8))
        open_at_once.append(descriptors() - before)
        store.close()
        assert descriptors() == before
    assert min(open_at_once) > 2
    return {"open": open_at_once}


# --------------------------------------------------------------------------- what is in effect


def _refusal(folder: Path, **settings: Any) -> str:
    try:
        store = open_nvme(tier(folder, **settings))
    except UnsupportedError as error:
        return str(error)
    modes = store.stat().modes
    store.close()
    raise AssertionError(f"it opened, with {modes}")


def _mode() -> str:
    import kvikio
    import kvikio.defaults

    return str(kvikio.CompatMode(kvikio.defaults.get("compat_mode")).name)


def no_libcuda(folder: Path, _: FakeCudaDriver | None) -> Mapping[str, object]:
    said = _refusal(folder, engine="kvikio")
    assert "libcuda.so.1 cannot be loaded" in said
    assert "install the NVIDIA driver" in said
    assert "`gpu_direct: on` is not possible" in _refusal(folder, engine="posix", gpu_direct="on")
    return {"said": said, **_auto(folder)}


def _auto(folder: Path) -> Mapping[str, object]:
    """`auto` works everywhere and says what it found."""
    store = open_nvme(tier(folder, "auto"))
    put(store, range(4))
    assert all(read.sound for read in get(store, range(4)))
    modes = store.stat().modes
    store.close()
    assert modes["engine"] == "posix"
    assert modes["gpu_direct"].startswith("off: GPUDirect Storage is not in effect: ")
    return {"gpu_direct": modes["gpu_direct"]}


def no_kvikio(folder: Path, _: FakeCudaDriver | None) -> Mapping[str, object]:
    sys.modules["kvikio"] = None  # type: ignore[assignment] # what makes an import fail
    said = _refusal(folder, engine="kvikio")
    assert "KvikIO cannot be loaded: import of kvikio halted" in said
    assert "kvikio-cu12 or kvikio-cu13" in said
    return {"said": said, **_auto(folder)}


def no_libcufile(folder: Path, _: FakeCudaDriver | None) -> Mapping[str, object]:
    """KvikIO's own finder raises what it raises where there is no libcufile."""
    pathfinder: Any = importlib.import_module("cuda.pathfinder")

    def missing(name: str) -> None:
        raise pathfinder.DynamicLibNotFoundError(f"lib{name} is not found")

    pathfinder.load_nvidia_dynamic_lib = missing
    said = _refusal(folder, engine="kvikio")
    assert "KvikIO cannot be loaded: libcufile is not found" in said
    return {"said": said, **_auto(folder)}


def no_nvidia_fs(folder: Path, driver: FakeCudaDriver | None) -> Mapping[str, object]:
    """Compatibility mode, whatever the environment says."""
    os.environ["KVIKIO_COMPAT_MODE"] = "OFF"
    before = calls(driver)
    store = open_nvme(tier(folder, "kvikio"))
    put(store, range(4))
    assert all(read.sound for read in get(store, range(4)))
    modes = store.stat().modes
    store.close()
    assert modes["gds"].startswith("compat (the nvidia-fs kernel module is not loaded")
    assert _mode() == "ON"
    return {"gds": modes["gds"], "mode": _mode(), "calls": calls(driver) - before}


def no_answer(folder: Path, _: FakeCudaDriver | None) -> Mapping[str, object]:
    """Everything seems to be there, and cuFile never comes back: real libcufile without a GPU."""
    kvikio_io.NVIDIA_FS = folder
    kvikio_io.TRIAL_SECONDS = 6.0
    store = open_nvme(tier(folder, "kvikio"))
    put(store, range(4))
    assert all(read.sound for read in get(store, range(4)))
    modes = store.stat().modes
    store.close()
    assert modes["gds"] == "compat (cuFile's driver did not open within 6 s)"
    assert not list(Path.cwd().glob("cufile*")), "cuFile left its log"
    assert _mode() == "ON"
    return {"gds": modes["gds"], "mode": _mode()}


def refused_by_cufile(folder: Path, _: FakeCudaDriver | None) -> Mapping[str, object]:
    kvikio_io.NVIDIA_FS = folder
    kvikio_io.TRIAL = "raise SystemExit('cuFile says no')"
    state = kvikio_io.start()
    assert str(state) == "compat (cuFile says no)"
    assert _mode() == "ON"
    return {"gds": str(state), "mode": _mode()}


def everything_there(folder: Path, _: FakeCudaDriver | None) -> Mapping[str, object]:
    """GDS is decided for, once; no file is opened here, since there is no GPU."""
    kvikio_io.NVIDIA_FS = folder
    kvikio_io.TRIAL = ""
    state: Kvikio = kvikio_io.start()
    assert state.gds
    assert str(state) == "on"
    assert _mode() == "OFF"
    kvikio_io.NVIDIA_FS = folder / "gone"
    assert kvikio_io.start() is state
    return {"gds": str(state), "mode": _mode()}


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        sizes,
        huge,
        joined,
        headers,
        truncated,
        close,
        no_libcuda,
        no_kvikio,
        no_libcufile,
        no_nvidia_fs,
        no_answer,
        refused_by_cufile,
        everything_there,
    )
}

if __name__ == "__main__":
    perform(SCENARIOS)
