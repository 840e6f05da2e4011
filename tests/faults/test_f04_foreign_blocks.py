"""A block of another model, engine, rank or adapter is never served: each field that determines the
bytes is in the namespace, and another namespace is always a miss."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.faults.identities import Engine
from tests.faults.loading import KINDS, Kind
from tiered_kv.errors import IdentityError
from tiered_kv.testing.conformance.blocks import StoreArguments, assert_held, get, keys, put
from tiered_kv.values import BlockStatus, Fingerprint, Namespace
from tiered_kv.vllm import identity

CONSTANT = {"engine"}
"""Fields that no setting of vLLM's changes."""


Change = Callable[[Engine, pytest.MonkeyPatch], object]


def to(path: str, value: object) -> Change:
    return lambda engine, _: engine.set(path, value)


def with_draft(engine: Engine, _: pytest.MonkeyPatch) -> None:
    model = SimpleNamespace(model=str(engine.folder / "draft"), revision=None)
    engine.set("config.speculative_config", SimpleNamespace(method="m", draft_model_config=model))


def other_config(engine: Engine, _: pytest.MonkeyPatch) -> None:
    (engine.folder / "draft" / "config.json").write_text('{"rope_theta": 1}')
    engine.set("config.model_config.hf_config_path", str(engine.folder / "draft"))


CHANGES: list[tuple[str, Change]] = [
    ("format", lambda _, patch: patch.setattr(identity, "FORMAT_VERSION", 1_000)),
    ("name", lambda engine, _: engine.namespace.update(name="another")),
    ("weights", lambda engine, _: engine.namespace.update(weights="bumped")),
    ("weights", lambda engine, _: engine.write("model.safetensors", b"weightz")),
    ("weights", lambda engine, _: engine.write("more.safetensors", b"")),
    ("weights", lambda engine, _: engine.write("config.json", b'{"rope_theta": 1}')),
    ("draft", with_draft),
    ("config", other_config),
    ("architectures", to("config.model_config.architectures", ["OtherForCausalLM"])),
    ("quantization", to("config.model_config.quantization", "fp8")),
    ("overrides", to("config.model_config.hf_overrides", {"rope_theta": 10_000})),
    ("long_context", to("config.model_config.max_model_len", 131_072)),
    ("dtype", to("config.model_config.dtype", "torch.float16")),
    ("kv_dtype", to("offloading.model.dtype", "fp8_e4m3")),
    ("kv_scales", to("config.cache_config.calculate_kv_scales", True)),
    ("layout", to("offloading.kv_cache_layout", "LBNHC")),
    ("layout", to("offloading.kv_cache_layout", None)),
    ("block_bytes", to("offloading.worker_kv_bytes_per_block", 32_768)),
    ("chunk", to("offloading.cache.blocks_per_chunk", 8)),
    ("tokens_per_hash", to("offloading.cache.tokens_per_hash", 32)),
    ("groups", to("offloading.groups.0.tokens_per_block", 32)),
    ("groups", to("offloading.groups.0.layer_names", ("layers.2", "layers.3"))),
    ("groups", to("offloading.groups.0.layer_names", ("layers.0",))),
    ("groups", to("caches.kv_cache_groups.0.kv_cache_spec", "FullAttentionSpec(heads=4)")),
    ("world", to("offloading.parallel.world_size", 4)),
    ("tp", to("offloading.parallel.tp_size", 1)),
    ("pp", to("offloading.parallel.pp_size", 2)),
    ("pcp", to("offloading.parallel.pcp_size", 2)),
    ("dcp", to("offloading.parallel.dcp_size", 2)),
    ("hash", to("config.cache_config.prefix_caching_hash_algo", "xxhash_cbor")),
    ("hash_seed", lambda _, patch: patch.setenv("PYTHONHASHSEED", "7")),
]


@pytest.fixture(autouse=True)
def digests_of_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of digests is this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


@pytest.fixture
def variants(tmp_path: Path) -> list[tuple[str, Fingerprint]]:
    """The engine as it is, then with one thing changed at a time."""
    found = [("", Engine(tmp_path / "engine").fingerprint())]
    for number, (name, change) in enumerate(CHANGES):
        engine = Engine(tmp_path / f"engine-{number}")
        with pytest.MonkeyPatch.context() as patch:
            change(engine, patch)
            found.append((name, engine.fingerprint()))
    return found


def test_f04_every_field_is_changed_here_one_at_a_time(
    variants: list[tuple[str, Fingerprint]],
) -> None:
    (_, plain), *changed = variants
    for name, fingerprint in changed:
        assert plain.differences(fingerprint) == (name,)
    fields = {name for name, _ in plain.fields}
    assert {name for name, _ in changed} == fields - CONSTANT
    assert len({Namespace(fingerprint).id for _, fingerprint in variants}) == len(variants)
    print(f"{len(fields)} fields, {len(changed)} changes")


@pytest.mark.parametrize("kind", KINDS[:2], ids=lambda kind: kind.name)
def test_f04_another_namespace_is_always_a_miss(
    kind: Kind, variants: list[tuple[str, Fingerprint]], tmp_path: Path
) -> None:
    """In one directory; and nobody's blocks are touched by another."""
    # Room for a segment of each, so that none has to be taken from a namespace that is not open.
    extra = (("segment", 2**20),) if kind.name == "nvme" else ()
    arguments = StoreArguments(tmp_path / "tier", 64 * 2**20, extra=extra)
    numbers = range(3)
    served = 0
    for i, (name, fingerprint) in enumerate(variants):
        store = kind.open(arguments.with_(namespace=Namespace(fingerprint)))
        statuses = {read.result.status for read in get(store, numbers)}
        assert statuses == {BlockStatus.MISSING}, name
        assert not any(store.contains(keys(numbers))), name
        assert list(store.scan()) == [], name
        put(store, numbers)
        served += sum(read.sound for read in get(store, numbers))
        store.close()
        assert served == len(numbers) * (i + 1)
    print(f"{len(variants)} namespaces in one directory: each found its own {len(numbers)} alone")
    store = kind.open(arguments.with_(namespace=Namespace(variants[0][1])))
    assert_held(store, numbers)
    assert store.stat().blocks == len(numbers)
    store.close()


@pytest.mark.parametrize("kind", KINDS[:2], ids=lambda kind: kind.name)
def test_f04_a_part_of_another_rank_is_not_served(kind: Kind, tmp_path: Path) -> None:
    """A block whose other rank's part is missing is not there for either; bytes of a rank do not
    verify on another."""
    arguments = StoreArguments(tmp_path / "tier", world_size=2)
    stores = [kind.open(arguments.with_(rank=rank)) for rank in range(2)]
    put(stores[0], range(4), rank=0)
    for rank, store in enumerate(stores):
        assert not any(store.contains(keys(range(4))))
        if rank == 1:
            statuses = {read.result.status for read in get(store, range(4), rank)}
            assert statuses == {BlockStatus.MISSING}
    put(stores[1], range(4), rank=1)
    for rank, store in enumerate(stores):
        assert all(read.sound for read in get(store, range(4), rank))
        assert not any(read.sound for read in get(store, range(4), 1 - rank))
        store.close()


@pytest.mark.parametrize(
    "change",
    [
        to("offloading.model.dtype", "auto"),
        to("config.model_config.dtype", "auto"),
        to("config.model_config.quantization", "AUTO"),
        to("config.cache_config.prefix_caching_hash_algo", None),
        to("offloading.worker_kv_bytes_per_block", None),
        to("config.model_config.hf_overrides", lambda config: config),
    ],
)
def test_f04_what_is_not_resolved_is_refused(
    change: Change, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tmp_path / "engine")
    change(engine, monkeypatch)
    with pytest.raises(IdentityError):
        engine.fingerprint()


def test_f04_no_field_of_an_engine_is_unresolved(
    variants: list[tuple[str, Fingerprint]],
) -> None:
    for _, fingerprint in variants:
        for name, value in fingerprint.fields:
            assert value.lower() not in ("auto", "none", ""), name


def test_f04_a_model_without_identity_is_refused(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "engine")
    os.unlink(tmp_path / "engine" / "model.safetensors")
    with pytest.raises(IdentityError, match=r"namespace\.weights"):
        engine.fingerprint()
    engine.namespace["weights"] = "told"
    assert dict(engine.fingerprint().fields)["weights"] == "told"
