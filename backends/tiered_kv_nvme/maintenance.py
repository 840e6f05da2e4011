"""Looks after all namespaces of an nvme tier, without an engine's geometry."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from tiered_kv.contracts import MaintenanceContext, Reconciliation, StoredNamespace
from tiered_kv.errors import TierError
from tiered_kv.index import (
    Environment,
    Holdings,
    IndexAudit,
    Transaction,
    Trust,
    bytes_beside_data,
    describe_namespace,
)
from tiered_kv_nvme.directory import INDEX, SEGMENT_NAME
from tiered_kv_nvme.faults import translated
from tiered_kv_nvme.presence import Presence
from tiered_kv_nvme.rebuild import begin_empty, one_by_one, rebuild
from tiered_kv_nvme.reconcile import Reconciler
from tiered_kv_nvme.segments import SegmentFiles
from tiered_kv_nvme.settings import NvmeSettings
from tiered_kv_nvme.space import Space
from tiered_kv_nvme.stripes import Stripes

__all__ = ["NvmeMaintenance"]

_MOST_BLOCKS = 512
"""Blocks that are removed in one transaction."""
_NAMESPACE_BYTES = 8
_DATA = "data.mdb"
_MARGIN_BYTES = 2**20

logger = logging.getLogger(__name__)


class NvmeMaintenance:
    """A `StoreMaintenance` of an nvme tier. Opened to change things, it makes a lost index again
    where the segments' headers say enough."""

    def __init__(self, context: MaintenanceContext) -> None:
        """Open the tier's directories, which must be there.

        Raises:
            IdentityError: the directory belongs to something else.
            FormatError: it was written by another format version.
            UnsupportedError: it lies on a network file system.
            TierError: nothing was stored there yet, its index is lost and it is opened to look
                only, or it cannot be used now.
            NoSpace: the disk leaves no room for the index.
        """
        settings = context.settings
        if not isinstance(settings, NvmeSettings):
            raise ValueError(f"an nvme tier takes NvmeSettings, not {type(settings).__name__}")
        self._tier = context.tier
        self._writable = context.writable and settings.writable
        if not self._writable and not _may_write(settings):
            # A read-only mount, or another user's tier.
            settings = settings.model_copy(update={"access": "read"})
        stripes = Stripes(settings, self._tier)
        index_path, folders = stripes.index_path, settings.folders
        with translated("look at", index_path, self._tier):
            has_index = (index_path / _DATA).exists()
        if not has_index and not any(_holds_segments(path, self._tier) for path in folders):
            raise TierError(
                f"tier {self._tier}: nothing was stored in {', '.join(map(str, folders))}",
                tier=self._tier,
            )
        if not has_index and not self._writable:
            raise TierError(
                f"tier {self._tier}: the index in {index_path} is gone, the segments are there; "
                "`tiered-kv verify --repair`, or an engine that uses the tier, makes it again",
                tier=self._tier,
            )
        stripes.find()
        self._files = SegmentFiles(
            stripes,
            self._tier,
            writable=settings.writable,
            sync=settings.durability != "none",
        )
        self._lock = threading.Lock()
        self._closed = False
        self._presence: Presence | None = None
        self._environment = Environment.open(
            index_path,
            kind="nvme",
            tier=self._tier,
            max_bytes=_index_bytes(settings, index_path),
            writable=settings.writable,
            durability=settings.durability,
            on_empty=lambda reason: begin_empty(self._files, self._tier, reason),
            on_clean=self._files.flush_all if settings.durability == "none" else None,
        )
        try:
            with one_by_one(self._environment, self._tier):
                stripes.settle(self._environment)
                Trust.after_open(self._environment)
                self._holdings = Holdings.of(self._environment)
                # Without a namespace: it stores nothing, and owns no place in the tier.
                self._space = Space(self._environment, self._holdings.index, self._files, b"")
                self._audit = IndexAudit(self._environment, self._holdings.index)
                if self._writable:
                    self._presence = Presence(index_path.parent)
                    rebuild(self._environment, self._space, self._tier)
            self._files.identity = self._environment.identity
        except BaseException:
            self._let_go()
            raise

    def namespaces(self) -> Sequence[StoredNamespace]:
        """See `StoreMaintenance.namespaces`.

        Raises:
            TierError: the index does not work.
        """
        self._check_open()
        with self._environment.read() as txn:
            in_use = self._space.owners.live_namespaces(txn)
        return self._holdings.namespaces(in_use)

    def reconcile(self, *, repair: bool) -> Reconciliation:
        """See `StoreMaintenance.reconcile`.

        Raises:
            ValueError: `repair` where it was opened with `writable=False`.
            NoSpace: the index has no room for the repair.
            TierError: the disk or the index does not work.
        """
        self._check_open()
        if repair:
            self._check_writable("repair anything")
        descriptions = {
            stored.namespace.id: describe_namespace(stored.namespace, stored.geometry)
            for stored in self.namespaces()
        }
        what = (self._environment, self._space, descriptions, self._tier)
        return Reconciler(*what, repair=repair).run()

    def drop(self, namespace_id: bytes) -> int:
        """See `StoreMaintenance.drop`. Its segments' files are deleted.

        Raises:
            ValueError: it was opened with `writable=False`, or the namespace is in use.
            NoSpace: the index has no room to note it.
            TierError: the disk or the index does not work.
        """
        self._check_open()
        self._check_writable("drop a namespace")
        if len(namespace_id) != _NAMESPACE_BYTES:
            raise ValueError(f"the id of a namespace is 8 bytes, not {len(namespace_id)}")
        dropped = 0
        for keys in self._audit.batches(namespace_id):
            for start in range(0, len(keys), _MOST_BLOCKS):
                with self._space.change() as change:
                    self._refuse_in_use(namespace_id, change.txn)
                    for key in keys[start : start + _MOST_BLOCKS]:
                        dropped += not self._audit.parts(change.txn, key).is_nothing
                        change.free(self._audit.erase(change.txn, key))
        with self._space.change() as change:
            self._refuse_in_use(namespace_id, change.txn)
            change.reclaim()
            for segment in change.all_segments():
                if segment.namespace_id == namespace_id and not segment.reserved:
                    change.empty(segment)
                    change.drop(segment)
            self._holdings.forget(change.txn, namespace_id)
        if dropped:
            logger.info(
                "tier %s: %d blocks of namespace %s dropped",
                *(self._tier, dropped, namespace_id.hex()),
            )
        return dropped

    def _refuse_in_use(self, namespace_id: bytes, txn: Transaction) -> None:
        if namespace_id in self._space.owners.live_namespaces(txn):
            raise ValueError(
                f"tier {self._tier}: namespace {namespace_id.hex()} is in use by a running "
                "process; stop it first"
            )

    def close(self) -> None:
        """See `StoreMaintenance.close`."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._let_go()

    def _let_go(self) -> None:
        if self._presence is not None:
            self._presence.end()
        self._files.close()
        self._environment.close()

    def _check_open(self) -> None:
        self._environment.check_usable()
        if self._closed:
            raise TierError(f"tier {self._tier}: its maintenance was closed", tier=self._tier)

    def _check_writable(self, what: str) -> None:
        if not self._writable:
            raise ValueError(f"tier {self._tier} was opened for reading only, cannot {what}")


def _holds_segments(path: Path, tier: str) -> bool:
    with translated("look at", path, tier):
        return path.is_dir() and any(SEGMENT_NAME.fullmatch(one.name) for one in path.iterdir())


def _may_write(settings: NvmeSettings) -> bool:
    home = settings.index_home
    return os.access(home, os.W_OK) and os.access(home / INDEX, os.W_OK)


def _index_bytes(settings: NvmeSettings, index_path: Path) -> int:
    """A size for the index that is not below what any engine gave it: it depends on the size of
    their blocks, which nobody here knows, and an index that does not fit is dropped."""
    held = 0
    if index_path.is_dir():
        with translated("read", index_path, settings.name):
            held = bytes_beside_data(index_path)
            data = index_path / _DATA
            held += data.stat().st_size if data.exists() else 0
    return max(settings.capacity // 3, held + _MARGIN_BYTES)
