"""A fault in a tier costs a recompute on a real vLLM, never an answer.

The faults come from a store plug-in that wraps the real nvme store.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.engine.actions import EngineRun, Metrics
from tests.engine.lives import BLOCKS, ServerRun
from tests.engine.tiers import assert_equal, cached, loaded_bytes, same_answers

WHOLE = [32 * BLOCKS] * 3
"""Tokens of the three prompts that are loaded where nothing fails."""


def failures(at: Mapping[str, Metrics], failure: str, reason: str) -> float:
    """Blocks that failed while these faults were injected, in an engine or in a server."""
    before, after = (
        sum(
            at[f"{failure}: {i}"].total(name, tier="bad", reason=reason)
            for name in ("vllm:tiered_kv_hop_failures", "vllm:tiered_kv_hop_failures_total")
        )
        for i in (0, 1)
    )
    print(f"{failure}: {after - before:.0f} blocks failed")
    return after - before


def assert_first_middle_and_last_failed(run: EngineRun | ServerRun, failure: str) -> None:
    assert failures(run.at, failure, failure) == 3
    cold, failed, again = (run.answers[name] for name in ("cold", failure, f"after {failure}"))
    print("cached tokens:", cached(failed), cached(again))
    assert same_answers(failed, cold)
    assert cached(failed) == [0, 32 * (BLOCKS // 2), 32 * (BLOCKS - 1)]
    # What was lost was computed, stored again and is found again.
    assert same_answers(again, cold)
    assert cached(again) == WHOLE
    assert {output.finish_reason for output in (*cold, *failed, *again)} == {"length"}


def test_first_middle_and_last_block_are_missing(in_process: EngineRun) -> None:
    assert_first_middle_and_last_failed(in_process, "missing")


def test_first_middle_and_last_block_are_corrupt(served: ServerRun) -> None:
    assert_first_middle_and_last_failed(served, "corrupt")


def assert_every_load_failed(run: EngineRun | ServerRun, failure: str, reason: str) -> None:
    assert failures(run.at, failure, reason) >= BLOCKS
    for name in (f"{failure}: first", f"{failure}: second"):
        assert same_answers(run.answers[name], run.answers["cold"])
        assert cached(run.answers[name]) == [0, 0, 0]
        assert {output.finish_reason for output in run.answers[name]} == {"length"}


@pytest.mark.parametrize("failure", ["corrupt", "tier_error"])
def test_every_load_fails(in_process: EngineRun, failure: str) -> None:
    assert_every_load_failed(in_process, failure, failure)
    # A tier that works again serves again.
    afterwards = in_process.answers[f"{failure}: afterwards"]
    assert cached(afterwards) == WHOLE
    assert_equal(afterwards, in_process.answers["cold"])


def test_every_load_of_a_server_raises(served: ServerRun) -> None:
    assert_every_load_failed(served, "raise", "tier_error")


def test_failed_stores_leave_no_trace(separate: EngineRun, last: EngineRun) -> None:
    loaded = separate.answers["bad"]
    print("cached tokens:", cached(loaded))
    assert "faulty store: tier_error at call 1 of write" in separate.log
    assert cached(loaded) == [0, 32 * BLOCKS]
    assert loaded_bytes(separate.at["before bad"], separate.at["bad"], "bad") > 0
    assert_equal(loaded, last.answers["plain"][4:6])
