"""The policies that `eviction.policy` may name: ours, and those that plug-in packages announce
under the entry-point group `tiered_kv.policies`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points

from tiered_kv.announced import (
    NAME,
    by_name,
    call_problems,
    descriptor_problems,
    load_descriptor,
)
from tiered_kv.contracts import API_VERSION, Policy, Recency, Scoring
from tiered_kv.errors import ConfigError
from tiered_kv.placement.arc import ArcPolicy
from tiered_kv.placement.lru import LruPolicy
from tiered_kv.placement.prefix import PrefixPolicy
from tiered_kv.placement.s3fifo import S3FifoPolicy
from tiered_kv.placement.scoring import AgedFrequency

__all__ = ["BUILT_IN", "DEFAULT_POLICY", "GROUP", "Policies"]

GROUP = "tiered_kv.policies"
"""The entry-point group. The entry point's name is the policy's name."""

DEFAULT_POLICY = "prefix"

STORE_HALF_LIFE = 600.0
"""Seconds after which a use counts half in a store, where no half-life is given."""

BUILT_IN: Mapping[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy(
            name=DEFAULT_POLICY,
            api_version=API_VERSION,
            description="Least worth first, by how often, how long ago and by what kind of request "
            "a block was wanted, learned as it runs; in stores by aged frequency.",
            make=lambda context: PrefixPolicy(context.capacity, context.half_life),
            scoring=lambda half_life: AgedFrequency(
                STORE_HALF_LIFE if half_life is None else half_life
            ),
        ),
        Policy(
            name="lru",
            api_version=API_VERSION,
            description="Least recently used first.",
            make=lambda context: LruPolicy(),
            scoring=lambda half_life: Recency(),
        ),
        Policy(
            name="s3-fifo",
            api_version=API_VERSION,
            description="Three queues; what is not used soon goes soon.",
            make=lambda context: S3FifoPolicy(context.capacity),
        ),
        Policy(
            name="arc",
            api_version=API_VERSION,
            description="Recency and frequency, in shares that follow the misses.",
            make=lambda context: ArcPolicy(context.capacity),
        ),
    )
}


class Policies:
    """Our policies and the installed ones. Not thread-safe."""

    def __init__(self, discover: Callable[[], Iterable[EntryPoint]] | None = None) -> None:
        """Read nothing yet; `discover` gives the entry points, by default the installed ones."""
        self._discover = _installed if discover is None else discover
        self._found: dict[str, list[EntryPoint]] | None = None

    def names(self) -> tuple[str, ...]:
        """Of all that are announced, ours first; loads none."""
        return (*BUILT_IN, *sorted(set(self._entries()) - set(BUILT_IN)))

    def get(self, name: str, where: str) -> Policy:
        """The policy of a name.

        Args:
            name: as in `eviction.policy`.
            where: key path of that setting, for the message.

        Raises:
            ConfigError: there is none of this name.
            PluginError: it cannot be loaded, has the wrong shape, or two packages claim the name.
        """
        entries = self._entries().get(name, [])
        if name in BUILT_IN and not entries:
            return BUILT_IN[name]
        if not entries:
            near = get_close_matches(name, self.names(), 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(
                f"{where}: there is no eviction policy {name!r}; {hint}"
                f"installed are {', '.join(self.names())}"
            )
        return load_descriptor(
            "eviction policy",
            name,
            entries,
            Policy,
            _problems,
            others=("tiered-kv itself",) if name in BUILT_IN else (),
            remedy="uninstall or rename",
        )

    def scoring(self, name: str, half_life: float | None, where: str) -> Scoring:
        """The scoring by which a policy orders a store; for the arguments see `get`.

        Raises:
            ConfigError: there is none of this name, or it is for the host tier alone.
            PluginError: as for `get`.
        """
        policy = self.get(name, where)
        if policy.scoring is None:
            fit = [other for other in BUILT_IN if BUILT_IN[other].scoring is not None]
            raise ConfigError(
                f"{where}: policy {name!r} is for the host tier alone, since a store keeps one "
                f"number per block; use one of {', '.join(fit)}"
            )
        return policy.scoring(half_life)

    def _entries(self) -> dict[str, list[EntryPoint]]:
        if self._found is None:
            self._found = by_name(self._discover())
        return self._found


def _installed() -> Iterable[EntryPoint]:
    return entry_points(group=GROUP)


def _problems(name: str, loaded: Policy) -> Iterable[str]:
    """What is wrong with a descriptor, gravest first."""
    yield from descriptor_problems("policy", name, loaded)
    if not NAME.fullmatch(name):
        yield "has a name that no policy may have: a-z, 0-9, _ and -"
    expected = "make(context: PolicyContext) -> EvictionPolicy"
    yield from call_problems("make", loaded.make, (None,), expected)
    if loaded.scoring is not None:
        expected = "scoring(half_life: float | None) -> Scoring"
        yield from call_problems("scoring", loaded.scoring, (None,), expected)
