"""`tiered-kv stat`: how full and how worn the tiers are, what is in effect, and how their
namespaces differ."""

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
    excerpts,
    print_json,
    print_table,
)
from tiered_kv.cli.tending import StoreTier, store_tiers, tend

if TYPE_CHECKING:
    from tiered_kv.contracts import StoredNamespace
    from tiered_kv.upkeep import Resemblance

__all__ = ["TierState", "stat", "state_of"]

Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Also every field of each namespace's fingerprint.")
]


@dataclass(frozen=True, slots=True)
class TierState:
    """How full and how worn a tier is, and what is in effect."""

    capacity_bytes: int
    used_bytes: int
    room_bytes: int
    """What may still be stored without evicting: within the capacity, and the file system's room
    above `min_free`."""
    written_bytes: int | None
    """Since the tier was made; None where that is not known."""
    written_today: int | None
    write_budget: int
    """Bytes per day; 0: no limit."""
    kept_blocks: int | None
    """That are kept now, of all namespaces; None where the store keeps none."""
    modes: Mapping[str, str]
    namespaces: Sequence[StoredNamespace]
    alike: Sequence[Resemblance]

    @property
    def blocks(self) -> int:
        """Visible blocks of all namespaces."""
        return sum(stored.blocks for stored in self.namespaces)


def stat(
    config: Config, tier: Tier = None, verbose: Verbose = False, as_json: Json = False
) -> None:
    """Show how full and how worn each tier is and what is in effect, and which namespaces differ in
    so few fields that one may have turned cold when an engine was started with other arguments."""
    tiers = store_tiers(config, tier)
    states = tend(tiers, state_of)
    if as_json:
        print_json({"config": str(config), "tiers": states.entries(tiers, _as_json)})
    else:
        _print(states.found, verbose=verbose)
    if states.failed:
        raise typer.Exit(FAILED)


def state_of(tier: StoreTier) -> TierState:
    """How full and how worn a tier is."""
    from tiered_kv.config.room import free_above_floor
    from tiered_kv.contracts import KeepsBlocks
    from tiered_kv.upkeep import resemblances

    namespaces = tier.namespaces()
    capacity, used = int(tier.settings.capacity), tier.held_bytes()
    modes: Mapping[str, str] = {}
    written: int | None = None
    today: int | None = None
    kept: int | None = None
    if namespaces:
        # Only a store knows what is in effect; it is opened for what lies there, so that an index
        # is laid out as its engine does it.
        with tier.store(namespaces[0], 0) as store:
            told = store.stat()
            kept = store.kept() if isinstance(store, KeepsBlocks) else None
        capacity, used, modes = told.capacity_bytes, told.used_bytes, dict(told.modes)
        written, today = told.written_bytes, told.written_today
        if "access" in modes:  # it was opened to look
            modes["access"] = getattr(tier.settings, "access", modes["access"])
    room = max(0, capacity - used)
    for directory in tier.settings.directories.values():
        room = min(room, free_above_floor(tier.settings, directory))
    return TierState(
        capacity,
        used,
        room if tier.settings.writable else 0,
        written,
        today,
        int(getattr(tier.settings, "write_budget", 0)),
        kept,
        modes,
        namespaces,
        resemblances([stored.namespace for stored in namespaces]),
    )


def _as_json(state: TierState) -> dict[str, Any]:
    return {
        "capacity_bytes": state.capacity_bytes,
        "used_bytes": state.used_bytes,
        "room_bytes": state.room_bytes,
        "blocks": state.blocks,
        "written_bytes": state.written_bytes,
        "written_today_bytes": state.written_today,
        "write_budget_bytes": state.write_budget or None,
        "kept_blocks": state.kept_blocks,
        "modes": dict(state.modes),
        "namespaces": [
            {
                "namespace": stored.namespace.id.hex(),
                "fields": dict(stored.namespace.fingerprint.fields),
                "epoch": stored.namespace.epoch.hex(),
                "blocks": stored.blocks,
                "used_bytes": stored.used_bytes,
                "ranks": stored.geometry.world_size,
                "in_use": stored.in_use,
            }
            for stored in state.namespaces
        ],
        "alike": [
            {
                "namespace": one.namespace.hex(),
                "other": one.other.hex(),
                "differences": [
                    {"field": field, "value": here, "other": there}
                    for field, here, there in one.differences
                ],
            }
            for one in state.alike
        ],
    }


def _print(states: Mapping[str, TierState], *, verbose: bool) -> None:
    from tiered_kv.upkeep import properties

    print_table(
        "Tiers",
        ("tier", "used", "capacity", "room", "blocks", "namespaces"),
        (
            (
                name,
                bytes_text(state.used_bytes),
                bytes_text(state.capacity_bytes),
                bytes_text(state.room_bytes),
                str(state.blocks),
                str(len(state.namespaces)),
            )
            for name, state in states.items()
        ),
    )
    for name, state in states.items():
        if state.kept_blocks:
            typer.echo(f"{state.kept_blocks} blocks of tier {name} are kept (warm --keep)")
    worn = [
        (
            name,
            bytes_text(state.written_bytes),
            bytes_text(state.written_today or 0),
            bytes_text(state.write_budget) if state.write_budget else "no limit",
        )
        for name, state in states.items()
        if state.written_bytes is not None
    ]
    if worn:
        print_table("Written", ("tier", "in all", "today (UTC)", "budget per day"), worn)
    modes = [
        (name, mode, value) for name, state in states.items() for mode, value in state.modes.items()
    ]
    if modes:
        print_table("In effect", ("tier", "mode", "value"), modes)
    if any(state.alike for state in states.values()):
        print_table(
            "Namespaces that differ in few fields",
            ("tier", "namespace", "field", "value"),
            (row for name, state in states.items() for row in _alike_rows(name, state)),
            whole="namespace",
        )
    for name, state in states.items() if verbose else ():
        for stored in state.namespaces:
            print_table(
                f"Namespace {stored.namespace.id.hex()} in tier {name}",
                ("field", "value"),
                properties(stored.namespace).items(),
            )


def _alike_rows(tier: str, state: TierState) -> list[tuple[str, str, str, str]]:
    return [
        (tier, namespace.hex(), field, value)
        for one in state.alike
        for field, here, there in one.differences
        for namespace, value in zip(
            (one.namespace, one.other), excerpts((here, there)), strict=True
        )
    ]
