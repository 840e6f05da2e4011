"""What a real vLLM records, and what it publishes, is read by `tiered-kv plan`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.engine.actions import EngineRun
from tests.engine.lives import ANSWER, STORED
from tests.engine.tiers import cached
from tiered_kv.planning import TraceKind, read_trace


def test_two_ranks_record_what_they_were_asked(ranks: EngineRun, ranks_folder: Path) -> None:
    names = ("cold", "host", "ssd", "restarted")
    trace = read_trace(ranks_folder / "trace")
    print(trace.kind, len(trace.requests), "requests,", trace.recorded_hits)
    prompts = [len(tokens) for tokens in STORED]
    asked = [request for request in trace.requests if request.tokens >= min(prompts)]
    assert len(asked) < len(trace.requests)  # the others are short ones, which let stores settle
    assert [request.tokens for request in asked] == prompts * len(names)
    assert {request.output_tokens for request in asked} == {ANSWER}
    assert trace.block_tokens == 128
    first, second = (request.keys for request in asked[:2])
    assert [len(first), len(second)] == [length // 128 for length in prompts]
    assert [request.keys for request in asked] == [first, second] * len(names)
    loaded = {name: sum(cached(ranks.answers[name])) for name in names[1:]}
    assert set(trace.recorded_hits) == {"host", "ssd"}
    assert trace.recorded_hits["host"] >= loaded["host"] > 0
    assert trace.recorded_hits["ssd"] >= loaded["ssd"] + loaded["restarted"] > 0
    assert trace.bytes_per_token is not None
    assert trace.bytes_per_token > 0


PUBLISHED = """
import sys, msgspec
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

def stored(hashes, parent):
    return BlockStored(
        block_hashes=hashes, parent_block_hash=parent, token_ids=[1] * 16 * len(hashes),
        block_size=16, lora_id=None, medium="GPU", lora_name=None, group_idx=0,
    )

for file, encode, names in (
    (sys.argv[1], msgspec.msgpack.encode, [bytes([n]) * 32 for n in range(4)]),
    (sys.argv[2], lambda batch: msgspec.json.encode(batch) + b"\\n", list(range(4))),
):
    batches = [
        KVEventBatch(ts=100.0, events=[stored(names[:3], None)], data_parallel_rank=0),
        KVEventBatch(ts=101.0, events=[BlockRemoved(block_hashes=names[2:3], medium="GPU")]),
        KVEventBatch(ts=102.5, events=[stored(names[2:], names[1]), AllBlocksCleared()]),
    ]
    with open(file, "wb") as out:
        out.writelines(map(encode, batches))
"""


def test_the_events_of_the_installed_vllm_are_read(tmp_path: Path) -> None:
    files = [tmp_path / "events.msgpack", tmp_path / "events.jsonl"]
    subprocess.run([sys.executable, "-c", PUBLISHED, *map(str, files)], check=True, cwd=tmp_path)
    for file in files:
        trace = read_trace(file)
        print(file.name, trace)
        assert trace.kind is TraceKind.KV_EVENTS
        first, second = trace.requests
        assert second.keys[0] == first.keys[2]
        assert (first.time, second.time) == (0.0, 2.5)
        assert trace.distinct_blocks == 4
        assert (trace.block_tokens, trace.tokens) == (16, 80)
