"""Each bad configuration gets one clear error that lists every problem with its place."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.config_types import FakeTypes
from tiered_kv.config import load, shipped
from tiered_kv.errors import ConfigError

GOOD = """\
store: all
tiers:
  - {name: host, type: cpu, capacity: 1GiB}
  - {name: ssd, type: disk, path: /mnt/a, capacity: 1GiB}
placement: {write: [host, ssd]}
limits: {drain: 5s}
"""


def refusal(folder: Path, text: str | bytes) -> ConfigError:
    file = folder / "d.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        load(file, FakeTypes(), {})
    return caught.value


def problems(folder: Path, text: str | bytes) -> list[str]:
    """The problems, with the file's folder cut off."""
    return [line.removeprefix(f"{folder}/") for line in refusal(folder, text).problems]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        # unknown keys
        ("store: all", "stor: all", "d.yaml:1: stor: unknown key; did you mean 'store'?"),
        ("capacity: 1GiB}\n  -", "capcity: 1GiB}\n  -", "d.yaml:3: tiers.0.capcity: unknown key; "),
        ("path: /mnt/a", "path: /mnt/a, segment: 1GiB", "d.yaml:4: tiers.1.segment: unknown key; "),
        ("drain: 5s", "drains: 5s", "d.yaml:6: limits.drains: unknown key; did you mean 'drain'?"),
        ("write: [", "wirte: [", "d.yaml:5: placement.wirte: unknown key; did you mean 'write'?"),
        # types of tiers
        ("type: disk", "type: dsk", "d.yaml:4: tiers.1.type: 'dsk' is no tier type; did you mean"),
        ("type: disk", "type: tape", "the types are broken, cpu, disk, striped"),
        ("type: disk", "type: 3", "d.yaml:4: tiers.1.type: 3 is no tier type"),
        ("type: disk, ", "", "d.yaml:4: tiers.1.type: is missing; the types are"),
        ("type: disk", "type: broken", "d.yaml:4: tiers.1.type: backend 'broken' cannot be loaded"),
        # names
        ("[host, ssd]", "[host, sdd]", "d.yaml:5: placement.write.1: there is no tier 'sdd'; did"),
        ("[host, ssd]", "[host, host]", "d.yaml:5: placement.write.1: tier 'host' is named twice"),
        ("name: ssd", "name: host", "d.yaml:4: tiers.1.name: tier 'host' is named twice"),
        ("name: ssd", "name: ../ssd", "d.yaml:4: tiers.1.name: String should match"),
        ("name: ssd", "name: gpu", "d.yaml:4: tiers.1.name: a tier of type disk cannot be named"),
        ("name: ssd", "name: 3", "d.yaml:4: tiers.1.name: should be a valid string, is 3"),
        ("name: ssd, ", "", "d.yaml:4: tiers.1.name: is missing: Name of the tier"),
        ("[host, ssd]", "host", "d.yaml:5: placement.write: should be a list, is 'host'"),
        (
            "path: /mnt/a",
            "path: /mnt/a, access: read",
            "placement.write.1: tier 'ssd' is read only",
        ),
        # units and values
        ("a, capacity: 1GiB", "a, capacity: 1G", "tiers.1.capacity: '1G' is ambiguous; write 1GiB"),
        (
            "a, capacity: 1GiB",
            "a, capacity: 1024",
            "tiers.1.capacity: '1024' has no unit; write 10",
        ),
        ("a, capacity: 1GiB", "a, capacity: 1GB/s", "capacity: '1GB/s' has the unknown unit"),
        (
            "a, capacity: 1GiB",
            "a, capacity: 0B",
            "tiers.1.capacity: should be greater than 0, is 0",
        ),
        ("a, capacity: 1GiB", "a, capacity: -1GiB", "tiers.1.capacity: '-1GiB' is negative"),
        (
            "a, capacity: 1GiB",
            "a, capacity: [1GiB]",
            "capacity: ['1GiB'] is not a size with a unit",
        ),
        ("drain: 5s", "drain: 5", "d.yaml:6: limits.drain: '5' has no unit; write 5s"),
        ("drain: 5s", "drain: 5m", "d.yaml:6: limits.drain: '5m' is ambiguous; write 5min or 5ms"),
        ("drain: 5s", "drain: 0s", "d.yaml:6: limits.drain: should be greater than 0"),
        ("drain: 5s", "drain: yes", "d.yaml:6: limits.drain: True is not a duration"),
        (
            "store: all",
            "store: answers",
            "d.yaml:1: store: should be 'prompt' or 'all', is 'answers",
        ),
        ("store: all", "chunk: 0", "d.yaml:1: chunk: 0 is not in 1 to 4096 engine blocks"),
        ("store: all", "chunk: big", "d.yaml:1: chunk: 'big' is neither auto nor a number"),
        ("store: all", "namespace: a/b", "d.yaml:1: namespace: String should match"),
        (
            "write: [host, ssd]",
            "admit: {min_uses: 0}",
            "placement.admit.min_uses: should be greater",
        ),
        (
            "path: /mnt/a",
            "path: /mnt/a, threads: 1.5",
            "tiers.1.threads: should be a valid integer",
        ),
        # directories
        ("path: /mnt/a", "path: mnt/a", "d.yaml:4: tiers.1.path: 'mnt/a' is not absolute"),
        ("path: /mnt/a", "path: $NOWHERE/a", "tiers.1.path: '$NOWHERE/a' names $NOWHERE, which is"),
        ("path: /mnt/a, ", "", "d.yaml:4: tiers.1.path: is missing: Directory of the tier."),
        # shapes
        ("drain: 5s", "drain: 5s, drain: 6s", "limits.drain: is given twice (first in line 6)"),
        ("limits: {drain: 5s}", "limits: 5s", "d.yaml:6: limits: should be a mapping, is '5s'"),
        ("store: all", "? [a]\n: b", "a key is a list or a mapping"),
        ("store: all", "store: &x all", ""),
        ("[host, ssd]", "&w [host, *w]", "anchors and aliases are not allowed"),
        ("store: all", "store: !!python/name:os.system x", "the YAML tag"),
    ],
)
def test_one_mistake(tmp_path: Path, old: str, new: str, problem: str) -> None:
    assert GOOD.count(old) == 1
    if not problem:  # an anchor that nothing refers to is harmless
        (tmp_path / "d.yaml").write_text(GOOD.replace(old, new))
        load(tmp_path / "d.yaml", FakeTypes(), {})
        return
    found = problems(tmp_path, GOOD.replace(old, new))
    assert [line for line in found if problem in line], found
    assert all(line.startswith("d.yaml:") for line in found)


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        (("/a", "/a"), "/a is also the directory of tier 't0'"),
        (("/a", "/a/../a/"), "is also the directory of tier 't0'"),
        (("/a", "/a/b"), "/a/b lies inside the directory of tier 't0' (/a)"),
        (("/a/b", "/a"), "/a contains the directory of tier 't0' (/a/b)"),
    ],
)
def test_two_tiers_on_one_directory(tmp_path: Path, paths: tuple[str, ...], said: str) -> None:
    tiers = [f"{{name: t{i}, type: disk, path: {path}}}" for i, path in enumerate(paths)]
    found = problems(tmp_path, f"tiers: [{', '.join(tiers)}]")
    assert len(found) == 1
    assert found[0].startswith("d.yaml:1: tiers.1.path: ")
    assert said in found[0]


def test_two_tiers_on_one_directory_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    text = "tiers:\n" + "".join(
        f"  - {{name: {name}, type: disk, path: {tmp_path / name}}}\n" for name in ("real", "link")
    )
    assert "is also the directory of tier 'real'" in problems(tmp_path, text)[0]


def test_a_striped_tier_on_the_directory_of_another(tmp_path: Path) -> None:
    text = (
        "tiers:\n  - {name: a, type: disk, path: /b}\n"
        "  - name: s\n    type: striped\n    paths:\n      - /a\n      - /b\n"
    )
    (problem,) = problems(tmp_path, text)
    assert problem.startswith("d.yaml:7: tiers.1.paths.1: /b is also the directory of tier 'a';")


def test_every_problem_is_listed_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = """\
stroe: all
tiers:
  - {name: host, type: cpu, capacity: 32G}
  - {name: ssd, type: dsk}
  - {name: a, type: disk, path: /x, capacity: 0B}
  - {name: b, type: disk, path: /x/y}
  - {name: b, type: disk, path: /x/y}
  - host
placement: {write: [host, nowhere]}
limits: {drain: 5}
limits: {}
"""
    error = refusal(tmp_path, text)
    lines = [int(line.split(":")[1]) for line in error.problems]
    assert lines == sorted(lines)
    assert set(lines) == {1, 3, 4, 5, 7, 8, 9, 10, 11}
    assert (error.file, error.line, error.key) == (tmp_path / "d.yaml", 1, "stroe")
    assert str(error) == "\n".join(error.problems)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "d.yaml:1: is empty"),
        (b"# nothing\n", "d.yaml:1: is empty"),
        (b"- a\n", "d.yaml:1: holds a list"),
        (b"just words", "d.yaml:1: holds a str"),
        (b"a: 1\nb: \xff\n", "d.yaml:2: is not UTF-8 text (byte 0xff)"),
        (b"a: [1\nb: 2\n", "d.yaml:2: is not valid YAML"),
        (b"a: b: c\n", "d.yaml:1: is not valid YAML"),
        (b"a: \x00", "d.yaml: is not valid YAML"),
        (b"--- {}\n--- {}\n", "d.yaml:2: is not valid YAML: expected a single document"),
        (b"[" * 2000, "d.yaml: is nested too deeply"),
        (b"#" * (2**20 + 1), "d.yaml: is longer than 1048576 bytes"),
        (b"{}", "d.yaml:1: tiers: is missing: The tiers, nearest to the engine first."),
        (b"tiers: []", "d.yaml:1: tiers: needs at least 1 entry"),
        (b"tiers: {a: b}", "d.yaml:1: tiers: should be a list"),
    ],
)
def test_files_that_are_no_deployment(tmp_path: Path, text: bytes, said: str) -> None:
    found = problems(tmp_path, text)
    assert len(found) == 1
    assert found[0].startswith(said)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path, said in (
        (tmp_path / "none.yaml", "there is no such file"),
        (tmp_path, "is a directory"),
        (tmp_path / ("x" * 300), "cannot be read: File name too long"),
        (Path("nul\0"), "is not a file name"),
    ):
        with pytest.raises(ConfigError, match=said):
            load(path, FakeTypes(), {})


def test_an_unknown_shipped_deployment() -> None:
    with pytest.raises(ConfigError, match="no shipped deployment is named 'dmeo'; there are"):
        shipped("dmeo")


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    error = refusal(tmp_path_factory.mktemp("random"), raw)
    assert error.problems


def test_mutilated_deployments_are_refused_or_loaded(tmp_path: Path) -> None:
    """No mutation ends in anything but a deployment or a `ConfigError`."""
    rng = random.Random(1)
    file = tmp_path / "d.yaml"
    refused = loaded = 0
    for _ in range(300):
        text = list(GOOD)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(text))
            match rng.randrange(3):
                case 0:
                    del text[at]
                case 1:
                    text.insert(at, rng.choice("{}[]:,#&*!|>-?%@`'\"\n\t 0aG\u00e9"))
                case _:
                    other = rng.randrange(len(text))
                    text[at], text[other] = text[other], text[at]
        file.write_text("".join(text), encoding="utf-8")
        try:
            load(file, FakeTypes(), {})
        except ConfigError:
            refused += 1
        else:
            loaded += 1
    print(f"refused {refused}, loaded {loaded}")
    assert refused > 100
    assert refused + loaded == 300
