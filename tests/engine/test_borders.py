"""What vLLM hands over, odd as it may be: sliding windows, identities, clients' parameters. Runs
vLLM's own classes, no engine."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, UniformTypeKVCacheSpecs
from vllm.v1.kv_offload.base import GPULoadStoreSpec, make_offload_key
from vllm.v1.request import Request

from tiered_kv.connector import Manager, ManagerLimits
from tiered_kv.errors import IdentityError, UnsupportedError
from tiered_kv.specs import GpuBlock
from tiered_kv.values import BlockKey, Fingerprint
from tiered_kv.vllm import identity
from tiered_kv.vllm.compat import check_flags
from tiered_kv.vllm.connector import TieredKVConnector
from tiered_kv.vllm.jobs import gpu_spec

# Engine blocks that a sliding window has left


def offload_key(number: int, group: int = 0) -> BlockKey:
    return BlockKey(make_offload_key(bytes([number] * 4), group))


@pytest.mark.parametrize("ids", [[1, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 7, 8], [1, 2, 3, 4, 5]])
def test_a_store_with_a_gap_never_takes_a_neighbours_engine_block(ids: list[int]) -> None:
    # Two blocks of 4; the engine gave some of their blocks away, and does not say which.
    spec = GPULoadStoreSpec(ids, [len(ids)], [0])
    cut = gpu_spec(spec, [offload_key(1), offload_key(2)], {0: 0}, chunk=4, whole=True)
    assert cut.blocks == (GpuBlock(0, ()), GpuBlock(0, ()))


def test_a_store_whose_first_block_lacks_its_head_keeps_the_whole_ones() -> None:
    spec = GPULoadStoreSpec([3, 4, 5, 6, 7, 8], [6], [2])
    cut = gpu_spec(spec, [offload_key(1), offload_key(2)], {0: 0}, chunk=4, whole=True)
    assert cut.blocks == (GpuBlock(0, (3, 4), first=2), GpuBlock(0, (5, 6, 7, 8)))


# What determines a block's bytes


def attention(heads: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=16, num_kv_heads=heads, head_size=64, dtype=torch.float16)


def test_the_scheduler_and_the_workers_name_layers_of_several_sizes_alike() -> None:
    # vLLM tells the scheduler of one layer only, see generate_scheduler_kv_cache_config.
    layers: dict[str, KVCacheSpec] = {"one": attention(8), "two": attention(4)}
    worker = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=layers)
    assert identity._spec(worker) == identity._spec(attention(8))
    assert identity._spec(attention(8)) != identity._spec(attention(4))


def test_another_configuration_for_the_same_model_is_another_identity(tmp_path: Path) -> None:
    assert identity._config(None) != identity._config("org/model")
    (tmp_path / "config.json").write_text("{}")
    first = identity._config(str(tmp_path))
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert identity._config(str(tmp_path)) != first


def test_overrides_without_a_stable_name_are_refused() -> None:
    assert identity._text({"b": 1, "a": [2.5, None]}) == '{"a": [2.5, null], "b": 1}'
    with pytest.raises(IdentityError, match="plain values"):
        identity._text({"a": object()})


def test_the_drafting_model_is_part_of_the_identity(tmp_path: Path) -> None:
    def name(content: bytes | None) -> str:
        target = SimpleNamespace(model="target", revision=None)
        draft = None
        if content is not None:
            (tmp_path / "model.safetensors").write_bytes(content)
            model = SimpleNamespace(model=str(tmp_path), revision=None)
            draft = SimpleNamespace(method="eagle", draft_model_config=model)
        vllm_config = SimpleNamespace(model_config=target, speculative_config=draft)
        return identity._draft(cast(VllmConfig, vllm_config), None)

    assert len({name(None), name(b"12345678"), name(b"87654321")}) == 3


def flags(**cache: object) -> VllmConfig:
    """Settings that are right but for these."""
    sound = {
        "enable_prefix_caching": True,
        "prefix_caching_hash_algo": "sha256_cbor",
        "calculate_kv_scales": False,
    }
    vllm_config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy="recompute"),
        cache_config=SimpleNamespace(**(sound | cache)),
    )
    return cast(VllmConfig, vllm_config)


@pytest.mark.parametrize("persistent", [False, True])
def test_scales_that_every_process_computes_anew_fit_no_tier_that_lasts(persistent: bool) -> None:
    given = flags(calculate_kv_scales=True)
    if not persistent:
        check_flags(given, persistent=False)
        return
    with pytest.raises(UnsupportedError, match="calculate-kv-scales"):
        check_flags(given, persistent=True)


# Clients


def test_transfer_parameters_that_are_no_mapping_are_ignored(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = Manager(
        fingerprint=Fingerprint.of({"model": "m"}),
        host_tier="host",
        host_write=True,
        tiers=[],
        limits=ManagerLimits(0.05, 5.0),
        world_size=1,
    )
    connector = object.__new__(TieredKVConnector)
    seen: list[object] = []
    half = SimpleNamespace(on_new_request=lambda request: seen.append(request.kv_transfer_params))
    monkeypatch.setattr(TieredKVConnector, "_tiered", SimpleNamespace(core=manager))
    monkeypatch.setattr(connector, "connector_scheduler", half, raising=False)
    request = SimpleNamespace(request_id="q", kv_transfer_params="ssd", lora_request=None)
    with caplog.at_level(logging.WARNING):
        connector.on_new_request(cast(Request, request))
    assert seen == [None]
    assert "no mapping but str" in caplog.text
