"""A warm-up that is killed half way goes on where it was, and what it stored serves elsewhere: sent
as a file, as a copy of the directory that is only read, and as blocks from store to store."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.engine.actions import Generate, ReadMetrics, Settle
from tests.engine.commands import COMMAND, run_command
from tests.engine.harness import EngineRunner
from tests.engine.lives import WARM_ENGINE
from tests.engine.processes import environment
from tests.engine.tiers import cached, cpu, deployment, hint, loaded_bytes, nvme, options, prompt

pytestmark = pytest.mark.engine

PROMPTS = tuple(prompt(seed) for seed in range(40, 52))
"""1,000 tokens each, 992 of them in whole blocks; none shares one with another."""

HALF = 6
HELD = 992


class Machine:
    """A directory with deployments and stores, and the command line."""

    def __init__(self, folder: Path, model: Path, cache: Path) -> None:
        self.folder = folder
        self.model = model
        self.cache = cache
        self.config = deployment(folder, [cpu(), nvme(folder)])
        self.prompts = folder / "prompts.jsonl"
        lines = [json.dumps({"token_ids": list(ids)}) for ids in PROMPTS]
        self.prompts.write_text("".join(f"{line}\n" for line in lines))

    @property
    def warm(self) -> tuple[str, ...]:
        """The command that warms the tier `ssd`, prompt by prompt."""
        return (
            *("warm", str(self.prompts), "--config", str(self.config), "--tier", "ssd"),
            *("--model", str(self.model), *WARM_ENGINE, "--batch", "1", "--json"),
        )

    def run(self, *arguments: str) -> Any:
        """What a command prints."""
        done = run_command(*arguments, scratch=self.folder, cache=self.cache, multiprocess=False)
        assert done.status == 0, done.stderr
        return json.loads(done.stdout)

    def warm_up_until_killed(self) -> None:
        """Kill the command and its engine when half of the prompts are said to be stored."""
        with subprocess.Popen(
            [*COMMAND, *self.warm],
            cwd=self.folder,
            env=environment(self.cache, multiprocess=False),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as command:
            assert command.stderr is not None
            for line in command.stderr:
                if f"{HALF} of {len(PROMPTS)} prompts stored" in line:
                    break
            children = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text()
            [engine] = map(int, children.split())
            command.kill()
            os.killpg(engine, signal.SIGKILL)
            assert command.wait(60) == -signal.SIGKILL


def test_a_killed_warm_up_goes_on_and_its_store_serves_elsewhere(
    tiny_model: Path, engine_cache: Path, tmp_path: Path, run_engine: EngineRunner
) -> None:
    machine = Machine(tmp_path, tiny_model, engine_cache)
    machine.warm_up_until_killed()
    report = machine.run(*machine.warm, "--keep", "1h")
    total = HELD * len(PROMPTS)
    print(
        f"of {total} tokens {report['present_tokens']} were there after the kill, "
        f"{report['computed_tokens']} were computed then"
    )
    assert (report["complete"], report["hit"]) == (True, True)
    assert report["block_tokens"] == report["tiers"]["ssd"]["held_tokens"] == total
    assert report["tiers"]["ssd"]["kept_blocks"] == total // 32
    # What was said to be stored was; a prompt that was under way may be there in part.
    assert HALF * HELD <= report["present_tokens"] < total
    left = total - report["present_tokens"]
    assert left <= report["computed_tokens"] <= left + 8 * len(PROMPTS)

    # To another host: as a file, as blocks from store to store, and as a copy of the directory.
    [namespace] = machine.run("ls", str(machine.config), "--json")["tiers"][0]["namespaces"]
    name = namespace["namespace"]
    elsewhere = [
        {"name": "imported", "type": "lmdb", "path": str(tmp_path / "i"), "capacity": "64MiB"},
        {"name": "copied", "type": "nvme", "path": str(tmp_path / "c"), "capacity": "256MiB"},
        {"name": "shipped", "type": "nvme", "path": str(tmp_path / "s"), "access": "read"},
    ]
    other = deployment(tmp_path, elsewhere)
    file = str(tmp_path / "warm.archive")
    machine.run(
        *("export", str(machine.config), file, "--tier", "ssd", "--namespace", name, "--json")
    )
    imported = machine.run("import", str(other), file, "--tier", "imported", "--json")
    copied = machine.run(
        *("warm", "--from", f"{machine.config}:ssd", "--config", str(other)),
        *("--tier", "copied", "--json"),
    )["tiers"]["copied"]
    subprocess.run(["cp", "-a", str(tmp_path / "ssd"), str(tmp_path / "s")], check=True)
    print("imported:", imported, "copied:", copied)
    assert imported["parts"] == copied["blocks"] == total // 32

    asked = {"imported": PROMPTS[0], "copied": PROMPTS[1], "shipped": PROMPTS[2]}
    run = run_engine(
        options(tiny_model, other),
        *(Settle(), ReadMetrics("0")),
        # The first request of this engine.
        Generate((PROMPTS[-1],), max_tokens=2, name="first"),
        *(
            action
            for tier, ids in asked.items()
            for action in (
                Settle(),
                ReadMetrics(f"before {tier}"),
                Generate((ids,), max_tokens=2, kv_transfer_params=hint(tier), name=tier),
                Settle(),
                ReadMetrics(f"after {tier}"),
            )
        ),
    )
    assert cached(run.answers["first"]) == [HELD]
    for tier in asked:
        moved = loaded_bytes(run.at[f"before {tier}"], run.at[f"after {tier}"], tier)
        print(f"{tier}: {cached(run.answers[tier])} tokens, {moved:.0f} bytes loaded")
        assert cached(run.answers[tier]) == [HELD]
        assert moved == HELD * 1024
