"""Which namespaces a tier holds: a JSON object for each in `meta`, enough to open a store on it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from tiered_kv.index.environment import Database, Transaction
from tiered_kv.values import CacheGeometry, Fingerprint, GroupGeometry, Namespace

__all__ = ["describe", "forget", "is_noted", "note", "recorded", "understand"]

_NAME = b"namespace:"


def describe(namespace: Namespace, geometry: CacheGeometry) -> bytes:
    """The JSON object: fingerprint fields, epoch, ranks and groups; the same for every rank."""
    return json.dumps(
        {
            "fields": dict(namespace.fingerprint.fields),
            "epoch": namespace.epoch.hex(),
            "world_size": geometry.world_size,
            "groups": [asdict(group) for group in geometry.groups],
        },
        sort_keys=True,
        separators=(",", ":"),
    ).encode()


def understand(data: bytes) -> tuple[Namespace, CacheGeometry] | None:
    """The inverse of `describe`, as of rank 0; None when it is damaged."""
    try:
        record: Any = json.loads(data)
        fields = {str(name): str(value) for name, value in record["fields"].items()}
        namespace = Namespace(
            Fingerprint(tuple(sorted(fields.items()))), bytes.fromhex(record["epoch"])
        )
        groups = tuple(GroupGeometry(**group) for group in record["groups"])
        return namespace, CacheGeometry(groups, 0, int(record["world_size"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def note(txn: Transaction, meta: Database, namespace: Namespace, geometry: CacheGeometry) -> None:
    """Record a namespace (write transaction)."""
    txn.put(_key(namespace.id), describe(namespace, geometry), db=meta)


def is_noted(
    txn: Transaction, meta: Database, namespace: Namespace, geometry: CacheGeometry
) -> bool:
    """Whether exactly this is recorded."""
    return txn.get(_key(namespace.id), db=meta) == describe(namespace, geometry)


def recorded(txn: Transaction, meta: Database) -> list[tuple[Namespace, CacheGeometry]]:
    """Every namespace that is recorded, by id; a damaged record is left out."""
    found: list[tuple[Namespace, CacheGeometry]] = []
    with txn.cursor(meta) as cursor:
        more = cursor.set_range(_NAME)
        while more and cursor.key().startswith(_NAME):
            known = understand(cursor.value())
            if known is not None and _key(known[0].id) == cursor.key():
                found.append(known)
            more = cursor.next()
    return found


def forget(txn: Transaction, meta: Database, namespace_id: bytes) -> None:
    """Drop a namespace's record (write transaction)."""
    txn.delete(_key(namespace_id), db=meta)


def _key(namespace_id: bytes) -> bytes:
    return _NAME + namespace_id.hex().encode()
