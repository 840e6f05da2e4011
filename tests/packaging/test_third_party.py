"""A third party's package, installed from its wheel, is as good as ours."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.third_party import wheel


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel.installed(tmp_path_factory.mktemp("third-party"))


def tiered_kv(*arguments: str, site: Path, status: int = 0) -> Any:
    done = subprocess.run(
        [sys.executable, "-P", "-c", "from tiered_kv.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=os.environ | {"PYTHONPATH": str(site)},
    )
    assert done.returncode == status, done.stdout + done.stderr
    return json.loads(done.stdout)


def config(folder: Path) -> Path:
    file = folder / "tiers.yaml"
    tier = f"{{name: rows, type: sqlite, path: {folder / 'rows'}, capacity: 64MiB}}"
    file.write_text(f"tiers:\n  - {{name: host, type: cpu, capacity: 16MiB}}\n  - {tier}\n")
    return file


def test_it_is_listed_with_its_distribution(site: Path) -> None:
    lines = {line["name"]: line for line in tiered_kv("backends", "--json", site=site)["backends"]}
    line = lines["sqlite"]
    assert (line["distribution"], line["version"]) == ("sqlite-tier", "1.0")
    assert (line["available"], line["tier"], line["medium"]) == (True, True, "sqlite")
    assert {"gpu", "nvme", "lmdb"} <= {name for name, line in lines.items() if line["available"]}


def test_check_stores_and_loads_through_it(site: Path, tmp_path: Path) -> None:
    report = tiered_kv("check", str(config(tmp_path)), "--json", site=site)
    print(json.dumps(report, indent=1))
    assert "sqlite" in json.dumps(report)
    assert (tmp_path / "rows" / "blocks.sqlite").stat().st_mode & 0o777 == 0o600


def test_explain_shows_its_own_way_beside_the_one_through_the_host(
    site: Path, tmp_path: Path
) -> None:
    text = json.dumps(tiered_kv("explain", str(config(tmp_path)), "--json", site=site))
    assert "rows->gpu" in text
    assert "rows->cpu->gpu" in text


def test_its_blocks_can_be_looked_after(site: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", str(wheel.SOURCE / "looked_after.py"), str(config(tmp_path))],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=os.environ | {"PYTHONPATH": str(site)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("6 blocks were looked after\n")


def test_the_core_does_not_name_it(source: Path) -> None:
    files = [
        path
        for folder in ("tiered_kv", "backends", "configs")
        for path in (source / folder).rglob("*")
        if path.suffix in {".py", ".yaml"}
    ]
    assert len(files) > 80
    assert not [path for path in files if "sqlite" in path.read_text().lower()]


def test_it_keeps_the_contracts(site: Path, tmp_path: Path) -> None:
    arguments = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, f"--basetemp={tmp_path}/tests"]
    done = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-m", "pytest", *arguments, "conformance.py"],
        cwd=wheel.SOURCE,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env=os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{wheel.SOURCE}"},
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^[4-9]\d passed", done.stdout.splitlines()[-1])
