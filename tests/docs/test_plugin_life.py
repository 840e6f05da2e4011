"""The plug-in of the documentation under the simulated engine, as its page shows it."""

from __future__ import annotations

import runpy
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest

import tiered_kv.plugins
from tests.docs.pages import fenced, page
from tiered_kv.placement import Replay, ReplayTier, TracedRequest
from tiered_kv.plugins import GROUP
from tiered_kv.testing.faults import Effect


def test_the_life_in_the_plugins_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "shelf_tier.py").write_text(fenced("plugins.md", "python")[0])
    metadata = tmp_path / "shelf-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\nshelf = shelf_tier:backend\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert EntryPoint("shelf", "shelf_tier:backend", GROUP) in entry_points(group=GROUP)
    assert tiered_kv.plugins.Plugins().get("shelf").name == "shelf"
    [tiers] = [text for text in fenced("plugins.md", "yaml") if "shelf" in text]
    small = tiers.replace("1GiB", "128KiB", 1).replace("/tmp/shelf", str(tmp_path / "blocks"))
    (tmp_path / "deployment.yaml").write_text(small)
    monkeypatch.chdir(tmp_path)
    life, with_faults = [code for code in fenced("plugins.md", "py") if "Simulation(" in code]
    (tmp_path / "life.py").write_text(life)
    runpy.run_path(str(tmp_path / "life.py"))
    said = capsys.readouterr().out
    print(said)
    assert "loaded_blocks: host" in said
    (tmp_path / "with_faults.py").write_text(with_faults)
    runpy.run_path(str(tmp_path / "with_faults.py"))
    said = capsys.readouterr().out
    print(said)
    assert "failed_blocks: corrupt" in said


def test_the_policy_in_the_plugins_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [code] = [code for code in fenced("plugins.md", "py") if "Policy(" in code]
    (tmp_path / "fifo_policy.py").write_text(code)
    metadata = tmp_path / "fifo-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: fifo\nVersion: 1.0\n")
    [entry] = fenced("plugins.md", "toml")[-1:]
    section = entry.replace('project.entry-points."tiered_kv.policies"', "tiered_kv.policies")
    (metadata / "entry_points.txt").write_text(section.replace('"', ""))
    monkeypatch.syspath_prepend(tmp_path)
    replay = Replay([ReplayTier("host", 3, "fifo")], block_tokens=8)
    for keys in ((1, 2), (1, 3)):
        replay.request(TracedRequest(0.0, keys, 16, 0))
    assert replay.request(TracedRequest(0.0, (1, 2), 16, 0)) == {"host": 16}
    assert replay.request(TracedRequest(0.0, (4, 5), 16, 0)) == {"host": 0}
    assert replay.request(TracedRequest(0.0, (1,), 8, 0)) == {"host": 8}, "3 needed it"


def test_the_plugins_page_names_every_effect() -> None:
    text = page("plugins.md")
    assert [effect.name for effect in Effect if f"`{effect.name}`" not in text] == []
