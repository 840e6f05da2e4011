"""Identity of a model's weights, so that blocks of other weights under the same path miss."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

from tiered_kv.errors import IdentityError

__all__ = ["config_identity", "weights_identity"]

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
CONFIGS = ("config.json", "params.json", "adapter_config.json")
"""What else in a directory determines what the weights compute: RoPE, or an adapter's scale."""
PIECES = 64
PIECE_BYTES = 64 * 1024
SNAPSHOT = re.compile(r"/snapshots/([0-9a-f]{40})(?:/|$)")


def weights_identity(model: Path, *, cache: Path | None = None) -> str:
    """Name the weights in the directory of a model or an adapter.

    The hub commit where the path is a snapshot of one; else a digest over file name, size,
    safetensors header and 64 evenly spaced pieces of 64 KiB of each weight file, and over its
    configuration. Digests are cached by (path, size, modification time, inode).

    Args:
        model: directory with the weight files, or one weight file.
        cache: file for the cached digests; by default in the user's cache directory.

    Raises:
        IdentityError: there are no weight files, or they cannot be read.
    """
    commit = SNAPSHOT.search(str(model))
    if commit is not None:
        return f"commit:{commit.group(1)}"
    try:
        files = _weight_files(model)
    except OSError as error:
        raise IdentityError(f"cannot read the weights of {model}: {error}") from error
    if not files:
        raise IdentityError(
            f"{model} holds no weight file ({', '.join(SUFFIXES)}), so its blocks cannot be told "
            "from those of other weights"
        )
    cache = cache or _default_cache()
    known = _read_cache(cache)
    total = hashlib.blake2b(digest_size=16)
    changed = False
    try:
        for file in files:
            stat = file.stat()
            mark = f"{file.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ino}"
            digest = known.get(mark)
            if digest is None:
                digest = _file_digest(file, stat.st_size)
                known[mark] = digest
                changed = True
            total.update(f"{file.name}:{stat.st_size}:{digest}\n".encode())
        for config in (model / name for name in CONFIGS):
            if config.is_file():
                total.update(f"{config.name}:{config_identity(config)}\n".encode())
    except OSError as error:
        raise IdentityError(f"cannot read the weights of {model}: {error}") from error
    if changed:
        _write_cache(cache, known)
    return f"sampled:{total.hexdigest()}"


def config_identity(config: Path) -> str:
    """Digest of a configuration file.

    Raises:
        OSError: it cannot be read.
    """
    return hashlib.blake2b(config.read_bytes(), digest_size=16).hexdigest()


def _weight_files(model: Path) -> list[Path]:
    if model.is_file():
        return [model]
    if not model.is_dir():
        return []
    return sorted(p for p in model.iterdir() if p.suffix in SUFFIXES and p.is_file())


def _file_digest(file: Path, size: int) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb") as stream:
        if file.suffix == ".safetensors" and size >= 8:
            # The format starts with the length of its JSON header, 8 bytes little endian:
            # https://github.com/huggingface/safetensors
            length = int.from_bytes(stream.read(8), "little")
            digest.update(stream.read(min(length, size)))
        for offset in _offsets(size):
            stream.seek(offset)
            digest.update(stream.read(PIECE_BYTES))
    return digest.hexdigest()


def _offsets(size: int) -> Iterable[int]:
    last = max(0, size - PIECE_BYTES)
    return sorted({last * i // (PIECES - 1) for i in range(PIECES)})


def _default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tiered-kv" / "weights.json"


def _read_cache(cache: Path) -> dict[str, str]:
    try:
        content = json.loads(cache.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {k: v for k, v in content.items() if isinstance(k, str) and isinstance(v, str)}


def _write_cache(cache: Path, known: dict[str, str]) -> None:
    part = cache.with_name(f"{cache.name}.{os.getpid()}")
    try:
        cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part.write_text(json.dumps(known))
        part.chmod(0o600)
        part.replace(cache)
    except OSError:  # only the next start is slower
        return
