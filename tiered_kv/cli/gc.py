"""`tiered-kv gc`: give back the room of what nobody needs any more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tiered_kv.cli.output import (
    FAILED,
    Config,
    Json,
    Tier,
    bytes_text,
    print_json,
    print_table,
    warn,
)
from tiered_kv.cli.tending import NamespaceId, StoreTier, chosen, store_tiers, tend
from tiered_kv.errors import ConfigError

if TYPE_CHECKING:
    from tiered_kv.contracts import Reconciliation, StoredNamespace

__all__ = ["gc"]

Unused = Annotated[
    bool, typer.Option("--unused", help="Drop every namespace that no process has open.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@dataclass(frozen=True, slots=True)
class _Plan:
    leftovers: Reconciliation
    namespaces: Sequence[StoredNamespace]
    """To be dropped."""

    @property
    def is_empty(self) -> bool:
        return not (self.leftovers.found or self.namespaces)


@dataclass(frozen=True, slots=True)
class _Outcome:
    leftovers: Reconciliation
    dropped: Mapping[str, int]
    """Blocks by namespace id in hex."""
    given_back: int
    """Bytes that the file system has more, as far as nobody wrote meanwhile."""


def gc(
    config: Config,
    tier: Tier = None,
    namespace: NamespaceId = None,
    unused: Unused = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Remove what dead processes left in the tiers, and drop whole namespaces where told to.
    Engines may run meanwhile; a namespace that one has open is not dropped.

    Exits 1 if something could not be removed.
    """
    if namespace is not None and unused:
        raise typer.BadParameter("give --namespace or --unused, not both")
    if as_json and not (yes or dry_run):
        raise typer.BadParameter("--json cannot ask; give --yes or --dry-run with it")
    tiers = _writable(store_tiers(config, tier), named=tier is not None)
    held = tend(tiers, StoreTier.namespaces)
    doomed = _doomed(held.found, namespace, unused=unused)
    plans = tend(
        [one for one in tiers if one.name in held.found],
        lambda one: _Plan(_leftovers(one, repair=False), doomed.get(one.name, ())),
    )
    plans.failed.update(held.failed)
    if not as_json:
        _print_plans(plans.found)
    if dry_run:
        if as_json:
            entries = plans.entries(tiers, _plan_as_json)
            print_json({"config": str(config), "dry_run": True, "tiers": entries})
    else:
        busy = [one for one in tiers if one.name in plans.found]
        if not (yes or all(plan.is_empty for plan in plans.found.values())):
            typer.confirm("Remove this?", abort=True)
        done = tend(busy, lambda one: _remove(one, plans.found[one.name]))
        plans.failed.update(done.failed)
        if as_json:
            done.failed.update(plans.failed)
            entries = done.entries(tiers, _outcome_as_json)
            print_json({"config": str(config), "dry_run": False, "tiers": entries})
        for name, outcome in done.found.items():
            if not as_json:
                blocks = sum(outcome.dropped.values())
                back = bytes_text(outcome.given_back)
                typer.echo(f"tier {name}: {blocks} blocks dropped, {back} given back")
            for kind, count in outcome.leftovers.left.items():
                plans.failed.setdefault(name, ConfigError(f"{count} {kind}"))
                warn(f"tier {name}: {count} {kind} could not be removed")
    if plans.failed:
        raise typer.Exit(FAILED)


def _writable(tiers: list[StoreTier], *, named: bool) -> list[StoreTier]:
    """Those that may be changed."""
    for one in tiers:
        if named or len(tiers) == 1:
            one.require_writable("nothing in it can be removed")
        elif not one.settings.writable:
            warn(f"tier {one.name!r} is read only (access: read) and is left as it is")
    return [one for one in tiers if one.settings.writable]


def _doomed(
    held: Mapping[str, Sequence[StoredNamespace]], text: str | None, *, unused: bool
) -> dict[str, list[StoredNamespace]]:
    """By tier, the namespaces that are to be dropped."""
    if unused:
        return {name: [one for one in many if not one.in_use] for name, many in held.items()}
    if text is None:
        return {}
    wanted = chosen(held, text)
    for name, stored in wanted.items():
        if stored.in_use:
            raise ConfigError(
                f"namespace {stored.namespace.id.hex()} in tier {name!r} is in use; stop the "
                "engine that has it open, then drop it"
            )
    return {name: [stored] for name, stored in wanted.items()}


def _leftovers(tier: StoreTier, *, repair: bool) -> Reconciliation:
    from tiered_kv.contracts import Reconciliation

    if not tier.is_there:
        return Reconciliation()
    with tier.maintenance(writable=repair) as maintenance:
        return maintenance.reconcile(repair=repair)


def _remove(tier: StoreTier, plan: _Plan) -> _Outcome:
    before = tier.held_bytes()
    dropped: dict[str, int] = {}
    leftovers = plan.leftovers
    if not plan.is_empty:
        with tier.maintenance(writable=True) as maintenance:
            leftovers = maintenance.reconcile(repair=True)
            for stored in plan.namespaces:
                name = stored.namespace.id.hex()
                try:
                    dropped[name] = maintenance.drop(stored.namespace.id)
                except ValueError as error:  # an engine opened it since we looked
                    raise ConfigError(
                        f"namespace {name} in tier {tier.name!r} was not dropped: {error}"
                    ) from error
    return _Outcome(leftovers, dropped, max(0, before - tier.held_bytes()))


def _print_plans(plans: Mapping[str, _Plan]) -> None:
    rows = [
        *(
            (name, kind, str(count), "")
            for name, plan in plans.items()
            for kind, count in plan.leftovers.found.items()
        ),
        *(
            (
                name,
                f"namespace {stored.namespace.id.hex()}",
                f"{stored.blocks} blocks",
                bytes_text(stored.used_bytes),
            )
            for name, plan in plans.items()
            for stored in plan.namespaces
        ),
    ]
    if rows:
        print_table("To be removed", ("tier", "what", "count", "bytes"), rows)
    else:
        typer.echo("nothing is left over")


def _plan_as_json(plan: _Plan) -> dict[str, Any]:
    return {
        "leftovers": dict(plan.leftovers.found),
        "namespaces": [
            {
                "namespace": stored.namespace.id.hex(),
                "blocks": stored.blocks,
                "used_bytes": stored.used_bytes,
            }
            for stored in plan.namespaces
        ],
    }


def _outcome_as_json(outcome: _Outcome) -> dict[str, Any]:
    return {
        "leftovers": dict(outcome.leftovers.found),
        "removed": dict(outcome.leftovers.repaired),
        "dropped_blocks": dict(outcome.dropped),
        "given_back_bytes": outcome.given_back,
    }
