"""The documented developer set-up: an editable install sees the tree, and nothing but the tree."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

_REPORT = """
import importlib, json
from importlib.metadata import entry_points
import tiered_kv
from tiered_kv.config import shipped

backends = {e.name: e for e in entry_points(group="tiered_kv.backends")}
for entry in backends.values():
    entry.load()
print(json.dumps({
    "core": tiered_kv.__file__,
    "version": tiered_kv.__version__,
    "backends": {n: importlib.import_module(e.module).__file__ for n, e in backends.items()},
    "plugins": [e.name for e in entry_points(group="vllm.general_plugins")],
}))
"""


def _editable_venv(folder: Path, source: Path) -> Path:
    """Python of a new environment that sees this one's packages, but its own tiered-kv."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60
    )
    python = folder / "bin" / "python"
    [site_packages] = folder.glob("lib/python3*/site-packages")
    outer = sysconfig.get_path("purelib")
    (site_packages / "zz_outer.pth").write_text(f"import site; site.addsitedir({outer!r})\n")
    install = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--editable", str(source)]
    command = [sys.executable, "-m", "pip", "--python", str(python), *install]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return python


def test_editable_install_finds_core_backends_and_plugin(
    tmp_path: Path, source: Path, project: dict[str, Any]
) -> None:
    python = _editable_venv(tmp_path / "venv", source)
    done = subprocess.run(
        [python, "-P", "-c", _REPORT],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
        env={},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert Path(report["core"]).parent == source / "tiered_kv"
    assert report["version"] == project["project"]["version"]
    folders = {Path(file).parent.parent for file in report["backends"].values()}
    assert folders == {source / "backends"}
    assert "tiered_kv" in report["plugins"]
