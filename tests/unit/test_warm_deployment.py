"""The deployment and the arguments that the engine of `warm` gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command_line import Cli
from tiered_kv.cli.warm_deployment import engine_environment, tiers_to_warm, write_deployment
from tiered_kv.config import MIB, Deployment, load, shipped, shipped_names
from tiered_kv.errors import ConfigError
from tiered_kv.plugins import Plugins

TEXT = """\
namespace: {name: mine, weights: same}
chunk: 4
recompute: {gate: fixed, tokens_per_second: 1000}
placement: {write: [host, ssd], admit: {min_uses: 2}}
limits: {staging: 64MiB, store_deadline: 20min, load_deadline: 1s}
tiers:
  - {name: host, type: cpu, capacity: 96MiB}
  - {name: ssd, type: nvme, paths: ["/mnt/a$$b/kv", /mnt/c/kv], capacity: 1TiB, min_free: 10%}
  - {name: pins, type: lmdb, path: $HERE/pins, capacity: 64GiB, scrub: 1MiB}
  - {name: old, type: lmdb, path: /mnt/old, capacity: 64GiB, access: read}
"""
ENV = {"HERE": "/home/op", "TIERED_KV__TIERS__1__CAPACITY": "2TiB"}


def read(folder: Path) -> Deployment:
    file = folder / "d.yaml"
    file.write_text(TEXT)
    return load(file, Plugins(), ENV)


def made(deployment: Deployment, tiers: tuple[str, ...], folder: Path) -> Deployment:
    file = folder / "engine.yaml"
    write_deployment(deployment, tiers, file)
    return load(file, Plugins(), engine_environment(ENV))


def test_it_has_the_tiers_alone_and_waits(tmp_path: Path) -> None:
    deployment = read(tmp_path)
    engine = made(deployment, ("ssd", "pins"), tmp_path)
    assert engine.tiers == (deployment.tier("ssd"), deployment.tier("pins"))
    assert str(engine.tier("ssd").data_directories[0]) == "/mnt/a$b/kv"
    assert engine.tier("ssd").capacity == 2 * 2**40  # as overridden, in its place of before
    assert [tier.name for tier in engine.write_order] == ["ssd", "pins"]
    assert engine.placement.admit.min_uses == 1
    assert engine.recompute.gate == "off"
    assert engine.limits.staging == 96 * MIB
    assert (engine.limits.store_deadline, engine.limits.load_deadline) == (1200.0, 60.0)
    # What is in the fingerprint stays.
    assert (engine.namespace, engine.chunk) == (deployment.namespace, 4)
    assert engine.on_reset == deployment.on_reset


@pytest.mark.parametrize("name", shipped_names())
def test_shipped_deployments(name: str, tmp_path: Path) -> None:
    env = {"TIERED_KV_DEMO_DIR": "/tmp/demo"}
    deployment = load(shipped(name), Plugins(), env)
    stores = tuple(tier.name for tier in deployment.stores if tier.writable)
    if not stores:
        with pytest.raises(ConfigError, match="nothing to warm"):
            tiers_to_warm(deployment, (), shipped(name))
        return
    file = tmp_path / "engine.yaml"
    write_deployment(deployment, stores, file)
    assert load(file, Plugins(), {}).tiers == tuple(deployment.tier(one) for one in stores)


def test_which_tiers(tmp_path: Path) -> None:
    deployment = read(tmp_path)
    file = tmp_path / "d.yaml"
    assert tiers_to_warm(deployment, (), file) == ("ssd",)
    assert tiers_to_warm(deployment, ("pins", "ssd"), file) == ("ssd", "pins")
    for name, said in (
        ("host", "ends with its engine; name one that outlives it: ssd, pins, old"),
        ("pin", "has no such tier; did you mean pins"),
        ("old", "read only"),
    ):
        with pytest.raises(ConfigError, match=said):
            tiers_to_warm(deployment, (name,), file)
    file.write_text("tiers: [{name: host, type: cpu, capacity: 1GiB}]")
    host_only = load(file, Plugins(), {})
    with pytest.raises(ConfigError, match="no tier that outlives its process may be written"):
        tiers_to_warm(host_only, (), file)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ('{"tensor_parallel_size": "two"}', "tensor_parallel_size is 'two', not a whole number"),
        ('{"tensor_parallel_size": [1]}', "tensor_parallel_size is [1], not a whole number"),
        ('{"block_size": 1e400}', "block_size is inf, not a whole number from 1 to 1048576"),
        ('{"block_size": 0}', "block_size is 0, not a whole number"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_arguments_that_nothing_can_be_estimated_from(
    arguments: str, said: str, tmp_path: Path, cli: Cli
) -> None:
    config = tmp_path / "d.yaml"
    config.write_text(
        f"tiers:\n  - {{name: ssd, type: nvme, path: {tmp_path}/ssd, capacity: 64MiB}}\n"
    )
    (tmp_path / "prompts.jsonl").write_text('{"token_ids": [1, 2]}\n')
    options = ("--model", "nobody/nothing", "--engine-args", arguments, "--dry-run")
    refused = cli("warm", "--config", config, tmp_path / "prompts.jsonl", *options)
    print(refused.err[:1000])
    assert refused.code == 2
    assert "--engine-args" in refused.err
    assert said in " ".join(refused.err.replace("│", " ").split())
