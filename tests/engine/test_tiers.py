"""Blocks leave a real vLLM for every tier, and come back: also after a restart and a SIGKILL."""

from __future__ import annotations

import itertools
import re
import shutil
from pathlib import Path

from tests.engine.actions import EngineRun
from tests.engine.lives import LONG_AND_SHORT, Lives, ServerRun
from tests.engine.tiers import assert_equal, cached, loaded_bytes, same_answers


def test_blocks_come_back_from_every_tier(separate: EngineRun) -> None:
    cold = separate.answers["cold"]
    moved: dict[str, float] = {}
    readings = ("before", "host", "ssd", "pins")
    for before, tier in itertools.pairwise(readings):
        assert cached(separate.answers[tier]) == LONG_AND_SHORT
        assert_equal(separate.answers[tier], cold)
        from_tier = "cpu" if tier == "host" else tier
        moved[tier] = loaded_bytes(separate.at[before], separate.at[tier], from_tier)
    print("bytes loaded:", moved)
    assert len(set(moved.values())) == 1
    assert moved["host"] > 1_000_000
    # A load from the host tier leaves the others alone.
    for tier in ("ssd", "pins", "bad"):
        assert loaded_bytes(separate.at["before"], separate.at["host"], tier) == 0


def test_blocks_come_back_after_a_restart(separate: EngineRun, last: EngineRun) -> None:
    cold = separate.answers["cold"]
    stored = loaded_bytes(separate.at["before"], separate.at["host"], "cpu")
    for before, after, tier in (("before pins", "pins", "pins"), ("pins", "stored ssd", "ssd")):
        assert cached(last.answers[tier]) == LONG_AND_SHORT
        assert_equal(last.answers[tier], cold)
        assert loaded_bytes(last.at[before], last.at[after], tier) == stored > 1_000_000


def test_answers_are_those_of_vllm_without_tiers(
    in_process: EngineRun, served: ServerRun, separate: EngineRun, last: EngineRun
) -> None:
    """Whatever was computed or loaded, by whichever engine."""
    plain = last.answers["plain"]
    stored, killed, not_written, kept, idle = (plain[i : i + 2] for i in range(0, 10, 2))
    assert_equal(separate.answers["cold"], stored)
    assert_equal(last.answers["separate ssd"], killed)
    assert_equal(separate.answers["bad"], not_written)
    assert same_answers(served.answers["stored"], kept)
    assert_equal(separate.answers["served"], kept)
    assert same_answers(served.answers["ssd"], idle)
    assert [o.token_ids[0] for o in in_process.answers["last"]] == [o.token_ids[0] for o in idle]
    assert all(len(set(output.token_ids)) > 8 for output in plain), "greedy answers vary"


def test_blocks_stored_before_an_idle_time_survive_sigkill_of_one_process(
    in_process: EngineRun, served: ServerRun
) -> None:
    assert in_process.killed
    print("cached tokens after SIGKILL:", cached(served.answers["ssd"]))
    for tier in ("ssd", "pins"):
        assert cached(served.answers[tier]) == LONG_AND_SHORT
    assert same_answers(served.answers["ssd"], served.answers["pins"])
    first = [output.token_ids[0] for output in in_process.answers["last"]]
    assert [output.token_ids[0] for output in served.answers["ssd"]] == first


def test_blocks_stored_before_an_idle_time_survive_sigkill_of_several_processes(
    separate: EngineRun, last: EngineRun
) -> None:
    assert separate.killed
    print("cached tokens after SIGKILL:", cached(last.answers["separate ssd"]))
    for tier in ("ssd", "pins"):
        assert cached(last.answers[f"separate {tier}"]) == LONG_AND_SHORT
    assert_equal(last.answers["separate ssd"], last.answers["separate pins"])
    first = [output.token_ids[0] for output in separate.answers["last"]]
    assert [output.token_ids[0] for output in last.answers["separate ssd"]] == first
    assert loaded_bytes(last.at["start"], last.at["ssd"], "ssd") > 1_000_000


def test_the_engines_prefill_rate_is_measured(in_process: EngineRun, separate: EngineRun) -> None:
    """In one process, and in several, where steps overlap."""
    for run in (in_process, separate):
        rate = run.metrics.total("vllm:tiered_kv_prefill_tokens_per_second", gate="off")
        # A request's first token comes after its prompt's step, and whatever else took time.
        seen = [700 / output.first_token_latency for output in run.answers["cold"]]
        print(f"{rate:.0f} tokens/s; cold prompts had at least {min(seen):.0f}")
        assert rate > min(seen) / 10


def test_several_kv_groups_and_engine_blocks_per_block(last: EngineRun) -> None:
    for tier in ("host", "ssd"):
        # Whole blocks of 4 engine blocks of 32 tokens.
        assert cached(last.answers[f"groups: {tier}"]) == [896, 640]
        assert same_answers(last.answers[f"groups: {tier}"], last.answers["groups: plain"])
    assert same_answers(last.answers["groups: cold"], last.answers["groups: plain"])


def test_two_ranks_share_one_store(ranks: EngineRun, last: EngineRun) -> None:
    assert same_answers(ranks.answers["cold"], last.answers["groups: plain"])
    for name in ("host", "ssd", "restarted"):
        print("cached tokens:", name, cached(ranks.answers[name]))
        assert cached(ranks.answers[name]) == [896, 640]
        assert same_answers(ranks.answers[name], ranks.answers["cold"])


def test_a_server_serves_from_the_tiers_and_shows_what_it_does(served: ServerRun) -> None:
    def grown(name: str, before: str, after: str, **labels: str) -> float:
        return served.at[after].total(name, **labels) - served.at[before].total(name, **labels)

    hop = grown("vllm:tiered_kv_hop_bytes_total", "start", "ssd", tier="ssd", dst="cpu")
    print("bytes loaded:", hop)
    assert hop > 1_000_000
    mapped, resident = (
        served.at["ssd"].total("vllm:tiered_kv_host_pool_bytes", kind=kind)
        for kind in ("mapped", "resident")
    )
    print(f"host pool: {mapped:,.0f} bytes mapped, {resident:,.0f} resident")
    assert mapped == resident > 1_000_000
    hits = grown("vllm:tiered_kv_tier_hits_total", "start", "ssd", tier="ssd")
    assert hits == sum(LONG_AND_SHORT) / 32
    assert grown("vllm:tiered_kv_job_bytes_total", "start", "ssd", kind="load") == hop
    stored = grown("vllm:tiered_kv_job_bytes_total", "before store", "stored", kind="store")
    assert stored > 1_000_000
    tokens = sum(len(output.token_ids) for output in served.answers["stored"])
    assert grown("vllm:generation_tokens_total", "before store", "stored") == tokens == 48


def test_a_server_that_is_asked_to_end_leaves_its_blocks_and_no_process(
    served: ServerRun, separate: EngineRun
) -> None:
    assert served.left == ()
    assert cached(separate.answers["served"]) == LONG_AND_SHORT
    assert same_answers(separate.answers["served"], served.answers["stored"])


def test_every_job_is_submitted_by_the_engine_neutral_connector(separate: EngineRun) -> None:
    submitted = re.findall(r"(\S+): (load|store) job \d+ submitted", separate.log)
    print(f"{len(submitted)} jobs submitted")
    assert {kind for _, kind in submitted} == {"load", "store"}
    assert {file.partition("tiered_kv/")[2] for file, _ in submitted} == {"connector/submission.py"}


def test_a_load_that_would_end_requests_is_refused_at_start(last: EngineRun) -> None:
    assert '"kv_load_failure_policy": "recompute"' in last.log


def test_a_capacity_above_the_disk_is_refused_at_start(lives: Lives, last: EngineRun) -> None:
    told = re.search(
        r"tier 'ssd' may grow to (\d+) bytes \(1000TiB\), but (\S+) has (\d+) bytes", last.log
    )
    assert told, last.log
    print("refused:", told[0])
    wanted, place, free = int(told[1]), Path(told[2]), int(told[3])
    assert wanted == 1000 * 2**40
    assert place == lives.store / "ssd"
    assert 0 < free < shutil.disk_usage(lives.store).total
