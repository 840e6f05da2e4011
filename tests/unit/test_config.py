from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from tests.unit.config_types import DiskSettings, FakeTypes, StripedSettings
from tiered_kv.config import (
    GIB,
    MIB,
    CpuSettings,
    Deployment,
    Placement,
    SizeOrPercent,
    load,
    require_room,
    schema,
    volumes,
)
from tiered_kv.errors import ConfigError

WHOLE = """\
namespace: {name: prod, weights: v3}
store: prompt
chunk: 8
tiers:
  - {name: host, type: cpu, capacity: 1GiB, eviction: {policy: lru}}
  - name: ssd
    type: disk
    path: $DISK/kv
    capacity: 64MiB
    min_free: 10%
  - {name: warm, type: disk, path: /mnt/warm, access: read}
placement: {write: [ssd, host], admit: {min_uses: 2}}
limits:
  load_deadline: 1s
  store_deadline: 3s
  lookup_wait: 0s
  store_queue: 1GiB
  drain: 1min
  retry_backoff: 7s
  staging: 64MiB
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "deployment.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def read(folder: Path, text: str, **env: str) -> Deployment:
    return load(write(folder, text), FakeTypes(), env)


def test_a_whole_file(tmp_path: Path) -> None:
    deployment = read(tmp_path, WHOLE, DISK="/mnt/a")
    assert (deployment.namespace.name, deployment.namespace.weights) == ("prod", "v3")
    assert (deployment.store, deployment.chunk) == ("prompt", 8)
    host, ssd, warm = deployment.tiers
    assert isinstance(host, CpuSettings)
    assert isinstance(ssd, DiskSettings)
    assert (host.capacity, ssd.capacity, warm.capacity) == (GIB, 64 * MIB, 4 * GIB)
    assert ssd.path == Path("/mnt/a/kv")
    assert ssd.min_free == SizeOrPercent(percent=10)
    assert deployment.cpu is host
    assert deployment.stores == (ssd, warm)
    assert deployment.write_order == (ssd, host)
    assert deployment.placement.admit.min_uses == 2
    limits = deployment.limits
    assert (limits.load_deadline, limits.store_deadline, limits.lookup_wait) == (1.0, 3.0, 0.0)
    assert (limits.drain, limits.retry_backoff) == (60.0, 7.0)
    assert (limits.store_queue, limits.staging) == (GIB, 64 * MIB)
    with pytest.raises(KeyError):
        deployment.tier("nowhere")


def test_defaults(tmp_path: Path) -> None:
    text = "tiers: [{name: a, type: disk, path: /a}, {name: b, type: disk, path: /b, access: read}]"
    deployment = read(tmp_path, text)
    assert deployment.namespace.name is None
    assert (deployment.store, deployment.chunk, deployment.cpu) == ("all", None, None)
    assert [tier.name for tier in deployment.write_order] == ["a"]
    assert deployment.limits.load_deadline == 2.0


@pytest.mark.parametrize(("text", "name"), [("auto", None), ("prod-1", "prod-1"), ("{}", None)])
def test_namespace_forms(tmp_path: Path, text: str, name: str | None) -> None:
    deployment = read(tmp_path, f"namespace: {text}\ntiers: [{{name: a, type: cpu}}]")
    assert deployment.namespace.name == name


def test_only_the_named_types_are_loaded_and_nothing_is_made(tmp_path: Path) -> None:
    types = FakeTypes()
    path = tmp_path / "kv"
    text = f"tiers: [{{name: a, type: cpu}}, {{name: b, type: disk, path: {path}}}]"
    load(write(tmp_path, text), types, {})
    assert types.asked == ["disk"]
    assert not path.exists()


def test_a_deployment_is_frozen_and_comes_back_from_its_json(tmp_path: Path) -> None:
    deployment = read(tmp_path, WHOLE, DISK="/mnt/a")
    with pytest.raises(ValidationError):
        deployment.store = "all"  # type: ignore[misc]
    dumped = deployment.model_dump_json()
    assert '"capacity":"64MiB"' in dumped
    assert read(tmp_path, yaml.safe_dump(json.loads(dumped))) == deployment


def test_a_deployment_made_in_python_is_checked_too() -> None:
    host = CpuSettings(name="host", capacity=GIB)
    disk = DiskSettings(name="ssd", path=Path("/a"))
    assert Deployment(tiers=(host, disk)).write_order == (host, disk)
    with pytest.raises(ValidationError, match="did you mean 'ssd'"):
        Deployment(tiers=(host, disk), placement=Placement(write=("sd",)))
    with pytest.raises(ValidationError, match="second cpu tier"):
        Deployment(tiers=(host, CpuSettings(name="more")))


def test_directories_of_a_tier() -> None:
    striped = StripedSettings(name="s", paths=(Path("/a"), Path("/b")))
    assert striped.directories == {"paths.0": Path("/a"), "paths.1": Path("/b")}
    assert CpuSettings(name="host").directories == {}


# Room


def test_a_deployment_must_fit_on_the_machine(tmp_path: Path) -> None:
    disk = DiskSettings(name="ssd", path=tmp_path / "not" / "there", capacity=MIB)
    fits = Deployment(tiers=(CpuSettings(name="host", capacity=MIB), disk))
    require_room(fits, ranks=2)
    host, file_system = volumes(fits, ranks=2)
    assert (host.tiers, host.wanted_bytes) == (["host"], 2 * MIB)
    assert (file_system.place, file_system.wanted_bytes) == (str(tmp_path), MIB)
    large = Deployment(tiers=(CpuSettings(name="host", capacity=2**60), *fits.stores))
    with pytest.raises(ConfigError, match=r"tier 'host' may grow to \d+ bytes .*\d+ bytes .* free"):
        require_room(large, ranks=1)


def test_what_a_tier_holds_already_counts_as_room(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "data").write_bytes(bytes(MIB))
    deployment = Deployment(tiers=(DiskSettings(name="ssd", path=tmp_path / "kv"),))
    (volume,) = volumes(deployment, ranks=1)
    assert MIB <= volume.held_bytes < 2 * MIB
    full = replace(volume, free_bytes=0, wanted_bytes=volume.held_bytes)
    assert full.shortage is None
    assert "beside the" in str(replace(full, wanted_bytes=2 * MIB).shortage)


def test_what_is_only_read_needs_no_room(tmp_path: Path) -> None:
    large = DiskSettings(name="ssd", path=tmp_path / "kv", capacity=2**62)
    shipped = large.model_copy(update={"access": "read"})
    assert not shipped.writable
    deployment = Deployment(tiers=(shipped,), placement=Placement(write=()))
    require_room(deployment, ranks=1)
    assert volumes(deployment, ranks=1) == []
    with pytest.raises(ConfigError, match="'ssd' may grow to"):
        require_room(Deployment(tiers=(large,)), ranks=1)


# Overrides


def test_environment_overrides(tmp_path: Path) -> None:
    deployment = read(
        tmp_path,
        WHOLE,
        DISK="/mnt/a",
        TIERED_KV__TIERS__1__CAPACITY="2GiB",
        TIERED_KV__PLACEMENT__WRITE="[host]",
        TIERED_KV__LIMITS__LOOKUP_WAIT="5ms",
        TIERED_KV__STORE="all",
        TIERED_KV_DEMO_DIR="/not/an/override",
    )
    assert deployment.tiers[1].capacity == 2 * GIB
    assert deployment.write_order == (deployment.tiers[0],)
    assert deployment.limits.lookup_wait == 0.005
    assert deployment.store == "all"


def test_an_override_makes_the_mapping_it_needs(tmp_path: Path) -> None:
    text = "tiers: [{name: a, type: cpu}]"
    deployment = read(tmp_path, text, TIERED_KV__PLACEMENT__ADMIT__MIN_USES="3")
    assert deployment.placement.admit.min_uses == 3


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("TIERED_KV__TIERS__0__CAPACITY", "64", "tiers.0.capacity: '64' has no unit"),
        ("TIERED_KV__TIERS__0__CAPACTY", "1GiB", "tiers.0.capacty: unknown key; did you mean 'cap"),
        ("TIERED_KV__TIERS__7__CAPACITY", "1GiB", "has 1 entries, counted from 0; 7 is none"),
        ("TIERED_KV__TIERS__HOST__CAPACITY", "1GiB", "expected a number"),
        ("TIERED_KV__STORE__X", "1GiB", "there is no key 'x' in 'all'"),
        ("TIERED_KV__", "1", "there is no key ''"),
        ("TIERED_KV__STORE", "[", "is not valid YAML"),
        ("TIERED_KV__STORE", "!!python/name:os.system", "is not allowed"),
        ("TIERED_KV__STORE", "", "store: should be 'prompt' or 'all', is None"),
    ],
)
def test_wrong_overrides_name_the_variable(
    tmp_path: Path, variable: str, value: str, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, "store: all\ntiers: [{name: a, type: cpu}]", **{variable: value})
    assert str(caught.value).startswith(f"environment variable {variable}: ")
    assert said in str(caught.value)
    assert caught.value.line is None


# Schema


def schema_fields(made: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found = {f"Deployment.{name}": field for name, field in made["properties"].items()}
    for group, model in made["$defs"].items():
        found |= {f"{group}.{name}": field for name, field in model["properties"].items()}
    return found


def test_every_field_has_a_description_and_numbers_have_a_unit() -> None:
    made = schema(FakeTypes())
    fields = schema_fields(made)
    assert len(fields) > 25
    for name, field in fields.items():
        target = field.get("$ref", "").rpartition("/")[2]
        assert field.get("description") or made["$defs"][target]["description"], name
        number = field.get("type") in ("integer", "number") or "pattern" in field
        assert not number or "unit" in field or name.endswith(".name"), name


def test_the_schema_takes_what_load_takes(tmp_path: Path) -> None:
    jsonschema: Any = pytest.importorskip("jsonschema")
    made = schema(FakeTypes())
    jsonschema.Draft202012Validator.check_schema(made)
    validator = jsonschema.Draft202012Validator(made)
    validator.validate(yaml.safe_load(WHOLE))
    assert set(made["$defs"]) >= {"CpuSettings", "DiskSettings", "StripedSettings"}
    unfit: tuple[dict[str, Any], ...] = (
        {"tiers": []},
        {"tiers": [{"name": "a", "type": "tape"}]},
        {"tiers": [{"name": "a"}]},
        {"tiers": [{"name": "a", "type": "cpu", "capacity": "32G"}]},
        {"tiers": [{"name": "a", "type": "cpu", "size": "32GiB"}]},
        {"tiers": [{"name": "a", "type": "cpu"}], "limits": {"drain": "5m"}},
    )
    for wrong in unfit:
        assert not validator.is_valid(wrong), wrong
        with pytest.raises(ConfigError):
            read(tmp_path, yaml.safe_dump(wrong))


def test_defaults_in_the_schema_are_as_an_operator_writes_them() -> None:
    fields = schema_fields(schema(FakeTypes()))
    assert fields["Limits.store_queue"]["default"] == "2GiB"
    assert fields["Limits.lookup_wait"]["default"] == "50ms"
    assert fields["CpuSettings.capacity"]["default"] == "4GiB"
    assert fields["Deployment.namespace"]["default"] == "auto"
    assert fields["Deployment.chunk"]["default"] == "auto"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ("measured", None)),
        ("recompute: {gate: off}", ("off", None)),
        ('recompute: {gate: "off"}', ("off", None)),
        ("recompute: {gate: fixed, tokens_per_second: 8000}", ("fixed", 8000.0)),
    ],
)
def test_the_gate_is_read(tmp_path: Path, text: str, expected: tuple[str, float | None]) -> None:
    recompute = read(tmp_path, f"tiers: [{{name: host, type: cpu}}]\n{text}").recompute
    assert (recompute.gate, recompute.tokens_per_second) == expected


@pytest.mark.parametrize(
    "text",
    [
        "{gate: fixed}",
        "{gate: off, tokens_per_second: 8000}",
        "{tokens_per_second: 8000}",
        "{gate: on}",
        "{gate: fixed, tokens_per_second: 0}",
    ],
)
def test_a_gate_that_contradicts_itself_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="recompute"):
        read(tmp_path, f"tiers: [{{name: host, type: cpu}}]\nrecompute: {text}")
