"""Which chain is chosen, and why."""

from __future__ import annotations

import pytest

from tests.unit.doubles import DirectLoad, FastSpec, Gather, Scatter, SlowSpec, fast
from tiered_kv.engine import register_store_handlers
from tiered_kv.errors import TierError
from tiered_kv.registry import TransferRegistry
from tiered_kv.routing import (
    CPU_ENDPOINT,
    GPU_ENDPOINT,
    Endpoint,
    Hop,
    HopCost,
    Router,
    assumed_cost,
    endpoint_of,
)
from tiered_kv.specs import CpuSpec, GpuSpec, SlotRef

FAST = Endpoint(FastSpec, "fast")
SLOW = Endpoint(SlowSpec, "slow")
BLOCK = 2**20


def registry(*, direct: bool = True, slow: bool = True) -> TransferRegistry:
    pairs = TransferRegistry()
    pairs.register(GpuSpec, CpuSpec, Gather, provider="copies")
    pairs.register(CpuSpec, GpuSpec, Scatter, provider="copies")
    register_store_handlers(pairs, FastSpec, "disks")
    if slow:
        register_store_handlers(pairs, SlowSpec, "disks")
    if direct:
        pairs.register(FastSpec, GpuSpec, DirectLoad, provider="rdma")
    return pairs


class Costs:
    """Costs that a test sets, by the hop's label."""

    def __init__(self, **speeds: float) -> None:
        self.speeds = {label.replace("_", "->"): speed for label, speed in speeds.items()}
        self.latencies: dict[str, float] = {}
        self.unhealthy: dict[str, str] = {}
        self.asked = 0

    def __call__(self, hop: Hop) -> HopCost:
        self.asked += 1
        trouble = self.unhealthy.get(hop.label)
        return HopCost(
            self.speeds.get(hop.label, 1e9),
            self.latencies.get(hop.label, 0.0),
            trouble is None,
            trouble or "measured",
        )


def router(costs: Costs, pairs: TransferRegistry | None = None) -> Router:
    tiers = {"fast": FastSpec, "slow": SlowSpec}
    return Router(pairs or registry(), tiers, costs, BLOCK)


@pytest.mark.parametrize(
    ("speeds", "label"),
    [
        ({"fast_gpu": 5e9, "fast_cpu": 3e9, "cpu_gpu": 20e9}, "fast->gpu"),
        ({"fast_gpu": 2e9, "fast_cpu": 3e9, "cpu_gpu": 20e9}, "fast->cpu->gpu"),
        ({"fast_gpu": 3e9, "fast_cpu": 3e9, "cpu_gpu": 20e9}, "fast->gpu"),
    ],
)
def test_the_cheapest_chain_is_chosen(speeds: dict[str, float], label: str) -> None:
    chain = router(Costs(**speeds)).chain(FAST, GPU_ENDPOINT)
    assert chain.label == label
    assert [hop.provider for hop in chain.hops] == (
        ["rdma"] if label == "fast->gpu" else ["disks", "copies"]
    )


def test_hops_of_a_chain_overlap_so_the_slowest_counts_and_every_latency() -> None:
    costs = Costs(fast_cpu=1e9, cpu_gpu=4e9)
    costs.latencies = {"fast->cpu": 1e-4, "cpu->gpu": 2e-5}
    chain = router(costs, registry(direct=False)).chain(FAST, GPU_ENDPOINT)
    assert chain.seconds_per_block == pytest.approx(BLOCK / 1e9 + 1.2e-4)
    assert "fast->cpu by disks: 1.00 GB/s measured" in chain.reason


def test_blocks_that_move_together_share_the_latency() -> None:
    costs = Costs(fast_gpu=1e9, fast_cpu=2e9)
    costs.latencies = {"fast->cpu": 1e-3, "cpu->gpu": 0.0}
    alone = Router(registry(), {"fast": FastSpec}, costs, BLOCK)
    together = Router(registry(), {"fast": FastSpec}, costs, BLOCK, 4)
    assert alone.chain(FAST, GPU_ENDPOINT).label == "fast->gpu"
    costs.speeds["cpu->gpu"] = 4e9
    chain = together.chain(FAST, GPU_ENDPOINT)
    assert chain.label == "fast->cpu->gpu"
    assert chain.seconds_per_block == pytest.approx(BLOCK / 2e9 + 1e-3 / 4)


def test_latency_decides_where_speeds_are_equal() -> None:
    costs = Costs()
    costs.latencies = {"fast->gpu": 1e-3}
    assert router(costs).chain(FAST, GPU_ENDPOINT).label == "fast->cpu->gpu"


def test_an_unhealthy_chain_gives_way_and_comes_back() -> None:
    costs = Costs(fast_gpu=5e9)
    routes = router(costs)
    assert routes.chain(FAST, GPU_ENDPOINT).label == "fast->gpu"
    costs.unhealthy["fast->gpu"] = "unhealthy: no driver"
    assert routes.chain(FAST, GPU_ENDPOINT).label == "fast->gpu"  # nobody has said so yet
    routes.invalidate()
    assert routes.chain(FAST, GPU_ENDPOINT).label == "fast->cpu->gpu"
    report = routes.report(FAST, GPU_ENDPOINT)
    assert [(chain.label, why) for chain, why in report.rejected] == [
        ("fast->gpu", "fast->gpu: unhealthy: no driver")
    ]
    costs.unhealthy.clear()
    routes.invalidate()
    assert routes.chain(FAST, GPU_ENDPOINT).label == "fast->gpu"
    assert routes.version == 2


def test_an_answer_is_kept_until_something_changes() -> None:
    costs = Costs()
    routes = router(costs)
    first = routes.chain(FAST, GPU_ENDPOINT)
    asked = costs.asked
    assert routes.chain(FAST, GPU_ENDPOINT) is first
    assert costs.asked == asked
    routes.invalidate()
    assert routes.chain(FAST, GPU_ENDPOINT) == first
    assert costs.asked == 2 * asked


def test_a_chain_that_was_tried_is_left_out() -> None:
    costs = Costs(fast_gpu=5e9)
    routes = router(costs)
    direct = routes.find(FAST, GPU_ENDPOINT)
    assert direct is not None
    assert direct.label == "fast->gpu"
    other = routes.find(FAST, GPU_ENDPOINT, frozenset({direct.hops}))
    assert other is not None
    assert other.label == "fast->cpu->gpu"
    both = frozenset({direct.hops, other.hops})
    assert routes.find(FAST, GPU_ENDPOINT, both) is None
    asked = costs.asked
    assert routes.find(FAST, GPU_ENDPOINT, both) is None
    assert costs.asked == asked  # that there is none is known, too
    costs.unhealthy["cpu->gpu"] = "unhealthy: no device"
    routes.invalidate()
    assert routes.find(FAST, GPU_ENDPOINT, frozenset({direct.hops})) is None
    assert routes.find(FAST, GPU_ENDPOINT) == direct


def test_where_nothing_works_the_error_names_why() -> None:
    costs = Costs()
    costs.unhealthy = {"fast->gpu": "unhealthy: no driver", "fast->cpu": "opening"}
    with pytest.raises(TierError) as caught:
        router(costs).chain(FAST, GPU_ENDPOINT)
    assert caught.value.tier == "fast"
    text = str(caught.value)
    assert "no chain from fast to gpu works now" in text
    assert "fast->gpu: not chosen, fast->gpu: unhealthy: no driver" in text
    assert "fast->cpu->gpu: not chosen, fast->cpu: opening" in text


def test_where_nothing_is_registered_the_error_says_what_to_do() -> None:
    with pytest.raises(TierError, match="no backend registered a handler") as caught:
        router(Costs(), registry(slow=False)).chain(GPU_ENDPOINT, SLOW)
    assert caught.value.tier == "slow"
    assert "tiered-kv backends" in str(caught.value)


def test_host_memory_is_one_hop_from_everything() -> None:
    routes = router(Costs())
    assert routes.chain(CPU_ENDPOINT, GPU_ENDPOINT).label == "cpu->gpu"
    assert routes.chain(GPU_ENDPOINT, CPU_ENDPOINT).label == "gpu->cpu"
    assert routes.chain(CPU_ENDPOINT, SLOW).label == "cpu->slow"
    assert routes.chain(GPU_ENDPOINT, SLOW).label == "gpu->cpu->slow"


def test_explain_covers_every_tier_both_ways() -> None:
    reports = router(Costs(fast_gpu=5e9)).explain()
    assert [(str(r.src), str(r.dst)) for r in reports] == [
        ("cpu", "gpu"),
        ("fast", "gpu"),
        ("slow", "gpu"),
        ("gpu", "cpu"),
        ("gpu", "fast"),
        ("gpu", "slow"),
    ]
    assert all(report.chosen is not None for report in reports)
    direct = reports[1]
    assert direct.text.splitlines()[0].startswith("fast->gpu: chosen, about 209.7 us per block")
    assert "fast->cpu->gpu: not chosen, slower by" in direct.text


def test_explain_works_without_an_engine() -> None:
    reports = Router(registry(), {"fast": FastSpec}, assumed_cost, BLOCK).explain()
    assert {r.chosen.label for r in reports if r.chosen} == {
        "cpu->gpu",
        "fast->gpu",
        "gpu->cpu",
        "gpu->cpu->fast",
    }
    assert "assumed" in reports[0].text


def test_the_tier_of_a_hop_is_what_it_touches() -> None:
    tiers = {hop.label: hop.tier for hop in router(Costs()).hops()}
    assert tiers == {
        "gpu->cpu": "cpu",
        "cpu->gpu": "cpu",
        "cpu->fast": "fast",
        "fast->cpu": "fast",
        "fast->gpu": "fast",
        "cpu->slow": "slow",
        "slow->cpu": "slow",
    }


@pytest.mark.parametrize("name", ["gpu", "cpu"])
def test_a_store_cannot_be_named_like_a_memory(name: str) -> None:
    with pytest.raises(ValueError, match=f"cannot be named '{name}'"):
        Router(registry(), {name: FastSpec}, assumed_cost, BLOCK)


def test_the_endpoint_of_a_spec() -> None:
    assert endpoint_of(fast(1)) == FAST
    assert endpoint_of(CpuSpec((SlotRef(0, 1),))) == CPU_ENDPOINT
    assert endpoint_of(GpuSpec(())) == GPU_ENDPOINT
