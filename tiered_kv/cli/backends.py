"""`tiered-kv backends`: what is installed, and why something cannot be used."""

from __future__ import annotations

from dataclasses import asdict

from tiered_kv.cli.output import Json, print_json, print_table

__all__ = ["backends"]


def backends(as_json: Json = False) -> None:
    """List the installed backends, usable or not, with the reason."""
    from tiered_kv import __version__
    from tiered_kv.plugins import Availability, Plugins

    core = Availability(
        name="cpu",
        distribution="tiered-kv",
        version=__version__,
        medium="cpu",
        description="The host block pool, part of the core.",
        available=True,
        tier=True,
    )
    found = (core, *Plugins().report())
    if as_json:
        print_json({"backends": [asdict(backend) for backend in found]})
        return
    print_table(
        "Backends",
        ("name", "tier type", "usable", "from", "description"),
        (
            (
                backend.name,
                "yes" if backend.tier else "no",
                "yes" if backend.available else "no",
                f"{backend.distribution} {backend.version}",
                backend.description if backend.available else f"{backend.reason}; {backend.hint}",
            )
            for backend in found
        ),
    )
