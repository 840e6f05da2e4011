"""What a plan says: figures that can be worked out by hand, its recommendation, its page."""

from __future__ import annotations

import errno
import json
import multiprocessing
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from math import cos, radians, sin
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import typer
import yaml

from tests.command_line import Cli
from tests.unit.simulation_rig import TWO_GROUPS, Stage, far, store_prompt, tokens
from tiered_kv.cli.output_files import OutputFiles
from tiered_kv.config import GIB, MIB, load
from tiered_kv.connector.live import Answering
from tiered_kv.errors import TraceError
from tiered_kv.placement import Replay, ReplayTier, TracedRequest
from tiered_kv.planning import (
    Drive,
    KVShape,
    Question,
    Speeds,
    Trace,
    TraceKind,
    automatic_capacities,
    find_config,
    kv_shape,
    live_speeds,
    make_plan,
    page,
    plan_as_dict,
    read_speeds,
)
from tiered_kv.planning.cuts import PlannedGate
from tiered_kv.planning.figures import Figures, FirstToken, figures_of
from tiered_kv.planning.grid import Cell, Measured, Outcome, replay_grid
from tiered_kv.planning.plots import Line, chart
from tiered_kv.planning.recommend import Recommendation, deployment_yaml, lifetime, recommend
from tiered_kv.plugins import Plugins
from tiered_kv.stats import LoadRate
from tiered_kv.testing.simulation import Simulation

BLOCK = 16
BLOCK_BYTES = 16 * 1024


def chats(count: int = 400, users: int = 40, turns: int = 6) -> Trace:
    """Users come in turn and say more each time; then each begins anew."""
    requests: list[TracedRequest] = []
    for number in range(count):
        user, turn = number % users, number // users % turns
        life = number // (users * turns)
        blocks = tuple(user * 10_000 + life * 1000 + place for place in range(2 * (turn + 1)))
        requests.append(TracedRequest(float(number), blocks, len(blocks) * BLOCK, 1))
    return Trace("chats", TraceKind.MOONCAKE, BLOCK, tuple(requests))


def question(trace: Trace | None = None, **changes: Any) -> Question:
    asked = Question(
        chats() if trace is None else trace,
        KVShape("a test", 1024.0, 2),
        BLOCK,
        Speeds(prefill=100.0),
        Drive(),
        tuple(BLOCK_BYTES * blocks for blocks in (64, 256, 1024)),
        (32 * BLOCK_BYTES,),
        0,
        ("lru",),
        "lru",
        0.5,
    )
    return replace(asked, **changes)


# Figures


SLOW = PlannedGate(Speeds(10.0, LoadRate(1000.0, 0.5), LoadRate(100.0, 1.0)), 10, 10.0, 30.0)
"""A block of 10 tokens takes a second to compute, 0.1 s from the host after 0.5, 1 s from the SSD
after 1."""

CUTS: dict[str, tuple[list[str], int, int, float]] = {
    "nothing is found": ([], 100, 0, 10.0),
    "the engine holds some": (["engine"] * 2, 100, 0, 8.0),
    "all of one tier": (["host"] * 8, 100, 80, 0.5 + 0.8 + 2),
    "one that saves nothing": (["ssd"], 100, 0, 10.0),
    # All: max(0.9, 5) + 2 = 7 s. Nothing: 10 s. The host's alone: 0.9 + 6 s.
    "a cut is better than both": (["host"] * 4 + ["ssd"] * 4, 100, 40, 6.9),
    "behind what the engine holds": (["engine"] * 2 + ["host"] * 2 + ["ssd"] * 4, 100, 20, 6.7),
    # 1 + 1 s beside 1.1 s, then 1 s: the host's are worth a load from the SSD.
    "what lies behind a slow block": (["ssd"] + ["host"] * 6, 80, 70, 3.0),
    "a last block that is partly filled": (["host"] * 2, 15, 15, 0.5 + 0.15),
    "one that is not worth it": (["ssd"], 2, 0, 0.2),
    "where only the last is not": (["host", "ssd"], 12, 10, 0.6 + 0.2),
    "an end that the engine holds": (["engine"] * 2, 15, 0, 0.0),
}


@pytest.mark.parametrize("name", CUTS)
def test_a_request_is_cut_where_serving_would(name: str) -> None:
    sources, tokens, loaded, seconds = CUTS[name]
    cut = SLOW.cut(sources, tokens)
    print(cut)
    assert (cut.loaded, cut.late) == (loaded, False)
    assert cut.seconds == pytest.approx(seconds)
    held = min(tokens, 10 * sources.count("engine"))
    assert cut.loaded + cut.computed + held == tokens


def test_a_load_that_would_take_too_long_is_cut() -> None:
    patient = replace(SLOW, speeds=replace(SLOW.speeds, prefill=1.0))
    hasty = replace(patient, longest=3.0)
    whole, part = (gate.cut(["ssd"] * 8, 75) for gate in (patient, hasty))
    assert (whole.loaded, whole.seconds, whole.late) == (75, 8.5, False)
    assert (part.loaded, part.seconds, part.late) == (20, 3.0 + 55, True)
    assert replace(hasty, longest=8.2).cut(["ssd"] * 8, 75).late
    assert PlannedGate(Speeds(), 16, 1.0).longest == 2.0


def test_a_plan_predicts_what_the_gate_loads() -> None:
    """The host keeps the first four of the eight blocks that are wanted again, the SSD all."""
    requests = (
        TracedRequest(0.0, tuple(range(8)), 80, 1),
        TracedRequest(10.0, (*range(8), 10, 11), 100, 1),
    )
    asked = question(
        Trace("two", TraceKind.MOONCAKE, 10, requests),
        shape=KVShape("a test", 10.0, 1),
        speeds=SLOW.speeds,
        ssd_bytes=(2000,),
        host_bytes=(400,),
    )
    figures = make_plan(asked, processes=1).figures[1]
    print(figures)
    assert (figures.host_hits, figures.ssd_hits) == (0.4, 0.4)
    assert figures.loaded == 0.4
    assert figures.first_token is not None
    assert figures.first_token.mean == pytest.approx(6.9)
    assert figures.saved_gpu_seconds == pytest.approx(40 / 10 / 10)
    assert figures.gpu_seconds == pytest.approx(60 / 10 / 10)


def test_loads_that_are_cut_short_are_told() -> None:
    asked = question(speeds=Speeds(10.0, ssd=LoadRate(1024.0 * 16, 0.0)))
    made = make_plan(asked, processes=1)
    late = made.recommendation.figures.late
    print(late, "requests", made.notes)
    assert late
    told = f"{late} of the 200 requests would load more if a load could take longer than 2 s"
    assert any(told in note for note in made.notes)
    assert plan_as_dict(made, "")["cells"][-1]["requests_cut_by_deadline"] == late


def test_figures_are_sums_over_the_requests() -> None:
    measured = Measured(0, np.array([100, 100, 100, 100]), 50.0)
    outcome = Outcome(
        Cell("lru", "lru", 10_000, 10_000, 1),
        np.array([0, 20, 0, 0]),  # engine
        np.array([0, 0, 40, 0]),  # host
        np.array([0, 0, 50, 2]),  # SSD
        np.array([0, 0, 90, 0]),  # loaded
        np.array([100, 80, 10, 100]),
        np.array([10.0, 8.0, 7.0, 10.0]),
        late=3,
        ssd_stored=30,
        ssd_evicted=0,
        ssd_resident=30,
    )
    made = figures_of(outcome, measured, Speeds(10.0), block_bytes=100.0, whole_requests=True)
    assert made.first_token == FirstToken.of(outcome.first_token)
    assert made.late == 3
    assert made.loaded == pytest.approx(90 / 400)
    assert (made.engine_hits, made.host_hits, made.ssd_hits) == (20 / 400, 40 / 400, 52 / 400)
    assert made.saved_gpu_seconds == pytest.approx(90 / 10 / 50)
    assert made.gpu_seconds == pytest.approx((400 - 20 - 90) / 10 / 50)
    assert made.ssd_bytes_per_day == pytest.approx(30 * 100 / 50 * 86400)
    assert made.ssd_drive_writes == pytest.approx(30 * 100 / 50 * 86400 / 10_000)
    years = made.years(Drive(rated_dwpd=3.0))
    assert years == pytest.approx(5 * 3 / (30 * 100 / 50 * 86400 / 10_000))


def test_the_grid_is_the_replay_of_each_cell() -> None:
    """In processes, and in this one; and as a replay by hand."""
    asked = question(engine_bytes=8 * BLOCK_BYTES)
    alone, together = make_plan(asked, processes=1), make_plan(asked, processes=2)
    assert alone.figures == together.figures
    assert [one.cell for one in alone.figures] == asked.cells()
    cell = asked.cells()[2]
    replay = Replay(
        [
            ReplayTier("engine", 8, "lru", takes_loaded=True),
            ReplayTier("host", 32, "lru"),
            ReplayTier("ssd", cell.ssd_bytes // BLOCK_BYTES, "lru", store=True),
        ],
        block_tokens=BLOCK,
    )
    found = [replay.request(request) for request in asked.trace.requests][200:]
    total = sum(request.tokens for request in asked.trace.requests[200:])
    for name in ("engine", "host", "ssd"):
        share = getattr(alone.figures[2], f"{name}_hits")
        assert share == pytest.approx(sum(one[name] for one in found) / total)
    rates = [one.hits for one in alone.figures]
    print("hit rates", rates)
    assert rates == sorted(rates)
    assert rates[-1] > 0.5 > rates[0]


def test_a_tier_has_no_more_room_than_the_trace_has_blocks() -> None:
    """Else its memory would follow what is asked for: here petabytes, in blocks of 16 KiB."""
    blocks = chats().distinct_blocks
    exact, large = BLOCK_BYTES * blocks, 2**60
    replayed: list[Cell] = []
    asked = question(ssd_bytes=(exact, large), host_bytes=(exact, large))
    outcomes = replay_grid(
        asked.trace, asked.cells(), gate=asked.gate, first=0, processes=1, done=replayed.append
    )
    assert [one.cell for one in outcomes] == asked.cells()
    bare, full = asked.cells()[::3], [one for one in asked.cells() if one.ssd_bytes]
    assert replayed == [*bare, *full], "those that come to the same are told at once"
    first, *others = outcomes[1:3] + outcomes[4:]
    assert first.ssd_resident == blocks
    for one in others:
        assert (one.host == first.host).all()
        assert one.ssd_resident == blocks


def test_an_interrupted_replay_leaves_no_process() -> None:
    def stop(cell: Cell) -> None:
        raise KeyboardInterrupt

    asked = question()
    with pytest.raises(KeyboardInterrupt):
        replay_grid(chats(), asked.cells(), gate=asked.gate, first=0, processes=2, done=stop)
    assert not multiprocessing.active_children()


def test_what_warms_up_is_not_counted() -> None:
    cold, warm = (make_plan(question(warm_up=share), processes=1) for share in (0.0, 0.5))
    assert cold.measured_requests == 400
    assert warm.measured_requests == 200
    assert warm.measured_seconds == 200.0
    assert cold.figures[-1].hits != warm.figures[-1].hits


def test_a_trace_without_time_says_nothing_per_day() -> None:
    trace = chats()
    still = replace(trace, requests=tuple(replace(one, time=0.0) for one in trace.requests))
    made = make_plan(question(still), processes=1)
    assert made.figures[-1].ssd_bytes_per_day is None
    assert made.figures[-1].saved_gpu_seconds is None
    assert any("takes no time" in note for note in made.notes)
    assert "–" in page(made, "tiers: []\n")


def test_capacities_that_are_tried_hold_everything_in_the_end() -> None:
    sizes = automatic_capacities(5 * GIB)
    assert sizes == [8 * GIB >> step for step in reversed(range(8))]
    assert automatic_capacities(1)[0] >= MIB


# The recommendation


def cell_figures(
    policy: str, ssd: int, loaded: float, wear: float | None = 0.5, host: int = 1
) -> Figures:
    return Figures(
        Cell(policy, policy, ssd * GIB, host * GIB),
        *(0.0, 0.0, loaded, loaded),
        FirstToken(1.0, 1.0, 2.0),
        *(2.0, 1.0),
        None if not ssd or wear is None else wear * ssd * GIB,
        wear if ssd else None,
        ssd_full=False,
    )


GRID = [
    cell_figures("lru", 0, 0.1),
    cell_figures("lru", 100, 0.3),
    cell_figures("lru", 200, 0.45),
    cell_figures("lru", 400, 0.5),
    cell_figures("aged", 0, 0.1),
    cell_figures("aged", 100, 0.46),
    cell_figures("aged", 200, 0.48),
    cell_figures("aged", 400, 0.5),
]


def test_the_smallest_capacity_that_brings_most_is_recommended() -> None:
    advice = recommend(GRID, Drive(), "lru")
    assert (advice.figures.cell.policy, advice.figures.cell.ssd_bytes) == ("aged", 100 * GIB)
    assert advice.write_budget == 0
    print(advice.headline, *advice.reasons, sep="\n")
    assert "Take 100GiB of SSD with the policy aged: 46.0%" in advice.headline
    assert any("lasts 10.0 years" in reason for reason in advice.reasons)


def test_of_policies_that_bring_the_same_the_default_is_recommended() -> None:
    same = [replace(one, loaded=0.5) if one.cell.ssd_bytes else one for one in GRID]
    assert recommend(same, Drive(), "lru").figures.cell.policy == "lru"
    assert recommend(same, Drive(), "aged").figures.cell.policy == "aged"


def test_a_drive_that_would_wear_out_gets_a_larger_one_or_a_budget() -> None:
    worn = [
        replace(one, ssd_drive_writes=200 * GIB / one.cell.ssd_bytes) if one.cell.ssd_bytes else one
        for one in GRID
    ]
    advice = recommend(worn, Drive(rated_dwpd=1.0), "lru")
    assert advice.figures.cell.ssd_bytes == 200 * GIB
    assert advice.write_budget == 0
    advice = recommend(worn, Drive(rated_dwpd=0.1), "lru")
    print(*advice.reasons, sep="\n")
    assert advice.figures.cell.ssd_bytes == 100 * GIB
    assert advice.write_budget == pytest.approx(10 * GIB, rel=0.001)
    assert any("write budget" in reason for reason in advice.reasons)


def test_no_ssd_is_recommended_where_it_adds_little() -> None:
    advice = recommend([cell_figures("lru", 0, 0.48), *GRID[1:]], Drive(), "lru")
    assert not advice.ssd
    assert "Host memory alone is enough" in advice.headline
    nothing = [replace(one, loaded=0.001) for one in GRID]
    assert "next to nothing" in recommend(nothing, Drive(), "lru").headline


def test_host_memory_alone_is_that_of_the_cell_that_is_recommended() -> None:
    grid = [
        cell_figures("lru", 0, 0.0, host=0),
        cell_figures("lru", 100, 0.5, host=0),
        cell_figures("lru", 0, 0.3),
        cell_figures("lru", 100, 0.5),
    ]
    advice = recommend(grid, Drive(), "lru")
    assert advice.figures is grid[1]
    assert advice.headline == (
        "Take 100GiB of SSD with the policy lru: 50.0% of the prompts' tokens are loaded in place "
        "of being computed, without host memory for KV."
    )
    assert "host" not in " ".join(advice.reasons)
    advice = recommend(grid[2:], Drive(), "lru")
    assert advice.headline.endswith("where 1GiB of host memory alone bring 30.0%.")
    assert "(1.00 s without an SSD)" in advice.reasons[0]
    more = [cell_figures("lru", 0, 0.44, host=2), cell_figures("lru", 100, 0.5, host=2)]
    advice = recommend([*grid, *more], Drive(), "lru")
    assert advice.figures is grid[1]


def test_a_policy_that_is_not_in_effect_is_not_named() -> None:
    def mixed(one: Figures, host: int) -> Figures:
        cell = replace(one.cell, policy="arc", ssd_policy="prefix", host_bytes=host)
        return replace(one, cell=cell)

    without = recommend([mixed(one, 0) for one in GRID[:4]], Drive(), "arc")
    assert "with the policy prefix: " in without.headline
    behind = recommend([mixed(one, GIB) for one in GRID[:4]], Drive(), "arc")
    assert "the policy arc in host memory and prefix on the SSD: " in behind.headline


def test_what_is_enough_is_said_of_the_best_cell() -> None:
    """Nine tenths of it, so that an SSD may well add more than a tenth."""
    advice = recommend([cell_figures("lru", 0, 0.45), *GRID[1:]], Drive(), "lru")
    print(advice.headline, *advice.reasons, sep="\n")
    assert not advice.ssd
    assert advice.headline == (
        "Host memory alone is enough: 1GiB of it, with the policy lru, load 45.0% of the tokens."
    )
    assert advice.reasons[1] == (
        "That is at least 90% of what the best of all cells loads (50.0%)."
    )


def test_why_a_capacity_is_recommended() -> None:
    def why(grid: list[Figures]) -> str:
        advice = recommend(grid, Drive(), "lru")
        print(advice.headline, *advice.reasons, sep="\n")
        return advice.reasons[1]

    assert why(GRID) == (
        "The best cell of the grid loads 50.0%, with 400GiB of SSD. None with a smaller SSD loads "
        "90% of that."
    )
    # The largest, since smaller ones wear out; one of which loads more.
    worn = [
        cell_figures("lru", 0, 0.1),
        cell_figures("lru", 100, 0.5, 3.0),
        cell_figures("lru", 200, 0.48, 0.9),
    ]
    assert why(worn) == (
        "The best cell of the grid loads 50.0%, with 100GiB of SSD. Some with a smaller SSD load "
        "90% of that, too, but such a drive, rated 1 DWPD, would last less than 5 years."
    )
    assert why(GRID[:2]) == (
        "No cell of the grid loads more. None with a smaller SSD loads 90% of that."
    )
    hosts = [cell_figures("lru", 100, 0.5, host=2), cell_figures("lru", 0, 0.2, host=2)]
    assert why([*hosts, cell_figures("lru", 0, 0.1), cell_figures("lru", 100, 0.46)]) == (
        "The best cell of the grid loads 50.0%, with 100GiB of SSD and 2GiB of host memory. None "
        "with a smaller SSD loads 90% of that."
    )


def test_what_no_drive_bears_is_not_promised() -> None:
    worn = [replace(one, ssd_drive_writes=1.04) if one.cell.ssd_bytes else one for one in GRID]
    advice = recommend(worn, Drive(), "lru")
    print(advice.headline, *advice.reasons, sep="\n")
    assert (
        "46.0% of the prompts' tokens could be loaded in place of being computed if its drive "
        "bore that, where"
    ) in advice.headline
    assert "keeps to the rating (96.2% of what would be written)" in advice.reasons[2]
    worse = [replace(one, ssd_drive_writes=1e5) if one.cell.ssd_bytes else one for one in GRID]
    assert "(less than 0.1% of what" in recommend(worse, Drive(), "lru").reasons[2]
    assert advice.reasons[0].startswith("If the SSD took all that is written: the mean time")
    assert "would last 4.8 years. So the configuration has a write budget" in advice.reasons[2]
    assert "a drive rated for 1.1 DWPD" in advice.reasons[2]
    assert advice.write_budget == 100 * GIB
    unlimited = recommend(worn, Drive(), "lru", budgeted=False)
    assert unlimited.write_budget == 0
    assert "take no write budget" in unlimited.reasons[2]
    assert "the configuration has" not in " ".join(unlimited.reasons)
    tiny = [
        replace(one, cell=replace(one.cell, ssd_bytes=one.cell.ssd_bytes // 2**17)) for one in worn
    ]
    advice = recommend(tiny, Drive(rated_dwpd=0.5), "lru")
    print(advice.reasons)
    assert advice.write_budget == 400 * 1024
    assert "The configuration gives it 1GiB" in advice.reasons[-1]


def test_where_nothing_can_be_loaded_the_least_is_written_down(tmp_path: Path) -> None:
    hosts = [replace(one, loaded=0.0) for one in (*GRID[:2], cell_figures("lru", 0, 0, host=0))]
    for grid, expected in ((hosts, GIB), (hosts[2:], 0)):
        advice = recommend(grid, Drive(), "lru")
        assert advice.figures.cell.host_bytes == expected
        text = written(advice, tmp_path / "ssd")
        print(text)
        assert ("this one would bring next to nothing" in text) == (not expected)


@pytest.mark.parametrize("seed", range(200))
def test_what_is_said_is_so(seed: int) -> None:
    """Every sentence about other cells, of any grid."""
    chance = Random(seed)
    drive = Drive(chance.choice((0.3, 1.0, 3.0)), "given")
    grid = [
        cell_figures(policy, ssd, chance.choice((0.0, 0.1, chance.random())), wear, host)
        for policy in ("lru", "arc")
        for host in chance.choice(((0,), (4,), (0, 4)))
        for ssd in (0, 1, 2, 4)
        for wear in (chance.choice((None, 0.0, 0.2, 0.9999, 2.0, 120.0)),)
    ]
    grid = [
        one if one.cell.host_bytes or one.cell.ssd_bytes else replace(one, loaded=0.0)
        for one in grid
    ]
    advice = recommend(grid, drive, "lru")
    said = " ".join((advice.headline, *advice.reasons))
    print(said)
    chosen, best = advice.figures, max(one.loaded for one in grid)
    years = chosen.years(drive)
    enough = {one.cell.ssd_bytes for one in grid if one.loaded >= 0.9 * best}
    smaller = [size for size in enough if size < chosen.cell.ssd_bytes]
    assert ("No cell of the grid loads more" in said) <= (chosen.loaded == best)
    assert ("None with a smaller SSD" in said) <= (not smaller)
    assert ("Some with a smaller SSD" in said) <= bool(smaller)
    assert ("at least 90% of what" in said) <= (chosen.loaded >= 0.9 * best)
    assert ("Host memory alone is enough" in said) <= bool(chosen.cell.host_bytes)
    assert ("host memory alone bring" in said) <= bool(chosen.cell.host_bytes)
    assert ("without host memory" in said) <= (not chosen.cell.host_bytes)
    assert ("tokens are loaded in place" in said) <= (years is None or years >= 5)
    assert ("write budget" in said) == (advice.write_budget > 0)
    assert ("next to nothing" in said) == (best < 0.01)
    told = re.search(r"lasts? ([\d.]+) (years|months|days)", said)
    if told is not None:
        assert years is not None
        assert float(told[1]) <= years * {"years": 1, "months": 12, "days": 365}[told[2]] + 1e-6


def test_a_life_is_not_told_longer_than_it_is() -> None:
    told = [lifetime(years) for years in (4.99, 5.0, 0.999, 0.05, 21.0, 1e-5)]
    assert told == [
        "4.9 years",
        "5.0 years",
        "11.9 months",
        "18.2 days",
        "> 20 years",
        "less than 0.1 days",
    ]


def written(advice: Recommendation, path: Path, *settings: str) -> str:
    return deployment_yaml(
        advice,
        trace="a\ntrace: [with] {braces}\x07",
        ranks=2,
        ssd_type="nvme",
        ssd_path=path,
        ssd_settings=settings or ("path", "eviction", "write_budget"),
    )


PATHS = ("kv: #1", "100$", "$HOME/x", "${y}", "a$$b", "~", "ü \u2028", "'\"", "on", "../up")


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("whole", [True, False])
def test_the_directory_that_is_written_down_is_the_one_that_was_named(
    name: str, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = written(recommend(GRID, Drive(), "lru"), tmp_path / name if whole else Path(name))
    print(text)
    file = tmp_path / "d.yaml"
    file.write_text(text.replace("aged", "prefix"), encoding="utf-8")
    _, ssd = load(file, Plugins(), {"HOME": "/elsewhere"}).tiers
    assert ssd.directories == {"path": tmp_path / name}


def test_a_type_is_given_what_it_takes(tmp_path: Path) -> None:
    worn = [replace(one, ssd_drive_writes=4.0) if one.cell.ssd_bytes else one for one in GRID]
    text = written(recommend(worn, Drive(), "lru"), tmp_path, "eviction")
    assert list(yaml.safe_load(text)["tiers"][1]) == ["name", "type", "capacity", "eviction"]


def test_the_deployment_is_valid_and_divides_the_host_over_ranks(tmp_path: Path) -> None:
    worn = [replace(one, ssd_drive_writes=4.0) if one.cell.ssd_bytes else one for one in GRID]
    text = written(recommend(worn, Drive(), "lru"), tmp_path / "kv: #1")
    print(text)
    file = tmp_path / "d.yaml"
    file.write_text(text.replace("aged", "prefix"))
    deployment = load(file, Plugins(), {})
    host, ssd = deployment.tiers
    assert host.capacity == GIB // 2
    assert ssd.capacity == 100 * GIB
    assert ssd.directories == {"path": tmp_path / "kv: #1"}
    assert yaml.safe_load(text)["tiers"][1]["write_budget"] == "100GiB"


# Models

LLAMA = {
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "torch_dtype": "bfloat16",
}
SHAPES: dict[str, tuple[dict[str, Any], str, int, float]] = {
    "grouped heads": (LLAMA, "auto", 1, 80 * 8 * 128 * 2 * 2),
    "fp8": (LLAMA, "fp8", 1, 80 * 8 * 128 * 2),
    "more ranks than heads": (LLAMA, "auto", 16, 80 * 16 * 128 * 2 * 2),
    "a head size of its own": ({**LLAMA, "head_dim": 64}, "auto", 2, 80 * 8 * 64 * 2 * 2),
    "all heads": (
        {"n_layer": 12, "n_head": 12, "n_embd": 768, "dtype": "float16"},
        "auto",
        1,
        12 * 768 * 2 * 2,
    ),
    "one head": (
        {"n_layer": 2, "n_head": 4, "hidden_size": 64, "multi_query": True, "dtype": "float16"},
        "auto",
        1,
        2 * 16 * 2 * 2,
    ),
    "latent": (
        {
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "torch_dtype": "bfloat16",
        },
        "auto",
        8,
        61 * 576 * 2 * 8,
    ),
    "inside": ({"model_type": "vl", "text_config": LLAMA}, "auto", 1, 80 * 8 * 128 * 2 * 2),
    "shared layers": ({**LLAMA, "num_kv_shared_layers": 20}, "auto", 1, 60 * 8 * 128 * 2 * 2),
    "an 8-bit cache": (
        {**LLAMA, "quantization_config": {"kv_cache_scheme": {"num_bits": 8}}},
        "auto",
        1,
        80 * 8 * 128 * 2,
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_bytes_of_a_token(name: str, tmp_path: Path) -> None:
    values, dtype, ranks, expected = SHAPES[name]
    (tmp_path / "config.json").write_text(json.dumps(values))
    shape = kv_shape(find_config(str(tmp_path)), dtype, ranks)
    print(shape)
    assert shape.bytes_per_token == expected
    assert shape.rank_bytes_per_token == expected / ranks


REFUSED: dict[str, tuple[Any, str, int, str]] = {
    "a list": ([1], "auto", 1, "is no model's configuration, but a list"),
    "nothing": ({}, "auto", 1, "has no num_hidden_layers"),
    "a text": ({**LLAMA, "num_hidden_layers": "many"}, "auto", 1, "num_hidden_layers is 'many'"),
    "uneven": (LLAMA, "auto", 3, "8 KV heads cannot be spread over 3 ranks"),
    "layers without end": ({**LLAMA, "num_hidden_layers": 10**400}, "auto", 1, "is 100000"),
    "shared text": ({**LLAMA, "num_kv_shared_layers": "some"}, "auto", 1, "layers is 'some'"),
    "shared list": ({**LLAMA, "num_kv_shared_layers": [1]}, "auto", 1, "num_kv_shared_layers is"),
    "all shared": ({**LLAMA, "num_kv_shared_layers": 80}, "auto", 1, "is 80, but there are 80"),
    "tiny": ({**LLAMA, "hidden_size": 8}, "auto", 1, "64 heads cannot share a hidden size of 8"),
    "negative": ({**LLAMA, "v_head_dim": -1}, "auto", 1, "v_head_dim is -1"),
    "nested": ({**LLAMA, "head_dim": [[[[[[1]]]]]]}, "auto", 1, "head_dim is [[["),
    "a dtype of lists": ({**LLAMA, "torch_dtype": ["f"] * 999}, "auto", 1, "is not known"),
    "dtype": (LLAMA, "int3", 1, "--kv-dtype int3 is not known"),
    "its dtype": ({**LLAMA, "torch_dtype": "int3"}, "auto", 1, "dtype 'int3' is not known"),
    "state": (
        {**LLAMA, "layer_types": ["linear_attention", "full_attention"]},
        "auto",
        1,
        "linear_attention",
    ),
    "mamba": ({**LLAMA, "ssm_state_size": 128}, "auto", 1, "give --bytes-per-token"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_counted(name: str, tmp_path: Path) -> None:
    values, dtype, ranks, expected = REFUSED[name]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(values))
    with pytest.raises(TraceError) as raised:
        kv_shape(file, dtype, ranks)
    print(raised.value)
    assert expected in str(raised.value)


def test_a_model_that_is_nested_too_deeply(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("[" * 100_000)
    with pytest.raises(TraceError, match=r"config\.json: is not JSON"):
        kv_shape(file)


def test_a_model_is_found_in_the_hubs_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--maker--model"
    for commit in ("aa", "bb"):
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "snapshots" / commit / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("bb")
    assert find_config("maker/model").parent.name == "bb"
    with pytest.raises(TraceError, match=r"looked for .*models--maker--other.*--bytes-per-token"):
        find_config("maker/other")


# Speeds


def test_load_rates_of_explain(tmp_path: Path, cli: Cli) -> None:
    deployment = tmp_path / "d.yaml"
    deployment.write_text(
        "tiers:\n  - {name: host, type: cpu, capacity: 32MiB}\n"
        f"  - {{name: disk, type: nvme, path: {tmp_path}/ssd, capacity: 64MiB, min_free: 0%}}\n"
    )
    file = tmp_path / "explained.json"
    file.write_text(cli("explain", deployment, "--json").out)
    speeds = read_speeds(file, Speeds(host=LoadRate(1.0, 0.0), ssd=LoadRate(1.0, 0.0)))
    print(speeds)
    assert (speeds.host.bytes_per_second, speeds.ssd.bytes_per_second) == (20e9, 5e9)
    assert speeds.ssd_from == f"assumed: tier disk, {file}"
    assert speeds.assumed == Speeds().assumed
    made = make_plan(question(speeds=speeds), processes=1)
    assert "the load rate of host memory, the load rate of the SSD" in made.notes[0]


def test_load_rates_of_bench(tmp_path: Path) -> None:
    """The best verified way that loads from the disk itself."""

    def figure(kind: str, direction: str, rate: float, **more: str | None) -> dict[str, Any]:
        known = {"verify": None, "cache": None, **more}
        return {"kind": kind, "direction": direction, "median_gib_per_second": rate, **known}

    slow = [figure("chain", "load", 1.0, verify="always", cache="cold")]
    fast = [
        figure("chain", "load", 2.0, verify="always", cache="cold"),
        figure("chain", "load", 9.0, verify="never", cache="cold"),
        figure("chain", "load", 9.0, verify="always", cache="warm"),
        figure("chain", "store", 9.0),
        figure("hop", "load", 9.0),
        figure("limit", "", 9.0),
    ]
    host = [figure("hop", "load", 5.0), figure("hop", "store", 9.0)]
    tiers = [
        {"tier": "host", "type": "cpu", "sizes": [{"figures": host}]},
        {"tier": "ssd", "type": "nvme", "sizes": [{"figures": slow}, {"figures": fast}]},
        {"tier": "broken", "type": "nvme", "sizes": [], "problem": "on fire"},
    ]
    file = tmp_path / "bench.json"
    file.write_text(json.dumps({"config": "d.yaml", "tiers": tiers}))
    speeds = read_speeds(file, Speeds())
    assert speeds.host.bytes_per_second == 5 * GIB
    assert speeds.ssd.bytes_per_second == 2 * GIB
    assert speeds.ssd_from == f"measured: tier ssd, {file}"
    assert speeds.assumed == ("the prefill rate",)


def test_a_file_that_tells_of_no_rate(tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    figure = {"kind": "chain", "direction": "load", "median_gib_per_second": 10**400}
    tiers = [{"tier": "a", "sizes": [{"figures": [figure]}]}]
    for text, expected in (
        (json.dumps({"tiers": tiers}), "tells of no load rate"),
        ("{}", "tells of no load rate"),
        ("[", ":1: is not JSON"),
        ("[]", "holds a list"),
        ("[" * 100_000, ": is not JSON"),
    ):
        file.write_text(text)
        with pytest.raises(TraceError, match=expected):
            read_speeds(file, Speeds())


def test_a_running_engine_tells_its_speeds_and_its_cache() -> None:
    with Simulation(Stage().assembly, TWO_GROUPS) as engine:
        store_prompt(engine, tokens(1, 48))
        far(engine, 0.06)
        view = engine.manager.view()
        speeds = live_speeds(type(view).from_json(view.to_json()), Speeds())
    print(speeds)
    assert view.cache is not None
    rate = view.load_rates["ssd"].bytes_per_second
    assert speeds.ssd.bytes_per_second == pytest.approx(rate * 2)  # of two ranks
    assert speeds.ssd_from.startswith("measured: tier ssd, pid ")
    assert speeds.host_from == "assumed"


# The page


class _Reader(HTMLParser):
    """Checks that elements close, and collects."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: dict[str, int] = {}
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read_page(text: str) -> _Reader:
    reader = _Reader()
    reader.feed(text)
    assert reader.open == []
    return reader


def test_the_page_stands_alone_and_says_what_the_figures_say() -> None:
    trace = replace(chats(), source="<b>chats & more</b>")
    made = make_plan(question(trace, host_bytes=(0, 32 * BLOCK_BYTES)), processes=1)
    text = page(made, "tiers: # <deployment>\n")
    seen = read_page(text)
    print({tag: seen.seen[tag] for tag in ("svg", "circle", "tr", "polyline")})
    assert seen.seen.keys().isdisjoint({"script", "link", "img", "iframe", "object", "b2"})
    names = {name for name, _ in seen.attributes}
    assert names.isdisjoint({"src", "href", "onload", "onclick"})
    assert [value for _, value in seen.attributes if value and "://" in value] == [
        "http://www.w3.org/2000/svg"
    ] * seen.seen["svg"]
    assert "url(" not in text
    assert "@import" not in text
    for heading in ("Hit rate against capacity", "Time to the first token", "SSD wear"):
        assert heading in seen.text
    assert seen.text.index(made.recommendation.headline) < seen.text.index("Hit rate against")
    assert "<b>chats & more</b>" in seen.text  # as text
    assert "# <deployment>" in seen.text
    assert seen.seen["tr"] == 1 + len(made.figures)
    for note in (*made.notes, *made.recommendation.reasons):
        assert note in seen.text
    best = max(made.figures, key=lambda one: one.ssd_hits)
    assert f"{best.ssd_hits:.1%}" in seen.text


def test_a_page_of_kv_events_has_no_time_to_the_first_token() -> None:
    trace = replace(chats(), kind=TraceKind.KV_EVENTS)
    made = make_plan(question(trace), processes=1)
    assert made.figures[0].first_token is None
    seen = read_page(page(made, ""))
    assert "p99" in seen.text
    assert "99th percentile" not in seen.text
    assert plan_as_dict(made, "")["cells"][0]["ttft_seconds"] is None


def test_a_page_without_host_memory_speaks_of_none() -> None:
    made = make_plan(question(host_bytes=(0,), ssd_bytes=(64 * BLOCK_BYTES,)), processes=1)
    seen = read_page(page(made, ""))
    assert "were replayed on 1 MiB of SSD behind no host memory" in seen.text
    assert "tokens whose KV is found on the SSD." in seen.text
    assert "memory alone" not in seen.text
    assert "none of host" not in seen.text


def test_points_of_a_chart_lie_where_their_values_are() -> None:
    svg = chart("t", ["a", "b"], [Line("x", [0.0, 10.0])], axis="c", shown=str)
    points = [float(y) for y in re.findall(r'cy="([\d.]+)" r="4"', svg)][1:]
    ticks = {
        float(text): float(y) - 4
        for y, text in re.findall(r'y="([\d.]+)" text-anchor="end"[^>]*>([\d.]+)<', svg)
    }
    assert points == [ticks[0.0], ticks[10.0]]
    decades = chart("t", ["a"], [Line("x", [5.0, None])], axis="c", shown=str, decades=True)
    labels = re.findall(r'text-anchor="end"[^>]*>([\d.]+)<', decades)
    assert labels == ["1.0", "10.0"]


LABEL = re.compile(
    r'<text x="([\d.]+)" y="([\d.]+)" text-anchor="(middle|end)"'
    r'(?: transform="rotate\(-(\d+) [\d.]+ [\d.]+\)")? fill="#[35]+"(?: [^>]*)?>([^<]*)<'
)


@pytest.mark.parametrize("count", [1, 8, 9, 12, 30, 36, 37, 200])
@pytest.mark.parametrize("most", [1.0, 1e4, 1e9])
def test_labels_of_a_chart_neither_overlap_nor_are_cut_off(count: int, most: float) -> None:
    columns = [f"{number + 100} GiB" for number in range(count)]
    marked = min(count - 1, 37)
    svg = chart(
        *("t", columns, [Line("x", [most] * count)]),
        axis="capacity",
        shown=lambda value: f"{value:,.0f} s",
        marked=marked,
    )
    sized = re.search(r'viewBox="0 0 (\d+) (\d+)"', svg)
    assert sized is not None
    width, height = map(float, sized.groups())
    shown: list[float] = []
    axis = float(re.findall(r'<text x="[\d.]+" y="([\d.]+)"[^>]*>capacity<', svg)[0])
    for x, y, anchor, turn, text in LABEL.findall(svg):
        long = 6.9 * len(text)
        begin = float(x) - (long / 2 if anchor == "middle" else long * cos(radians(int(turn or 0))))
        assert begin >= 0, f"{text} is cut off"
        assert begin + long <= width or anchor == "end"
        assert float(y) + long * sin(radians(int(turn or 0))) <= (
            height if text == "capacity" else axis
        )
        if text in columns:
            apart = 18.6 if turn else long
            assert not shown or float(x) - shown[-1] >= apart, f"{text} overlaps"
            shown.append(float(x))
    assert f'font-weight="bold">{columns[marked]}<' in svg
    assert len(shown) == count or count > 36
    assert svg.count("<circle") == count + 1


# The command


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    file = tmp_path / "trace.jsonl"
    requests = [
        {
            "timestamp": request.time * 1000,
            "input_length": request.tokens,
            "output_length": 1,
            "hash_ids": request.keys,
        }
        for request in chats().requests
    ]
    file.write_text("".join(f"{json.dumps(request)}\n" for request in requests))
    return file


def test_the_command(trace_file: Path, tmp_path: Path, cli: Cli) -> None:
    html, config = tmp_path / "plan.html", tmp_path / "recommended.yaml"
    common = (
        *("plan", trace_file, "--trace-block", "16", "--bytes-per-token", "64KiB"),
        *("--host", "64MiB", "--host", "32MiB", "--capacity", "2GiB", "--capacity", "512MiB"),
        *("--policy", "lru", "--prefill-rate", "2000", "--processes", "1"),
        *("--path", tmp_path / "ssd"),
    )
    told = cli(*common, "--json", "--html", html, "--write-config", config)
    assert told.code == 0, told.err
    found = told.json
    print(json.dumps(found, indent=1)[:2000])
    assert [cell["ssd_bytes"] for cell in found["cells"]] == [0, 512 * MIB, 2 * GIB] * 2
    assert found["model"]["bytes_per_token"] == 65536
    assert found["trace"]["requests"] == 400
    assert found["recommendation"]["config"] == config.read_text()
    read_page(html.read_text())
    checked = cli("check", config, "--block-size", "64KiB", "--json")
    print(checked.out, checked.err)
    assert [tier["check"] for tier in checked.json["checks"] if tier["check"] == "self-test"]
    assert checked.code == 0
    shown = cli(*common)
    assert found["recommendation"]["headline"] in shown.out
    assert shown.out.endswith(config.read_text())
    before = config.read_text()
    again = cli(*common, "--write-config", config)
    assert again.code == 2
    assert "is there already" in again.err
    assert config.read_text() == before


SHORT = (
    *("--trace-block", "16", "--bytes-per-token", "64KiB", "--host", "64MiB"),
    *("--capacity", "512MiB", "--policy", "lru", "--processes", "1"),
)

UNWRITABLE = (
    ("--html", "{0}/nowhere/plan.html", "there is no directory {0}/nowhere; make it first"),
    ("--html", "{0}", "is a directory; name a file"),
    ("--html", "/proc/plan.html", "/proc/plan.html cannot be written"),
    ("--html", "{0}/dangling", "there is no directory {0}/gone"),
    ("--write-config", "{0}/nowhere/d.yaml", "there is no directory {0}/nowhere"),
    ("--write-config", "{0}/dangling", "is there already"),
    ("--write-config", "{0}/plan.html", "is read or written besides"),
)


@pytest.mark.parametrize(("option", "file", "expected"), UNWRITABLE)
def test_a_file_that_cannot_be_written_is_told_before_the_replay(
    option: str, file: str, expected: str, tmp_path: Path, cli: Cli
) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "gone" / "file")
    html = () if option == "--html" else ("--html", tmp_path / "plan.html")
    refused = cli("plan", "no-such-trace", *html, option, file.format(tmp_path))
    print(refused.err)
    assert refused.code == 2
    said = "".join(refused.err.replace("│", " ").split())
    assert "".join(expected.format(tmp_path).split()) in said
    assert "no-such-trace" not in refused.err
    assert [entry.name for entry in tmp_path.iterdir()] == ["dangling"]


def test_a_page_that_is_there_stays_until_the_new_one_is_made(tmp_path: Path, cli: Cli) -> None:
    html = tmp_path / "plan.html"
    html.write_text("the last one")
    assert cli("plan", "no-such-trace", *SHORT, "--html", html).code == 2
    assert html.read_text() == "the last one"


def test_a_page_does_not_take_the_place_of_the_trace(
    trace_file: Path, tmp_path: Path, cli: Cli
) -> None:
    before = trace_file.read_text()
    link = tmp_path / "link"
    link.symlink_to(trace_file)
    for html in (trace_file, link):
        refused = cli("plan", trace_file, *SHORT, "--html", html)
        assert (refused.code, "is read or written besides" in refused.err) == (2, True)
    assert trace_file.read_text() == before


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(tmp_path: Path) -> None:
    def fail(file: Path) -> None:
        file.write_text("the beginning of")
        raise OSError(errno.ENOSPC, "No space left on device")

    old, new, link = tmp_path / "old", tmp_path / "new", tmp_path / "link"
    old.write_text("as it was")
    old.chmod(0o640)
    link.symlink_to(old)
    files = OutputFiles()
    for file in (old, new, link):
        files.write(file, fail)
    files.write(old, lambda file: None, new=True)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["link", "old"]
    assert old.read_text() == "as it was"
    with pytest.raises(typer.Exit):
        files.finish()
    OutputFiles().write(link, lambda file: file.write_text("whole"))
    assert (old.read_text(), old.stat().st_mode & 0o777) == ("whole", 0o640)
    assert link.is_symlink()


def test_one_file_that_cannot_be_written_costs_no_other(
    trace_file: Path, tmp_path: Path, cli: Cli
) -> None:
    config = tmp_path / "d.yaml"
    told = cli("plan", trace_file, *SHORT, "--html", "/dev/full", "--write-config", config)
    print(told.err)
    assert told.code == 1
    assert "error: /dev/full could not be written: No space left" in told.err
    assert told.out.endswith(config.read_text())


def test_files_are_written_where_nothing_can_be_printed(trace_file: Path, tmp_path: Path) -> None:
    files = tmp_path / "plan.html", tmp_path / "d.yaml"
    options = ("--html", files[0], "--write-config", files[1])
    command = "from tiered_kv.cli import main; main()"
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [sys.executable, "-c", command, "plan", trace_file, *SHORT, *options],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    print(ran.stderr)
    assert ran.returncode == 1
    assert "Traceback" not in ran.stderr
    assert all(file.read_text() for file in files)


def test_requests_without_a_token(tmp_path: Path, cli: Cli) -> None:
    file = tmp_path / "t.jsonl"
    line = '{"timestamp": 0, "input_length": %d, "output_length": 1, "hash_ids": []}\n'
    file.write_text(line % 16 + line % 0)
    refused = cli("plan", file, *SHORT)
    print(refused.err)
    assert refused.code == 2
    assert f"{file}: none of the 1 requests that count has a token" in refused.err
    assert cli("plan", file, *SHORT, "--warm-up", "0").code == 0


WRONG = (
    (("--bytes-per-token", "1KiB", "--prefill-rate", "inf"), "is no number to count with"),
    (("--bytes-per-token", "1KiB", "--dwpd", "inf"), "is no number to count with"),
    ((), "how much KV does a token take?"),
    (("--bytes-per-token", "1KiB", "--model", "x"), "give one of"),
    (("--bytes-per-token", "1KiB", "--policy", "mru"), "there is no eviction policy 'mru'"),
    (("--bytes-per-token", "1KiB", "--capacity", "1TB", "--capacity", "5"), "has no unit"),
    (("--bytes-per-token", "1KiB", "--capacity", "0B"), "expected more than 0 bytes"),
    (("--bytes-per-token", "1KiB", "--type", "tape"), "there is none of this name"),
    (("--engine", "5fbc-nobody"), "no engine with tiers answers here"),
    (("--model", "nobody/nothing"), "is no model here"),
    (("--bytes-per-token", "1KiB", "--rates", "nowhere.json"), "cannot be read"),
)


@pytest.mark.parametrize(("options", "expected"), WRONG)
def test_wrong_use(options: tuple[str, ...], expected: str, trace_file: Path, cli: Cli) -> None:
    refused = cli("plan", trace_file, *options, "--trace-block", "16")
    print(refused.err)
    assert refused.code == 2
    assert expected in " ".join(refused.err.replace("│", " ").split())


def test_a_plan_of_a_running_engine(trace_file: Path, cli: Cli) -> None:
    with Simulation(Stage().assembly, TWO_GROUPS) as engine:
        store_prompt(engine, tokens(1, 48))
        far(engine, 0.06)
        answering = Answering("manager", engine.manager.view)
        try:
            namespace = engine.manager.view().namespace
            told = cli(
                *("plan", trace_file, "--trace-block", "16", "--engine", namespace[:12]),
                *("--capacity", "1MiB", "--host", "64KiB", "--processes", "1", "--json"),
            )
        finally:
            answering.close()
    assert told.code == 0, told.err
    print(told.json["model"], told.json["speeds"])
    assert told.json["model"]["ranks"] == 2
    assert told.json["model"]["block_tokens"] == 8
    assert told.json["speeds"]["ssd"]["from"].startswith("measured")
