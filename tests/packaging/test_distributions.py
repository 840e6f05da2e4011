from __future__ import annotations

import email
import email.message
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

_NOT_SOURCE = {"__pycache__", ".mypy_cache", ".ruff_cache"}


@pytest.fixture(scope="module")
def wheel(distributions: Path) -> Iterator[zipfile.ZipFile]:
    [path] = distributions.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> email.message.Message:
    [name] = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(wheel.read(name))


def _files(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and not _NOT_SOURCE & set(path.parts)
    }


def _backends(source: Path) -> set[str]:
    return {path.name for path in (source / "backends").iterdir() if path.is_dir()}


def test_wheel_holds_the_packages_and_the_configs_and_nothing_else(
    wheel: zipfile.ZipFile, source: Path
) -> None:
    expected = {f"tiered_kv/{name}" for name in _files(source / "tiered_kv")}
    expected |= {f"tiered_kv/configs/{name}" for name in _files(source / "configs")}
    expected |= _files(source / "backends")
    found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert found == expected


def test_every_package_is_typed(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    packages = {name.split("/")[0] for name in names if not name.startswith("tiered_kv-")}
    assert not [package for package in packages if f"{package}/py.typed" not in names]


def test_each_backend_folder_has_its_entry_point(source: Path, project: dict[str, Any]) -> None:
    targets = project["project"]["entry-points"]["tiered_kv.backends"].values()
    assert {target.partition(":")[0] for target in targets} == _backends(source)


def test_import_rules_cover_every_backend(source: Path, project: dict[str, Any]) -> None:
    roots = set(project["tool"]["importlinter"]["root_packages"])
    assert roots == {"tiered_kv"} | _backends(source)


def test_sdist_is_an_allow_list(distributions: Path, source: Path) -> None:
    [path] = distributions.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tops = {name.partition("/")[0] for name in names}
    allowed = {
        "tiered_kv", "backends", "configs", "docs", "tests", ".ci", ".github", ".gitignore",
        "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "pyproject.toml", "PKG-INFO",
    }  # fmt: skip
    assert tops <= allowed
    assert {"LICENSE", ".ci/lock-engine.txt", ".ci/lock-gates.txt", "tests/run"} <= names
    assert {f"backends/{name}" for name in _files(source / "backends")} <= names


def test_metadata(metadata: email.message.Message, project: dict[str, Any]) -> None:
    assert metadata["Name"] == "tiered-kv"
    assert metadata["Version"] == project["project"]["version"]
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]


@pytest.mark.usefixtures("distributions")
def test_installed_entry_points_load_without_any_driver() -> None:
    code = """
import sys
from importlib.metadata import entry_points
for entry in entry_points(group="tiered_kv.backends"):
    entry.load()
print(*sorted({"torch", "lmdb", "kvikio", "aiofiles", "vllm"} & set(sys.modules)))
"""
    names = {entry.name for entry in entry_points(group="tiered_kv.backends")}
    assert {"gpu", "nvme", "lmdb"} <= names
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == []


@pytest.mark.usefixtures("distributions")
def test_console_script_shows_its_help_without_the_engine(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("tiered-kv")
    (tmp_path / "vllm.py").write_text("raise ImportError('the engine was imported')")
    done = subprocess.run(
        [script, "--help"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert "demo" in done.stdout


def test_ignored_files_are_none_of_the_packages(source: Path) -> None:
    # A build leaves out what git ignores, without a word.
    if not (source / ".git").exists():
        pytest.skip("not a git checkout")
    folders = ("tiered_kv", "backends", "configs")
    names = [f"{folder}/{name}" for folder in folders for name in _files(source / folder)]
    done = subprocess.run(
        ["git", "-C", str(source), "check-ignore", "--no-index", "--stdin"],
        input="\n".join(names),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == []
    assert done.returncode == 1, done.stderr
