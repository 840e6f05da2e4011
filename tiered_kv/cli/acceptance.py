"""Whether blocks of another store or host may go into a tier: the fingerprint decides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiered_kv.cli.output import excerpts
from tiered_kv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiered_kv.cli.tending import StoreTier
    from tiered_kv.contracts import StoredNamespace
    from tiered_kv.values import CacheGeometry, Namespace

__all__ = ["accept"]


def accept(
    namespace: Namespace, geometry: CacheGeometry, target: StoreTier, *, source: str, new: bool
) -> StoredNamespace:
    """What is to be stored in a tier, if engines that used it would find these blocks.

    Args:
        namespace: of the blocks.
        geometry: what they are.
        target: where they are to go.
        source: where they come from, for people.
        new: whether a namespace that the tier does not know is welcome beside those that it knows;
            into one that knows none anything may go.

    Raises:
        ConfigError: they would not, and how the fingerprints differ; or the tier holds the same
            namespace with blocks of another shape.
    """
    from tiered_kv.contracts import StoredNamespace

    known = target.namespaces()
    name = namespace.id.hex()
    same = next((one for one in known if one.namespace.id == namespace.id), None)
    if same is not None and same.geometry != geometry:
        raise ConfigError(
            f"tier {target.name!r} holds namespace {name} with blocks of another shape than "
            f"{source}: {_shape(same.geometry)} there, {_shape(geometry)} here"
        )
    if same is None and known and not new:
        raise ConfigError(_refusal(namespace, [one.namespace for one in known], target, source))
    return StoredNamespace(namespace, geometry, 0, 0, in_use=False)


def _refusal(
    namespace: Namespace, known: Sequence[Namespace], target: StoreTier, source: str
) -> str:
    from tiered_kv.upkeep import differences

    nearest = min(known, key=lambda one: (len(differences(namespace, one)), one.id))
    head = (
        f"{source} has namespace {namespace.id.hex()}, and the engines of tier {target.name!r} "
        "have another fingerprint: they would not find these blocks."
    )
    lines = [head, f"From the nearest, {nearest.id.hex()}, it differs in"]
    for field, here, there in differences(namespace, nearest):
        ours, theirs = excerpts([here, there], 60)
        lines.append(f"  {field}: {ours or 'nothing'} here, {theirs or 'nothing'} there")
    lines.append(
        "Nothing was stored. If an engine with this fingerprint is to use the tier, give "
        "--new-namespace"
    )
    return "\n".join(lines)


def _shape(geometry: CacheGeometry) -> str:
    groups = ", ".join(str(group.block_bytes) for group in geometry.groups)
    return f"{geometry.world_size} ranks, blocks of {groups} bytes"
