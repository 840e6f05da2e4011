"""Looking after the blocks that a store holds, apart from any load."""

from tiered_kv.upkeep.archive import (
    ARCHIVE_VERSION,
    ArchiveContents,
    ArchivedBlock,
    ArchiveReader,
    ArchiveWriter,
    ReadableStream,
    WritableStream,
)
from tiered_kv.upkeep.copying import Copied, copy_blocks
from tiered_kv.upkeep.moving import (
    Exported,
    Imported,
    batch_into,
    export_blocks,
    import_blocks,
)
from tiered_kv.upkeep.naming import (
    NoSuchNamespace,
    Resemblance,
    differences,
    find,
    properties,
    resemblances,
    telling,
)
from tiered_kv.upkeep.recency import most_used_first
from tiered_kv.upkeep.scrubbing import Pace, Scrubber
from tiered_kv.upkeep.verifying import VERIFY_BATCH_BYTES, Verified, verify

__all__ = [
    "ARCHIVE_VERSION",
    "VERIFY_BATCH_BYTES",
    "ArchiveContents",
    "ArchiveReader",
    "ArchiveWriter",
    "ArchivedBlock",
    "Copied",
    "Exported",
    "Imported",
    "NoSuchNamespace",
    "Pace",
    "ReadableStream",
    "Resemblance",
    "Scrubber",
    "Verified",
    "WritableStream",
    "batch_into",
    "copy_blocks",
    "differences",
    "export_blocks",
    "find",
    "import_blocks",
    "most_used_first",
    "properties",
    "resemblances",
    "telling",
    "verify",
]
