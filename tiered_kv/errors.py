"""The one error tree of tiered-kv, split by what the caller does next.

```
TieredKVError
├── RefuseToStart          the operator must change something; nothing was started
│   ├── ConfigError        a value in the YAML (file, line, key path)
│   ├── IdentityError      two parts disagree on what the bytes mean, or a foreign directory
│   ├── FormatError        a directory written by a newer or unknown format
│   ├── PluginError        a plug-in that cannot be loaded, is malformed or clashes
│   ├── TraceError         a trace or a model that nothing can be planned from (file, line)
│   └── UnsupportedError   an engine, version, topology or file system that is not supported
├── RetryLater             nothing is wrong with the block or the tier; ask again
│   ├── DeadlineExceeded
│   └── NoSpace            budget, free-space floor or a bounded queue
│       └── WriteBudgetSpent   what may be written to the tier in a day
├── Miss                   treat the block as not there
│   ├── BlockMissing
│   └── BlockCorrupt
├── ArchiveError           a file of exported blocks that is cut off or damaged: get it anew
└── TierError              the tier is to be avoided until it works again
    └── TierGone           what its store was opened on is not there: it is to be opened anew
```

Backends translate foreign errors (`OSError`, `lmdb.Error`, ...) into this tree at one place
each, with ``raise ... from cause``. None of these crosses the border to the inference engine,
except a `RefuseToStart` while the engine starts.
"""

from __future__ import annotations

from pathlib import Path

__all__ = [
    "ArchiveError",
    "BlockCorrupt",
    "BlockMissing",
    "ConfigError",
    "DeadlineExceeded",
    "FormatError",
    "IdentityError",
    "Miss",
    "NoSpace",
    "PluginError",
    "RefuseToStart",
    "RetryLater",
    "TierError",
    "TierGone",
    "TieredKVError",
    "TraceError",
    "UnsupportedError",
    "WriteBudgetSpent",
    "reason_in",
]


class TieredKVError(Exception):
    """Base of every error that tiered-kv raises."""


class RefuseToStart(TieredKVError):
    """Something the operator must change before anything can start."""


class ConfigError(RefuseToStart):
    """A configuration that cannot be used.

    Attributes:
        problems: one line of text per problem, each already carrying its place.
        file: the configuration file, when the problem lies in one.
        line: 1-based line of the first problem, when known.
        key: dotted key path of the first problem (`tiers.0.capacity`), when known.
    """

    def __init__(
        self,
        message: str,
        *,
        file: Path | None = None,
        line: int | None = None,
        key: str | None = None,
        problems: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.file = file
        self.line = line
        self.key = key
        self.problems = problems or (message,)


class IdentityError(RefuseToStart):
    """Two parts disagree on what determines a block's bytes, or a directory is not ours."""


class FormatError(RefuseToStart):
    """Data on disk was written in a format that this version does not read."""


class PluginError(RefuseToStart):
    """A plug-in could not be loaded, has the wrong shape, or clashes with another."""


class TraceError(RefuseToStart):
    """What is to be planned from cannot be read, or is not what it should be."""


class UnsupportedError(RefuseToStart):
    """An engine, version, topology or file system that is not supported."""


class RetryLater(TieredKVError):
    """Nothing is wrong with the block or the tier: the same call may succeed later."""


class DeadlineExceeded(RetryLater):
    """A call did not end within its deadline."""


class NoSpace(RetryLater):
    """A budget, the free-space floor or a bounded queue leaves no room."""


class WriteBudgetSpent(NoSpace):
    """The tier's write budget leaves no room for that many bytes until the next day (UTC)."""


class Miss(TieredKVError):
    """The block is to be treated as not there."""


class BlockMissing(Miss):
    """No whole block with this key is stored."""


class BlockCorrupt(Miss):
    """The stored bytes are not the bytes that were captured."""


class ArchiveError(TieredKVError):
    """A file of exported blocks is cut off or damaged, or cannot be read or written."""


class TierError(TieredKVError):
    """The tier does not work: it is avoided until it works again.

    Attributes:
        tier: name of the tier, or of the medium where no tier is configured.
    """

    def __init__(self, message: str, *, tier: str) -> None:
        super().__init__(message)
        self.tier = tier


class TierGone(TierError):
    """What the tier's store was opened on is not there any more (its directory was deleted or
    replaced, its disk unmounted): this store object never works again. It is to be closed, and the
    tier to be opened anew."""


def reason_in(tier: str, error: object) -> str:
    """What an error says, for a message that names the tier already: without its name in front."""
    return str(error).removeprefix(f"tier {tier}: ")
