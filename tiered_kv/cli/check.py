"""`tiered-kv check`: is a deployment valid, and does each of its tiers work here?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from tiered_kv.cli.output import (
    FAILED,
    BlockSize,
    Config,
    Json,
    Ranks,
    bytes_text,
    print_json,
    print_table,
    read_seconds,
    read_size,
)

if TYPE_CHECKING:
    from tiered_kv.config import Deployment
    from tiered_kv.plugins import Plugins

__all__ = ["check"]

Timeout = Annotated[
    str, typer.Option("--timeout", help="For each step of a tier's self-test.", metavar="DURATION")
]


@dataclass(frozen=True, slots=True)
class _Finding:
    tiers: tuple[str, ...]
    """Names; several where tiers share a volume."""
    check: str
    ok: bool
    detail: str


def check(
    config: Config,
    block_size: BlockSize = "2MiB",
    ranks: Ranks = 1,
    timeout: Timeout = "30s",
    as_json: Json = False,
) -> None:
    """Check a configuration, its directories and free space, and store, read back, compare and
    delete one block in every tier, through the same handlers that serve."""
    from tiered_kv.config import load
    from tiered_kv.plugins import Plugins

    block_bytes, seconds = read_size(block_size), read_seconds(timeout)
    plugins = Plugins()
    deployment = load(config, plugins)
    findings = [
        *_backends(deployment, plugins),
        *_directories(deployment),
        *_space(deployment, ranks),
    ]
    unfit = {name for finding in findings if not finding.ok for name in finding.tiers}
    modes: dict[str, dict[str, str]] = {}
    for name in (tier.name for tier in deployment.tiers if tier.name not in unfit):
        finding, in_effect = _self_test(deployment, plugins, name, block_bytes, seconds)
        findings.append(finding)
        modes[name] = in_effect
    ok = all(finding.ok for finding in findings)
    if as_json:
        print_json(
            {
                "config": str(config),
                "ok": ok,
                "checks": [asdict(finding) for finding in findings],
                "modes": modes,
            }
        )
    else:
        _print(str(config), findings, modes)
    if not ok:
        raise typer.Exit(FAILED)


def _backends(deployment: Deployment, plugins: Plugins) -> Iterator[_Finding]:
    from tiered_kv.errors import PluginError

    for tier in deployment.stores:
        try:
            backend = plugins.usable(tier.type)
        except PluginError as error:
            yield _Finding((tier.name,), "backend", False, str(error))
        else:
            yield _Finding((tier.name,), "backend", True, f"{backend.name}: {backend.description}")


def _directories(deployment: Deployment) -> Iterator[_Finding]:
    from tiered_kv.config.room import existing_parent

    for tier in deployment.tiers:
        for directory in tier.directories.values():
            parent = existing_parent(directory)
            wanted = os.R_OK | os.X_OK | (os.W_OK if tier.writable else 0)
            problem = None
            if not parent.is_dir():
                problem = f"{parent} is not a directory"
            elif parent != directory and not tier.writable:
                problem = f"{directory} does not exist, and the tier is read only"
            elif not os.access(parent, wanted):
                problem = f"{parent} is not {'writable' if tier.writable else 'readable'} for us"
            made = "exists" if parent == directory else f"will be made in {parent}"
            detail = problem or f"{directory} {made}"
            yield _Finding((tier.name,), "directory", problem is None, detail)


def _space(deployment: Deployment, ranks: int) -> Iterator[_Finding]:
    from tiered_kv.config import volumes

    for volume in volumes(deployment, ranks):
        room = bytes_text(volume.free_bytes + volume.held_bytes)
        fits = f"{bytes_text(volume.wanted_bytes)} wanted, {room} available ({volume.place})"
        detail = volume.shortage or fits
        yield _Finding(tuple(volume.tiers), "space", volume.shortage is None, detail)


def _self_test(
    deployment: Deployment, plugins: Plugins, tier: str, block_bytes: int, seconds: float
) -> tuple[_Finding, dict[str, str]]:
    from tiered_kv.cli.selftest import SelfTest
    from tiered_kv.config import Placement
    from tiered_kv.connector.assembly import Assembly

    tested = deployment.tier(tier)
    tiers = tuple(t for t in deployment.tiers if t in (tested, deployment.cpu))
    alone = deployment.model_copy(update={"tiers": tiers, "placement": Placement()})
    assembly = Assembly(alone, plugins.deployed([tested.type]))
    verdict = SelfTest(assembly, block_bytes, seconds).run(tier)
    return _Finding((tier,), "self-test", verdict.ok, verdict.detail), dict(verdict.modes)


def _print(config: str, findings: list[_Finding], modes: dict[str, dict[str, str]]) -> None:
    print_table(
        f"Check of {config}",
        ("tier", "check", "", "detail"),
        (
            (
                ", ".join(finding.tiers),
                finding.check,
                "ok" if finding.ok else "FAILED",
                finding.detail,
            )
            for finding in findings
        ),
    )
    print_table(
        "In effect",
        ("tier", "mode", "value"),
        ((tier, name, value) for tier, said in modes.items() for name, value in said.items()),
    )
