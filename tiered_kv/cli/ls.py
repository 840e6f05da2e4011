"""`tiered-kv ls`: which namespaces and keys the tiers hold."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tiered_kv.cli.output import (
    FAILED,
    Config,
    Json,
    Tier,
    bytes_text,
    excerpts,
    print_json,
    print_table,
)
from tiered_kv.cli.tending import NamespaceId, StoreTier, Tended, chosen, store_tiers, tend

if TYPE_CHECKING:
    from pathlib import Path

    from tiered_kv.contracts import StoredNamespace

__all__ = ["ls"]

ALWAYS = ("name", "architectures")
"""Fields that are shown also where they tell nothing apart."""

Limit = Annotated[
    int, typer.Option("--limit", min=1, help="Most keys that are listed of a tier.", metavar="N")
]


def ls(
    config: Config,
    tier: Tier = None,
    namespace: NamespaceId = None,
    limit: Limit = 100,
    as_json: Json = False,
) -> None:
    """List the namespaces that the tiers hold, or with --namespace the keys of one, in hex."""
    tiers = store_tiers(config, tier)
    held = tend(tiers, StoreTier.namespaces)
    if namespace is None:
        _list_namespaces(config, tiers, held, as_json=as_json)
    else:
        _list_keys(tiers, chosen(held.found, namespace), limit, as_json=as_json)
    if held.failed:
        raise typer.Exit(FAILED)


def _list_namespaces(
    config: Path,
    tiers: Sequence[StoreTier],
    held: Tended[Sequence[StoredNamespace]],
    *,
    as_json: bool,
) -> None:
    if as_json:
        entries = held.entries(tiers, lambda namespaces: {"namespaces": _as_json(namespaces)})
        print_json({"config": str(config), "tiers": entries})
        return
    for name, namespaces in held.found.items():
        if not namespaces:
            typer.echo(f"tier {name} holds nothing")
            continue
        told = _told(namespaces)
        print_table(
            f"Tier {name}",
            ("namespace", "what tells it", "blocks", "bytes", "ranks", "in use"),
            (
                (
                    stored.namespace.id.hex(),
                    "\n".join(f"{field}: {value}" for field, value in what.items()),
                    str(stored.blocks),
                    bytes_text(stored.used_bytes),
                    str(stored.geometry.world_size),
                    "yes" if stored.in_use else "no",
                )
                for stored, what in zip(namespaces, told, strict=True)
            ),
            whole="namespace",
        )


def _told(namespaces: Sequence[StoredNamespace]) -> list[dict[str, str]]:
    """For each namespace the properties that are worth showing."""
    from tiered_kv.upkeep import properties, telling

    each = [properties(stored.namespace) for stored in namespaces]
    fields = dict.fromkeys((*ALWAYS, *telling([stored.namespace for stored in namespaces])))
    shown = {field: excerpts([one.get(field, "-") for one in each]) for field in fields}
    return [
        {field: texts[place] for field, texts in shown.items() if texts[place] != "-"}
        for place in range(len(each))
    ]


def _as_json(namespaces: Sequence[StoredNamespace]) -> list[dict[str, Any]]:
    from tiered_kv.upkeep import telling

    differing = telling([stored.namespace for stored in namespaces])
    return [
        {
            "namespace": stored.namespace.id.hex(),
            "fields": dict(stored.namespace.fingerprint.fields),
            "epoch": stored.namespace.epoch.hex(),
            "telling": list(differing),
            "blocks": stored.blocks,
            "used_bytes": stored.used_bytes,
            "ranks": stored.geometry.world_size,
            "in_use": stored.in_use,
        }
        for stored in namespaces
    ]


def _list_keys(
    tiers: Sequence[StoreTier],
    wanted: dict[str, StoredNamespace],
    limit: int,
    *,
    as_json: bool,
) -> None:
    listed: list[dict[str, Any]] = []
    for tier in tiers:
        stored = wanted.get(tier.name)
        if stored is None:
            continue
        with tier.store(stored, 0) as store:
            keys = [key.hex() for key in islice(store.scan(), limit)]
        listed.append(
            {
                "tier": tier.name,
                "namespace": stored.namespace.id.hex(),
                "blocks": stored.blocks,
                "keys": keys,
            }
        )
    if as_json:
        print_json({"tiers": listed})
        return
    for entry in listed:
        shown = len(entry["keys"])
        more = "" if shown < limit else f", of which {shown} are listed; --limit lists more"
        typer.echo(f"tier {entry['tier']}: {entry['blocks']} blocks{more}", err=True)
        for key in entry["keys"]:
            typer.echo(key)
