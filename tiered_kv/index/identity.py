"""What an environment says of itself, in its `meta`: kind, format and an identity of its own."""

from __future__ import annotations

import secrets
from pathlib import Path

import lmdb

from tiered_kv.errors import IdentityError
from tiered_kv.index.directory import DATA, MARKER
from tiered_kv.index.transactions import Database
from tiered_kv.index.witness import Witness
from tiered_kv.values import FORMAT_VERSION

__all__ = ["greet"]

_IDENTITY_BYTES = 16


def greet(
    environment: lmdb.Environment, path: Path, kind: str, witness: Witness | None
) -> tuple[Database, bytes]:
    """Check that the environment is what the marker beside it says; make it so when it is empty.
    Gives its `meta` and its identity. Whoever may write has a `witness`.

    Raises:
        IdentityError: it is something else.
        lmdb.Error: as LMDB says.
    """
    try:
        meta = environment.open_db(b"meta", create=False)
    except lmdb.NotFoundError as error:
        if witness is None or environment.stat()["entries"]:
            raise IdentityError(
                f"{path / DATA} is not a tier's: it has no `meta` database; remove it, "
                "or give the tier another directory"
            ) from error
        meta = environment.open_db(b"meta")
    with environment.begin(write=witness is not None) as txn:
        if witness is not None:
            witness.begins()
            if txn.stat(meta)["entries"] == 0:
                txn.put(b"kind", kind.encode(), db=meta)
                txn.put(b"format", str(FORMAT_VERSION).encode(), db=meta)
                txn.put(b"identity", secrets.token_bytes(_IDENTITY_BYTES), db=meta)
        found = (txn.get(b"kind", b"", db=meta), txn.get(b"format", b"", db=meta))
        identity: bytes = txn.get(b"identity", b"", db=meta)
    if witness is not None:
        witness.ended()
    if found != (kind.encode(), str(FORMAT_VERSION).encode()):
        raise IdentityError(
            f"{path / DATA} holds kind {found[0]!r}, format {found[1]!r}, not what {MARKER} beside "
            f"it says ({kind!r}, {FORMAT_VERSION}): it was put there from elsewhere; remove it, or "
            "give the tier another directory"
        )
    return meta, identity
