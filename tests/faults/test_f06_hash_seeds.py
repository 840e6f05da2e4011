"""Block hashes that differ between processes: refused loudly where blocks outlive the process, else
processes find each other's blocks or have namespaces of their own. With vLLM's own functions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import combinations
from typing import Any

import pytest
from vllm.utils.hashing import sha256_cbor, xxhash_cbor
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

from tests.faults.block_hashes import ALGORITHMS, BLOCK_TOKENS, TOKENS, settings
from tiered_kv.errors import UnsupportedError
from tiered_kv.vllm.compat import check_flags, none_hash_seed

SEEDS = (None, "7")


def start(seed: str | None) -> subprocess.Popen[str]:
    """A process of its own, which hashes the prompt."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "tests.faults.block_hashes"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def processes() -> list[dict[str, Any]]:
    """What two processes of each seed say, by hash function."""
    said: list[dict[str, Any]] = []
    for seed in SEEDS:
        children = [start(seed), start(seed)]
        for child in children:
            out, complaints = child.communicate(timeout=100)
            assert child.returncode == 0, complaints
            said.append(json.loads(out.strip().rpartition("\n")[2]))
    return said


@pytest.mark.timeout(300)  # four processes that import vLLM
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_f06_processes_find_each_others_blocks_or_are_refused(
    algorithm: str, processes: list[dict[str, Any]]
) -> None:
    told = [process[algorithm] for process in processes]
    assert all(len(one["names"]) == TOKENS // BLOCK_TOKENS for one in told)
    accepted = [one for one in told if not one["refusal"]]
    pairs = list(combinations(accepted, 2))
    shared = [(a, b) for a, b in pairs if a["seed"] == b["seed"]]
    others = [(a, b) for a, b in pairs if a["seed"] != b["seed"]]
    distinct = len({tuple(one["names"]) for one in told})
    print(
        f"{algorithm}: {len(accepted)} of {len(told)} processes accepted, {distinct} sets of "
        f"names, {len(shared)} pairs in one namespace, {len(others)} in two"
    )
    # One namespace: each finds the other's blocks. Two: neither could be served a wrong one.
    assert all(a["names"] == b["names"] for a, b in shared)
    if algorithm == "sha256_cbor":
        assert len(accepted) == len(told)
        assert shared
        assert all(a["names"] != b["names"] for a, b in others)
    elif algorithm == "xxhash_cbor":
        assert len(accepted) == 2
        assert shared
    else:
        assert not accepted


def test_f06_an_empty_hash_seed_is_a_seed_as_it_is_for_vllm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "")
    assert none_hash_seed() == "empty"
    assert resolve_none_hash_seed(sha256_cbor) == ""


@pytest.mark.parametrize("seed", [None, "0", "7"])
def test_f06_vllm_seeds_its_hashes_as_the_identity_says(
    seed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `check_flags` lets pass is the same in every process, and its seed is known."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    seeds = {resolve_none_hash_seed(sha256_cbor) for _ in range(3)}
    assert seeds == {none_hash_seed()}
    drawn = {resolve_none_hash_seed(xxhash_cbor) for _ in range(3)}
    assert len(drawn) == (3 if seed is None else 1)


@pytest.mark.parametrize("seed", [None, "", "random", "7"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_f06_block_hashes_that_differ_between_processes_fit_no_tier_that_lasts(
    algorithm: str, seed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    given = settings(algorithm)
    check_flags(given, persistent=False)
    if algorithm == "sha256_cbor" or (algorithm, seed) == ("xxhash_cbor", "7"):
        check_flags(given, persistent=True)
        return
    with pytest.raises(UnsupportedError, match="--prefix-caching-hash-algo sha256_cbor") as caught:
        check_flags(given, persistent=True)
    assert ("PYTHONHASHSEED" in str(caught.value)) == (algorithm == "xxhash_cbor")
