"""Hit rates of eviction policies on a trace, by replaying it on the code that serves.

The trace is one JSON object a line, as the Mooncake project publishes them: `timestamp` (ms),
`input_length` and `output_length` (tokens), `hash_ids` (blocks of the prompt, in order). Counted is
the share of the prompts' tokens that the longest cached prefix holds, over the last half of the
requests; a last block that is partly filled counts with its own length.

    python -m tests.benchmarks.policies --trace conversation_trace.jsonl
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tiered_kv.placement import BUILT_IN, Replay, ReplayTier, TracedRequest

__all__ = ["Outcome", "play", "read_trace"]

CAPACITIES = (102, 409, 1_638, 6_553, 26_214)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One policy at one capacity."""

    policy: str
    capacity: int
    hit_percent: float
    stored: int
    """Blocks that were written, in the whole trace."""
    blocks_per_second: float
    """Of processor time."""


def read_trace(path: Path) -> list[TracedRequest]:
    """The requests of a file."""
    requests: list[TracedRequest] = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            requests.append(
                TracedRequest(
                    row["timestamp"] / 1e3,
                    tuple(row["hash_ids"]),
                    row["input_length"],
                    row["output_length"],
                )
            )
    return requests


def play(
    trace: Sequence[TracedRequest], policy: str, capacity: int, block_tokens: int = 512
) -> Outcome:
    """Replay a trace on one tier; of a store where the policy is named `NAME/store`."""
    name, _, kind = policy.partition("/")
    tier = ReplayTier("tier", capacity, name, store=kind == "store")
    replay = Replay([tier], block_tokens=block_tokens)
    began = time.process_time()
    hits = [replay.request(request)["tier"] for request in trace]
    seconds = time.process_time() - began
    half = len(trace) // 2
    tokens = sum(request.tokens for request in trace[half:])
    blocks = sum(len(request.keys) for request in trace)
    return Outcome(
        policy,
        capacity,
        100 * sum(hits[half:]) / max(1, tokens),
        replay.counts["tier"].stored,
        blocks / max(1e-9, seconds),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table; 0."""
    parser = argparse.ArgumentParser(description="hit rates of eviction policies on a trace")
    parser.add_argument("--trace", type=Path, required=True, help="JSON lines; see the module")
    parser.add_argument("--policies", nargs="+", default=[*BUILT_IN, "prefix/store"])
    parser.add_argument("--capacities", nargs="+", type=int, default=list(CAPACITIES))
    parser.add_argument("--block-tokens", type=int, default=512)
    parser.add_argument("--first", type=float, default=1.0, help="share of the trace to play")
    chosen = parser.parse_args(arguments)
    gc.disable()  # as `tiered-kv plan` does where it replays
    trace = read_trace(chosen.trace)
    trace = trace[: int(len(trace) * chosen.first)]
    print("| policy | " + " | ".join(f"{n:,}" for n in chosen.capacities) + " | blocks/s |")
    print("|---|" + "---|" * (len(chosen.capacities) + 1))
    for policy in chosen.policies:
        found = [play(trace, policy, n, chosen.block_tokens) for n in chosen.capacities]
        rates = " | ".join(f"{one.hit_percent:.2f}%" for one in found)
        slowest = min(one.blocks_per_second for one in found)
        print(f"| {policy} | {rates} | {slowest:,.0f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
