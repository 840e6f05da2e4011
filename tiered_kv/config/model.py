"""What a deployment is: frozen settings, each field with description, unit and default.

A backend adds a tier type by subclassing `StoreSettings`:

```python
class NvmeSettings(StoreSettings, frozen=True):
    type: Literal["nvme"] = "nvme"
    path: Directory = Field(description="Directory of the tier.")
```
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    PlainSerializer,
    SerializeAsAny,
    WithJsonSchema,
    model_validator,
)
from pydantic.config import JsonDict
from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError

from tiered_kv.config.agreement import Disagreement, disagreements
from tiered_kv.config.units import GIB, MIB, ByteRate, ByteSize, DailyBytes, Directory, Duration

__all__ = [
    "Admit",
    "CpuSettings",
    "Deployment",
    "EvictionSettings",
    "Limits",
    "NamespaceSettings",
    "Placement",
    "Recompute",
    "Settings",
    "StoreSettings",
    "TierSettings",
    "TraceSettings",
]


class Settings(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """Base of every group of settings: frozen, unknown keys are errors."""


class EvictionSettings(Settings, frozen=True):
    """Which blocks go first when a tier is full."""

    policy: str = Field(
        default="prefix",
        pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$",
        description="prefix: the least worth, by how often, how long ago and by what kind of "
        "request a block was wanted; lru: the least recently used; s3-fifo and arc: for a cpu tier "
        "alone; or the name of a policy that a plug-in brings.",
        json_schema_extra={"unit": "name"},
    )
    half_life: Duration | None = Field(
        default=None,
        gt=0,
        description="Time after which a use counts half, where a policy counts uses; by default "
        "20 minutes in a cpu tier and 10 in a store.",
    )


class TierSettings(Settings, frozen=True):
    """Base of the settings of a tier.

    A backend subclasses `StoreSettings`, which adds what every store can do, or this
    (`class X(TierSettings, frozen=True)`), narrows `type` to its name, and gives every further
    field a description and a default where there is a safe one.
    """

    name: str = Field(
        pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$",
        description="Name of the tier in this file, in metrics and in messages; unique.",
    )
    type: str = Field(description="Medium of the tier; `tiered-kv backends` lists the types.")
    capacity: ByteSize = Field(
        default=4 * GIB,
        gt=0,
        description="Budget of the tier on this machine, everything that it keeps included.",
    )

    @property
    def directories(self) -> dict[str, Path]:
        """Directories that the tier keeps its data in, by the key that names them: by default
        every field that is a path or a tuple of paths (`paths.0`, `paths.1`)."""
        found: dict[str, Path] = {}
        for field in type(self).model_fields:
            value = getattr(self, field)
            items = enumerate(value) if isinstance(value, tuple) else ()
            found |= {f"{field}.{place}": item for place, item in items if isinstance(item, Path)}
            if isinstance(value, Path):
                found[field] = value
        return found

    @property
    def data_directories(self) -> tuple[Path, ...]:
        """Those of the `directories` over which the capacity is spread; the first one, unless a
        backend says otherwise."""
        return tuple(self.directories.values())[:1]

    @property
    def writable(self) -> bool:
        """Whether blocks may be stored in the tier; False for a tier that is read only."""
        return True


class StoreSettings(TierSettings, frozen=True):
    """Base of the settings of a tier that is a store: how its blocks are kept right.

    A tier whose settings derive from `TierSettings` alone is verified always and never scrubbed.
    """

    verify: Literal["always", "first", "never"] = Field(
        default="always",
        description="When the bytes of a block are compared with the checksum that was taken when "
        "it was stored. always: at every load; first: the first time that a process loads it, and "
        "when its contents changed since; never: not at loads, so that what rots on the medium is "
        "served. Its key and length are always compared.",
    )
    scrub: ByteRate = Field(
        default=0,
        description="Bytes per second that each rank reads in the background to compare its stored "
        "blocks with their checksums, round after round; what is bad is dropped before a load "
        "meets it. off: never.",
    )
    write_budget: DailyBytes = Field(
        default=0,
        description="Bytes that may be written to the tier's medium in a day (UTC), by all that "
        "use it together. The further its use is ahead of the day, the more often a block must "
        "have been wanted to be stored in the tier; beyond it nothing is. off: no limit.",
        json_schema_extra={"default": "off"},
    )
    eviction: EvictionSettings = Field(
        default=EvictionSettings(),
        description="Which blocks go first when the tier is full.",
    )


class CpuSettings(TierSettings, frozen=True):
    """The host tier: a pool of block slots in the memory of each rank."""

    type: Literal["cpu"] = Field(default="cpu", description="The host block pool.")
    capacity: ByteSize = Field(
        default=4 * GIB, gt=0, description="Size of the host block pool of each rank."
    )
    eviction: EvictionSettings = Field(
        default=EvictionSettings(), description="Which blocks go first when the pool is full."
    )
    pin_budget: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.25,
        description="Share of the pool that requests may keep blocks in by their hint `keep`.",
        json_schema_extra={"unit": "share"},
    )


def _namespace(value: object) -> object:
    if value == "auto":
        return {}
    if isinstance(value, str):
        return {"name": value}
    return value


class NamespaceSettings(Settings, frozen=True):
    """What is added to the fingerprint of model and engine; nothing where both are None."""

    name: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="Part of the namespace: deployments with different names share no block.",
    )
    weights: str | None = Field(
        default=None,
        min_length=1,
        max_length=256,
        description="Identity of the weights, in place of the one that is computed from the "
        "weight files.",
    )


def _namespace_schema(schema: JsonDict) -> None:
    whole = {"$ref": schema.pop("$ref", "#/$defs/NamespaceSettings")}
    schema.update({"anyOf": [{"type": "string"}, whole], "default": "auto", "unit": "name"})


class Admit(Settings, frozen=True):
    """Which blocks are worth storing."""

    min_uses: int = Field(
        default=1,
        ge=1,
        le=1000,
        description="How often a block must have been wanted before it is stored.",
        json_schema_extra={"unit": "uses"},
    )


class Placement(Settings, frozen=True):
    """Where blocks are stored."""

    write: tuple[str, ...] | None = Field(
        default=None,
        description="Names of the tiers that new blocks are stored in; by default every tier "
        "that is not read only, in the order of `tiers`.",
    )
    admit: Admit = Field(default=Admit(), description="Which blocks are worth storing.")


class Limits(Settings, frozen=True):
    """How long things may take and how much may wait."""

    load_deadline: Duration = Field(
        default=2.0,
        gt=0,
        description="A load that takes longer is given up and recomputed; sooner where the gate of "
        "`recompute` is not off and computing its tokens is predicted to take less.",
    )
    store_deadline: Duration = Field(
        default=10.0, gt=0, description="A store that takes longer is given up and forgotten."
    )
    lookup_wait: Duration = Field(
        default=0.05,
        description="How long a request waits for a block that is just being stored, or for an "
        "index that is still being read.",
    )
    lookup_wait_far: Duration = Field(
        default=2.0,
        description="How long a request waits, at most as long as computing them takes, for blocks "
        "of a tier so slow that they are brought into host memory before the load.",
    )
    store_queue: ByteSize = Field(
        default=2 * GIB,
        gt=0,
        description="What may wait to be written to the lower tiers, per rank; beyond it stores "
        "to them are dropped and counted, those to the tier that is furthest behind first.",
    )
    store_queue_time: Duration = Field(
        default=30.0,
        gt=0,
        description="For how many seconds of writing, at the measured speed of a tier, blocks may "
        "wait for it; beyond it stores to it are dropped and counted.",
    )
    drain: Duration = Field(
        default=10.0, gt=0, description="How long a shutdown waits for transfers that run."
    )
    retry_backoff: Duration = Field(
        default=5.0,
        gt=0,
        description="How long blocks of a tier that failed or was too slow are not asked for, and "
        "after which a tier that does not work is tried again: by a background read, each time "
        "after a longer wait.",
    )
    staging: ByteSize = Field(
        default=128 * MIB,
        gt=0,
        description="Host memory per rank through which blocks pass that have no slot in a cpu "
        "tier.",
    )


_MAX_CHUNK = 4096


def _chunk(value: object) -> object:
    if value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int | None):
        raise ValueError(f"{value!r} is neither auto nor a number of engine blocks")
    if value is not None and not 1 <= value <= _MAX_CHUNK:
        raise ValueError(f"{value} is not in 1 to {_MAX_CHUNK} engine blocks")
    return value


def _off(value: object) -> object:
    # YAML reads a bare `off` as false.
    return "off" if value is False else value


class Recompute(Settings, frozen=True):
    """When computing blocks again is better than loading them."""

    gate: Annotated[Literal["measured", "fixed", "off"], BeforeValidator(_off)] = Field(
        default="measured",
        description="measured: a prefix is loaded as far as that is faster than computing it, by "
        "the load rate of each tier and the engine's prefill rate, both measured; fixed: the same, "
        "with the prefill rate of `tokens_per_second`; off: whatever is found is loaded.",
    )
    tokens_per_second: float | None = Field(
        default=None,
        gt=0,
        description="Prefill rate of the engine where `gate` is fixed.",
        json_schema_extra={"unit": "tokens per second"},
    )

    @model_validator(mode="after")
    def _rate(self) -> Recompute:
        if (self.gate == "fixed") != (self.tokens_per_second is not None):
            raise ValueError(
                "tokens_per_second is needed where gate is fixed, and only there: "
                f"gate is {self.gate}, tokens_per_second is {self.tokens_per_second}"
            )
        return self


class TraceSettings(Settings, frozen=True):
    """Record what requests want, for `tiered-kv plan`."""

    path: Directory = Field(
        description="Directory of the trace; made when it is not there. Engines may share it. A "
        "secret in it keeps the names of blocks from being guessed; it is not needed to plan.",
    )
    max_size: ByteSize = Field(
        default=256 * MIB,
        ge=MIB,
        description="Most bytes of all traces in the directory; the oldest file goes first.",
    )


class Deployment(Settings, frozen=True):
    """One deployment: the tiers of an engine and how they are used."""

    namespace: Annotated[NamespaceSettings, BeforeValidator(_namespace)] = Field(
        default=NamespaceSettings(),
        json_schema_extra=_namespace_schema,
        description="auto (the fingerprint of model and engine), or a name that is added to it, "
        "or {name, weights}.",
    )
    store: Literal["prompt", "all"] = Field(
        default="all",
        description="prompt: blocks of prompts only; all: also those of the answers, which a "
        "chat's next turn needs.",
    )
    chunk: Annotated[
        int | None,
        BeforeValidator(_chunk),
        PlainSerializer(lambda chunk: chunk or "auto", when_used="json"),
        WithJsonSchema(
            {
                "anyOf": [
                    {"const": "auto"},
                    {"type": "integer", "minimum": 1, "maximum": _MAX_CHUNK},
                ],
                "unit": "engine blocks",
            }
        ),
    ] = Field(
        default=None,
        description="Engine blocks per block; auto (None in Python): as many as make 1MiB per "
        "rank, at most 256 tokens.",
        json_schema_extra={"default": "auto"},
    )
    tiers: tuple[SerializeAsAny[TierSettings], ...] = Field(
        min_length=1, description="The tiers, nearest to the engine first."
    )
    placement: Placement = Field(default=Placement(), description="Where blocks are stored.")
    limits: Limits = Field(
        default=Limits(), description="How long things may take and how much may wait."
    )
    recompute: Recompute = Field(
        default=Recompute(),
        description="When computing blocks again is better than loading them.",
    )
    trace: TraceSettings | None = Field(
        default=None,
        description="Record which blocks requests want, and when, for `tiered-kv plan`: no text "
        "and no token. What the recorder is too slow for is dropped and counted.",
    )
    on_reset: Literal["leave", "keep", "erase"] = Field(
        default="leave",
        description="What a reset of the engine's prefix cache does to the stores, which go on in "
        "any case. leave: this engine uses none of the blocks stored so far, other engines and a "
        "restart do; keep: it goes on using them, which is wrong where its weights have changed; "
        "erase: as leave, and they are deleted in the background, also for other engines of the "
        "same model. A vLLM engine that is put to sleep (level 1 or 2) resets its cache.",
    )

    @model_validator(mode="after")
    def _agree(self) -> Deployment:
        found = disagreements(dict(enumerate(self.tiers)), self.placement.write)
        if found:
            raise ValidationError.from_exception_data(
                type(self).__name__, [_line_error(problem) for problem in found]
            )
        return self

    @property
    def cpu(self) -> CpuSettings | None:
        """The host tier, where one is configured."""
        return next((tier for tier in self.tiers if isinstance(tier, CpuSettings)), None)

    @property
    def stores(self) -> tuple[TierSettings, ...]:
        """The tiers below the host tier, in order."""
        return tuple(tier for tier in self.tiers if not isinstance(tier, CpuSettings))

    @property
    def write_order(self) -> tuple[TierSettings, ...]:
        """The tiers that new blocks are stored in, in order."""
        if self.placement.write is None:
            return tuple(tier for tier in self.tiers if tier.writable)
        return tuple(self.tier(name) for name in self.placement.write)

    def tier(self, name: str) -> TierSettings:
        """The tier of this name.

        Raises:
            KeyError: there is none.
        """
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise KeyError(name)


def _line_error(problem: Disagreement) -> InitErrorDetails:
    error = PydanticCustomError("disagreement", "{problem}", {"problem": problem.message})
    return InitErrorDetails(type=error, loc=problem.loc, input=None)
