"""The command; see the package."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from tests.benchmarks.harness import workspace
from tests.benchmarks.serving import exits, hung, killed, overhead, throttled
from tests.benchmarks.serving.figures import Figure, show

SUBJECTS: Mapping[str, Callable[[Path, argparse.Namespace], list[Figure]]] = {
    "overhead": overhead.run,
    "throttled": throttled.run,
    "hung": hung.run,
    "exits": exits.run,
    "killed": killed.run,
}


def main() -> int:
    """Run the subjects that were asked for; 1 where a limit was not kept."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.serving", description="Tiers beside a real vLLM server."
    )
    parser.add_argument("subject", nargs="*", choices=[*SUBJECTS, []], help="default: all")
    parser.add_argument("--path", type=Path, help="directory on the disk (default: temporary)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of `overhead` (5)")
    parser.add_argument("--requests", type=int, default=200, help="prompts of `overhead` (200)")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    parsed = parser.parse_args()
    # Servers and disks are cleared away when it is terminated, too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    figures: list[Figure] = []
    for subject in parsed.subject or SUBJECTS:
        with workspace(parsed.path) as directory:
            found = SUBJECTS[subject](directory, parsed)
        show(subject, found)
        figures += found
    if parsed.json:
        parsed.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=2) + "\n")
    return 1 if any(figure.kept is False for figure in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
