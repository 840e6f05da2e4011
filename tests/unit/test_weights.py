from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiered_kv.connector.weights import PIECE_BYTES, weights_identity
from tiered_kv.errors import IdentityError


def model(folder: Path, content: bytes, name: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    return folder


def test_other_weights_under_the_same_path_have_another_identity(tmp_path: Path) -> None:
    cache = tmp_path / "weights.json"
    content = os.urandom(3 * PIECE_BYTES)
    first = weights_identity(model(tmp_path / "m", content), cache=cache)
    assert first == weights_identity(tmp_path / "m", cache=cache)
    changed = bytearray(content)
    changed[len(changed) // 2] ^= 1
    assert weights_identity(model(tmp_path / "m", bytes(changed)), cache=cache) != first
    assert weights_identity(model(tmp_path / "m", content + b"\0"), cache=cache) != first
    assert weights_identity(model(tmp_path / "m", content), cache=cache) == first
    assert weights_identity(model(tmp_path / "m", b"more", "part.bin"), cache=cache) != first


def test_the_same_weights_elsewhere_have_the_same_identity(tmp_path: Path) -> None:
    content = os.urandom(1000)
    identities = {
        weights_identity(model(tmp_path / name, content), cache=tmp_path / "weights.json")
        for name in ("a", "b")
    }
    assert len(identities) == 1


def test_a_damaged_cache_of_digests_is_made_anew(tmp_path: Path) -> None:
    cache = tmp_path / "weights.json"
    first = weights_identity(model(tmp_path / "m", b"12345678"), cache=cache)
    assert list(json.loads(cache.read_text())) != []
    assert cache.stat().st_mode & 0o777 == 0o600
    for damaged in ("", "[]", "{", '{"x": 1}'):
        cache.write_text(damaged)
        assert weights_identity(tmp_path / "m", cache=cache) == first


def test_a_snapshot_of_the_hub_is_named_by_its_commit(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    path = tmp_path / "models--x--y" / "snapshots" / commit
    assert weights_identity(path) == f"commit:{commit}"


def test_a_folder_that_cannot_be_read_is_an_error_that_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path) -> Iterator[Path]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(IdentityError, match="cannot read the weights of"):
        weights_identity(tmp_path)


def test_no_weights_is_an_error_that_says_where(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="no weight file"):
        weights_identity(tmp_path)
