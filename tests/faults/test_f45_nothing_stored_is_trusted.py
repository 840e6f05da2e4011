"""What lies in a directory, or comes in a file, is never executed, followed, or believed; and what
we write is for its owner's eyes."""

from __future__ import annotations

import ast
import io
import os
import random
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiered_kv
from tests.stores.lmdb_parts import open_lmdb
from tests.stores.nvme_parts import open_nvme
from tests.unit.archives import CONTENTS, archive, forged_head, with_header
from tiered_kv.checksum import BlockChecksum
from tiered_kv.config import load
from tiered_kv.contracts import BlockStore, NewBlock
from tiered_kv.errors import ArchiveError, ConfigError
from tiered_kv.plugins import Plugins
from tiered_kv.testing.conformance.blocks import (
    BLOCK_BYTES,
    StoreArguments,
    aligned_copy,
    assert_held,
    content,
    keys,
    page_aligned,
    put,
)
from tiered_kv.upkeep import ArchiveReader, import_blocks
from tiered_kv.values import BlockKey, BlockStatus

pytestmark = pytest.mark.faults

FILES = 10_000
CAPACITY = 128 * 2**20
Opener = Callable[[StoreArguments], BlockStore]
stores = pytest.mark.parametrize("opener", [open_nvme, open_lmdb], ids=["nvme", "lmdb"])


def payload(sentinel: Path) -> bytes:
    """A pickle, written by hand, that makes a file when it is loaded."""
    return b"cos\nsystem\n(S'touch " + os.fsencode(sentinel) + b"'\ntR."


class Strangers:
    """Files of others in a tier's directory."""

    def __init__(self, path: Path, outside: Path, sentinel: Path) -> None:
        self._rng = random.Random(45)
        self._path = path
        self._outside = outside
        self._sentinel = sentinel
        self._folders = [one for one in (path, *path.rglob("*")) if one.is_dir()]
        self.made: Counter[str] = Counter()
        self._files: dict[Path, bytes | None] = {}
        self.keys: list[BlockKey] = []
        """What somebody might look up who takes names for keys."""

    def make(self, count: int) -> None:
        kinds = {
            "named as a segment": lambda: f"segment-{self._rng.randrange(10**6):06d}",
            "named as a key": lambda: self._rng.randbytes(32).hex(),
            "named as a key and a rank": lambda: f"{self._rng.randbytes(32).hex()}.0",
            "of any name": lambda: self._rng.randbytes(9).hex() + self._rng.choice("\n .~$;\\"),
            "of a library's": lambda: f"{self._rng.randrange(10**6)}.mdb",
        }
        for number in range(count):
            kind = self._rng.choice(list(kinds))
            # The index's folder has a budget of its own, which they count against.
            folder = self._path if number % 50 else self._rng.choice(self._folders)
            if number % 500 == 0:
                folder = folder / self._rng.randbytes(4).hex()
                folder.mkdir()
                self._folders.append(folder)
            file = folder / kinds[kind]()
            if file.exists() or file.is_symlink():
                continue
            if number % 97 == 0:
                file.symlink_to(self._outside)
                self._files[file] = None
                self.made["links"] += 1
            else:
                data = self._rng.choice(
                    (
                        payload(self._sentinel),
                        self._rng.randbytes(self._rng.randrange(3000)),
                        content(number, 0, 2048),
                        b"\0",
                    )
                )
                file.write_bytes(data)
                self._files[file] = data
                self.made[kind] += 1
            if kind.startswith("named as a key"):
                self.keys.append(BlockKey(bytes.fromhex(file.name[:64])))

    def untouched(self) -> int:
        """How many are as they were."""
        return sum(
            file.is_symlink() if data is None else file.is_file() and file.read_bytes() == data
            for file, data in self._files.items()
        )

    def __len__(self) -> int:
        return len(self._files)


@stores
def test_f45_ten_thousand_files_of_others_are_only_misses(tmp_path: Path, opener: Opener) -> None:
    arguments = StoreArguments(tmp_path / "tier", capacity=CAPACITY)
    store = opener(arguments)
    put(store, range(20))
    store.close()
    outside = tmp_path / "outside"
    outside.write_bytes(b"somebody's own")
    outside.chmod(0o400)
    strangers = Strangers(arguments.path, outside, tmp_path / "executed")
    strangers.make(FILES)

    store = opener(arguments)
    misses = 0
    for first in range(0, len(strangers.keys), 64):
        asked = strangers.keys[first : first + 64]
        memory = [page_aligned(BLOCK_BYTES) for _ in asked]
        answers = store.read(asked, memory)
        misses += sum(answer.status is BlockStatus.MISSING for answer in answers)
        assert not any(store.contains(asked))
        assert all(not any(view) for view in memory[:4])
    assert_held(store, range(20))
    assert sorted(store.scan()) == sorted(keys(range(20)))
    put(store, range(100, 120))
    assert_held(store, range(100, 120))
    store.close()
    store = opener(arguments)
    assert_held(store, [*range(20), *range(100, 120)])
    store.close()
    print(f"{dict(strangers.made)}: {misses} misses, {strangers.untouched()} files untouched")
    assert len(strangers) > FILES * 0.99
    assert misses == len(strangers.keys) > FILES // 4
    assert strangers.untouched() == len(strangers)
    assert outside.read_bytes() == b"somebody's own"
    assert not (tmp_path / "executed").exists()


@stores
def test_f45_files_are_for_their_owner_whatever_the_umask(tmp_path: Path, opener: Opener) -> None:
    arguments = StoreArguments(tmp_path / "above" / "tier")
    before = os.umask(0)
    try:
        store = opener(arguments)
        put(store, range(30))
        store.delete(keys(range(5)))
        store.close()
        store = opener(arguments)
        put(store, range(5))
        store.close()
    finally:
        os.umask(before)
    modes = Counter[str]()
    for path in (arguments.path, *arguments.path.rglob("*")):
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), f"{path} has mode {mode:o}"
        modes[f"{mode:o}"] += 1
    print(f"files and folders by mode: {dict(modes)}")
    assert modes["600"] > 1
    assert modes["700"] > 0


@stores
def test_f45_keys_that_look_like_paths_are_but_keys(tmp_path: Path, opener: Opener) -> None:
    arguments = StoreArguments(tmp_path / "deep" / "tier")
    store = opener(arguments)
    hostile = [
        BlockKey(text)
        for text in (
            b"../../escaped",
            os.fsencode(tmp_path / "escaped"),
            b"/etc/passwd",
            b"\0",
            b"..",
            b"a\nb",
            b"%s%n",
            b"\xff" * 256,
        )
    ]
    for key in hostile:
        data = aligned_copy(key.ljust(4096, b"!"))
        [place] = store.reserve([NewBlock(key, BlockChecksum.capture(key, 0, data))])
        assert place is not None
        store.write([place], [data])
        store.publish([place])
    for key in hostile:
        memory = page_aligned(BLOCK_BYTES)
        [answer] = store.read([key], [memory])
        assert answer.status is BlockStatus.OK
        assert bytes(memory[:4096]) == key.ljust(4096, b"!")
    assert sorted(store.scan()) == sorted(hostile)
    for text in (b"", b"x" * 257):
        with pytest.raises(ValueError, match=r"key|256"):
            store.contains([BlockKey(text)])
    store.close()
    assert [one.name for one in tmp_path.iterdir()] == ["deep"]
    assert [one.name for one in (tmp_path / "deep").iterdir()] == ["tier"]


@pytest.mark.parametrize(
    "line",
    [
        "namespace: ../../escaped",
        "namespace: /etc",
        "namespace: 'a/b'",
        "namespace: {name: .hidden}",
        "tiers: [{name: ../host, type: cpu, capacity: 16MiB}]",
        "namespace: !!python/object/apply:os.system ['touch executed']",
        "namespace: {name: !!python/object/apply:os.system ['touch executed']}",
        "tiers: !!python/object/new:os.system ['touch executed']",
    ],
)
def test_f45_names_and_tags_in_a_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "deployment.yaml"
    file.write_text("tiers: [{name: host, type: cpu, capacity: 16MiB}]\n")
    load(file, Plugins())
    lines = [line] if line.startswith("tiers") else [file.read_text(), line]
    file.write_text("\n".join(lines))
    with pytest.raises(ConfigError) as refused:
        load(file, Plugins())
    print(refused.value)
    assert [one.name for one in tmp_path.iterdir()] == ["deployment.yaml"]


class Bounded(io.BytesIO):
    """An archive's beginning, and then zeros for ever; refuses to give much at once."""

    most = 0

    def read(self, size: int | None = -1, /) -> bytes:
        assert size is not None
        assert 0 <= size <= 2**20
        self.most = max(self.most, size)
        return super().read(size) or bytes(size)

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer)
        assert view.nbytes <= CONTENTS.block_bytes
        got = super().readinto(view)
        return got or view.nbytes


@pytest.mark.parametrize(
    "head",
    [
        forged_head(b"key", 0, 1, 2**63),
        forged_head(b"key", 0, 1, 2**32),
        forged_head(b"key", 0, 1, CONTENTS.block_bytes + 1),
        forged_head(b"key", 0, 1, 0),
        forged_head(b"key", 2**32 - 1, 1, 10),
        forged_head(b"key", 0, 255, 10),
        forged_head(b"", 0, 1, 10),
        forged_head(b"k" * 65535, 0, 1, 10),
        forged_head(b"key", 0, 1, 10, key_length=65535),
    ],
    ids=[
        *("2^63 bytes", "2^32 bytes", "a byte too many", "no bytes", "rank", "kind"),
        *("no key", "long key", "key beyond the head"),
    ],
)
def test_f45_an_archive_with_hostile_lengths_and_keys(head: bytes) -> None:
    """No memory is taken for what it says, and no store is asked to take it."""
    stream = Bounded(with_header(lambda header: None, parts=head))

    def no_store(rank: int) -> BlockStore:
        raise AssertionError(f"the store of rank {rank} was asked for a hostile block")

    try:
        done = import_blocks(ArchiveReader(stream), no_store, batch_bytes=4096)
    except (ValueError, MemoryError) as error:
        pytest.fail(f"the hostile block was taken up: {error}")
    print(f"{done.damage}; at most {stream.most} bytes were read at once")
    assert "the archive is damaged" in done.damage
    assert done.parts == done.present == 0


@pytest.mark.parametrize("length", [2**20 + 1, 2**32 - 1])
def test_f45_an_archive_with_a_hostile_header(length: int) -> None:
    whole = bytearray(archive())
    whole[12:16] = length.to_bytes(4, "big")
    stream = Bounded(bytes(whole))
    with pytest.raises(ArchiveError, match="a header of"):
        ArchiveReader(stream)
    assert stream.most == 16
    with pytest.raises(ArchiveError, match="says nothing sensible"):
        ArchiveReader(Bounded(with_header(lambda header: header.update(namespace="../../etc"))))


FORBIDDEN = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}


def test_f45_no_module_can_unpickle() -> None:
    """What was not imported cannot be called; `torch.load` and `numpy.load` unpickle too."""
    packages = [Path(tiered_kv.__file__).parent]
    packages += [
        Path(module.__file__).parent
        for module in (__import__(f"tiered_kv_{name}") for name in ("gpu", "nvme", "lmdb"))
        if module.__file__
    ]
    modules = 0
    for file in (one for package in packages for one in package.rglob("*.py")):
        if "testing" in file.parts:
            continue  # child processes of tests
        modules += 1
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("torch.load", "np.load", "numpy.load", "yaml.load", "eval")
                assert called not in ("exec", "yaml.unsafe_load", "yaml.full_load")
            roots = {name.partition(".")[0] for name in names}
            assert not roots & FORBIDDEN, f"{file}: {roots & FORBIDDEN}"
    print(f"{modules} modules")
    assert modules > 100
