"""Weights or an adapter that were replaced under their name, and a namespace that was bumped: no
older block is served, in any tier."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, make_offload_key
from vllm.v1.request import Request

from tests.faults.identities import Engine
from tests.faults.loading import KINDS, Kind
from tests.unit.test_manager import Bench, bench
from tiered_kv.connector import Adapters, WorkerReport
from tiered_kv.contracts import BlockStore
from tiered_kv.errors import IdentityError
from tiered_kv.testing.conformance.blocks import StoreArguments, assert_held, get, keys, put
from tiered_kv.values import BlockKey, BlockStatus, Namespace
from tiered_kv.vllm.connector import TieredKVConnector
from tiered_kv.vllm.identity import adapter_identity
from tiered_kv.vllm.spec import ANSWERS, TieredKVManager

PATIENCE = 30.0
BLOCKS = 4
BLOCK_TOKENS = 16
HIT = next(theirs for ours, theirs in ANSWERS.items() if ours.value == "hit")


@pytest.fixture(autouse=True)
def digests_of_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of digests is this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# ------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("kind", KINDS[:2], ids=lambda kind: kind.name)
@pytest.mark.parametrize("what", ["files", "weights", "name"])
def test_f42_after_a_bump_every_tier_misses(kind: Kind, what: str, tmp_path: Path) -> None:
    """The weight files were replaced in place; or `namespace.weights` or `namespace.name` was
    changed. Going back finds the old blocks again."""
    engine = Engine(tmp_path / "engine")
    arguments = StoreArguments(tmp_path / "tier")

    def opened() -> BlockStore:
        return kind.open(arguments.with_(namespace=Namespace(engine.fingerprint())))

    def set_to(value: str) -> None:
        if what == "files":
            engine.write("model.safetensors", value.encode())
        else:
            engine.namespace[what] = value

    numbers = range(6)
    set_to("first")
    store = opened()
    put(store, numbers)
    store.close()
    set_to("second")
    store = opened()
    missed = [read.result.status for read in get(store, numbers)]
    assert missed == [BlockStatus.MISSING] * 6
    assert not any(store.contains(keys(numbers)))
    assert list(store.scan()) == []
    store.close()
    set_to("first")
    store = opened()
    assert_held(store, numbers)
    store.close()
    print(f"{kind.name}, {what}: {len(missed)} blocks missed, and found when it was undone")


# ------------------------------------------------------------------------------------ adapters


@dataclass
class Disk:
    """A store tier that several engines share: the keys that it holds."""

    known: dict[BlockKey, bool | None] = field(default_factory=dict)


class VllmHalf:
    """In place of vLLM's scheduler half: asks about the blocks of a request, one by one."""

    def __init__(self, manager: TieredKVManager) -> None:
        self.manager = manager

    def on_new_request(self, request: Request) -> None:
        self.manager.on_new_request(ReqContext(request.request_id))

    def get_num_new_matched_tokens(
        self, request: Request, computed: int, **_: object
    ) -> tuple[int, bool]:
        hits = 0
        for key in offered(request):
            if self.manager.lookup(key, ReqContext(request.request_id)) is not HIT:
                break
            hits += 1
        return hits * BLOCK_TOKENS, bool(hits)


def offered(request: Request) -> list[OffloadKey]:
    return [make_offload_key(block, 0) for block in request.block_hashes]


class Process:
    """The scheduler's process of an engine: our connector between its manager and a stand-in for
    vLLM's half."""

    def __init__(self, disk: Disk) -> None:
        self.bench: Bench = bench(slots=64)
        self.bench.disk.known = disk.known
        self.adapters = Adapters(adapter_identity, wait=PATIENCE)
        self.tiered = TieredKVManager(self.bench.manager, self.adapters)
        connector: Any = object.__new__(TieredKVConnector)
        connector._spec = SimpleNamespace(manager=self.tiered)
        connector._hashes = ((0, 1),)
        connector._bounding_group_ids = ()
        connector.connector_scheduler = VllmHalf(self.tiered)
        self.connector: TieredKVConnector = connector
        self.served = 0

    def serve(self, lora: LoRARequest | None) -> tuple[int, int]:
        """Serve one prompt: how many blocks were found, and how many were stored."""
        self.served += 1
        request = named(f"r{self.served}", lora)
        self.connector.on_new_request(request)
        found = self.connector.get_num_new_matched_tokens(request, 0)
        pause = threading.Event()
        while found[0] is None:  # as vLLM asks again in its next step
            pause.wait(0.001)
            found = self.connector.get_num_new_matched_tokens(request, 0)
        context = ReqContext(request.request_id)
        output = self.tiered.prepare_store(offered(request), context)
        assert set(output.keys_to_store) <= set(offered(request))
        self._stored(cast(Any, output.store_spec).targets)
        self.tiered.on_request_finished(context)
        if output.keys_to_store:
            self.tiered.complete_store(output.keys_to_store, context)
        assert not self.tiered._adapted
        return found[0] // BLOCK_TOKENS, len(output.keys_to_store)

    def _stored(self, targets: Any) -> None:
        slots = () if targets.first is None else targets.first.slots
        for part in targets.behind:
            self.bench.disk.known.update(dict.fromkeys(part.spec.keys, True))
        released = tuple((0, slot) for slot in slots)
        self.bench.manager.take_report(WorkerReport(released=released))

    def close(self) -> None:
        self.tiered.shutdown()


def named(request: str, lora: LoRARequest | None) -> Request:
    """A request whose blocks are named as vLLM names them: by the prompt, and an adapter's name and
    path."""
    about = "" if lora is None else f"{lora.lora_name} {lora.lora_path}"
    hashes = [hashlib.sha256(f"{about} {i}".encode()).digest() for i in range(BLOCKS)]
    return cast(
        Request,
        SimpleNamespace(
            request_id=request,
            kv_transfer_params=None,
            lora_request=lora,
            block_hashes=hashes,
            num_tokens=BLOCKS * BLOCK_TOKENS,
            skip_reading_prefix_cache=False,
        ),
    )


def write_adapter(folder: Path, weights: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(hashlib.sha512(weights.encode()).digest())
    (folder / "adapter_config.json").write_text('{"lora_alpha": 16}')


NOTHING, ALL = 0, BLOCKS


def test_f42_an_adapter_reloaded_under_its_name_hits_no_old_block(tmp_path: Path) -> None:
    disk = Disk()
    folder = tmp_path / "adapter"
    write_adapter(folder, "first")
    lora = LoRARequest("a", 1, str(folder))
    before = Process(disk)
    assert before.serve(lora) == (NOTHING, ALL)
    assert before.serve(lora) == (ALL, NOTHING)
    assert before.serve(None) == (NOTHING, ALL)
    neighbour = Process(disk)
    assert neighbour.serve(lora)[0] == ALL  # by way of the store, in every process

    write_adapter(folder, "second")
    for again in (lora, LoRARequest("a", 1, str(folder), load_inplace=True)):
        # Neither found nor stored: vLLM's own prefix cache still has blocks of the old weights.
        assert before.serve(again) == (NOTHING, NOTHING)
    assert before.serve(LoRARequest("a", 2, str(folder))) == (NOTHING, NOTHING)
    assert before.serve(None) == (ALL, NOTHING)

    after = Process(disk)
    assert after.serve(lora) == (NOTHING, ALL)
    assert after.serve(lora) == (ALL, NOTHING)
    moved = tmp_path / "moved"
    write_adapter(moved, "third")
    assert before.serve(LoRARequest("a", 1, str(moved), load_inplace=True)) == (NOTHING, ALL)

    before.tiered.reset_cache()
    assert before.serve(lora)[0] == NOTHING
    assert before.serve(lora)[0] == ALL
    print(f"{len(disk.known)} blocks in the store, of 4 sets of weights")
    assert len(disk.known) == 4 * BLOCKS
    for process in (before, neighbour, after):
        process.close()


def test_f42_an_adapter_lies_where_vllm_looks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_adapter(tmp_path / "lora", "first")
    assert adapter_identity("~/lora") == adapter_identity(str(tmp_path / "lora"))
    for nowhere in ("~/other", str(tmp_path / "other"), "a/b/c", "nobody/nothing"):
        with pytest.raises(IdentityError, match="neither a directory"):
            adapter_identity(nowhere)


def test_f42_an_adapter_without_identity_stays_in_the_host_tier_and_is_not_reloaded_unnoticed(
    tmp_path: Path,
) -> None:
    disk = Disk()
    lora = LoRARequest("a", 1, str(tmp_path / "nowhere"))
    process, other = Process(disk), Process(disk)
    assert process.serve(lora) == (NOTHING, ALL)
    assert process.serve(lora) == (ALL, NOTHING)
    assert disk.known == {}
    assert other.serve(lora)[0] == NOTHING
    assert process.serve(LoRARequest("a", 2, str(tmp_path / "nowhere"))) == (NOTHING, NOTHING)
    process.close()
    other.close()
