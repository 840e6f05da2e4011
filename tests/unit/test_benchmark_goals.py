"""The arithmetic of the benchmarks' goals, and the command that judges them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks.goal import ROWS, Goal, Kind, goal_of
from tests.benchmarks.goals import PRINTED, Line, judge, main, read_figures, rows_of
from tests.benchmarks.harness import MIB, Batch, Timing, ratio


@pytest.mark.parametrize(
    ("goal", "floor"),
    [
        (Goal(6), 3.5),
        (Goal(1.2), 1.1),
        (Goal(1.0), 1.0),
        (Goal(0.9, Kind.SHARE), 0.8),
        (Goal(0.95, Kind.SHARE), 0.9),
        (Goal(1.5, Kind.NEAR), 2.0),
        (Goal(1.02, Kind.NEAR), 1.04),
        (Goal(0.5, Kind.AMOUNT), 1.0),
    ],
)
def test_floors(goal: Goal, floor: float) -> None:
    assert goal.floor == pytest.approx(floor)


@pytest.mark.parametrize(
    ("goal", "value", "met", "kept"),
    [
        (Goal(6), 6.0, True, True),
        (Goal(6), 5.9, False, True),
        (Goal(6), 3.4, False, False),
        (Goal(0.9, Kind.SHARE), 0.91, True, True),
        (Goal(0.9, Kind.SHARE), 0.85, False, True),
        (Goal(0.9, Kind.SHARE), 0.79, False, False),
        (Goal(1.5, Kind.NEAR), 1.5, True, True),
        (Goal(1.5, Kind.NEAR), 1.9, False, True),
        (Goal(1.5, Kind.NEAR), 2.1, False, False),
        (Goal(3, Kind.AMOUNT), -0.2, True, True),
        (Goal(3, Kind.AMOUNT), 7.0, False, False),
    ],
)
def test_goals_and_floors_are_judged(goal: Goal, value: float, met: bool, kept: bool) -> None:
    assert (goal.met(value), goal.kept(value)) == (met, kept)


@pytest.mark.parametrize(
    ("value", "kind"),
    [(0.9, Kind.AHEAD), (1.1, Kind.SHARE), (0.5, Kind.SHARE), (0.9, Kind.NEAR), (0, Kind.AMOUNT)],
)
def test_goals_that_make_no_sense(value: float, kind: Kind) -> None:
    with pytest.raises(ValueError, match="is no goal of the kind"):
        Goal(value, kind)


def test_a_floor_is_never_beyond_its_goal() -> None:
    goals = [goal for row in ROWS for goal in row.goals.values()]
    assert len(goals) > len(ROWS) > 15
    assert all(goal.kept(goal.value) and goal.met(goal.value) for goal in goals)


def test_names_of_rows() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert goal_of("nvme.store", "64 KiB") == Goal(6)
    assert goal_of("nvme.store", "32 KiB") is None
    with pytest.raises(ValueError, match="there is no row"):
        goal_of("nvme.stores")


def _timing(seconds: float, fastest: float, processor_us: float) -> Timing:
    return Timing(1.0, 1.0, seconds, fastest, seconds, processor_us, 0.1)


def test_ratios_are_of_medians_of_time_or_of_processor_time() -> None:
    timings = {"ours": _timing(1.0, 0.5, 10.0), "theirs": _timing(6.0, 4.0, 50.0)}
    at = Batch(64 * 1024, 512).size
    wall = ratio(timings, "ours", "theirs", row="nvme.store", at=at)
    assert (wall.value, wall.best, wall.floor, wall.met) == (6.0, 8.0, 3.5, True)
    used = ratio(timings, "ours", "theirs", row="nvme.processor", at=at, processor=True)
    assert (used.value, used.best, used.floor, used.met) == (5.0, None, 5.5, False)
    none = ratio(timings, "ours", "theirs", missing="no fio", row="nvme.store", at=at)
    assert (none.value, none.met) == (None, None)


def test_sizes_are_named_as_the_goals_name_them() -> None:
    assert [Batch(size, 1).size for size in (65536, 262144, MIB, 4 * MIB)] == [
        *("64 KiB", "256 KiB"),
        *("1 MiB", "4 MiB"),
    ]


def _figures(folder: Path, share: float) -> None:
    """Every goal reached to this share of the way from its floor."""
    for benchmark in {row.benchmark for row in ROWS}:
        figures = [
            {"row": row.name, "at": at, "value": goal.floor + share * (goal.value - goal.floor)}
            for row in ROWS
            if row.benchmark == benchmark
            for at, goal in row.goals.items()
        ]
        (folder / f"{benchmark}.json").write_text(json.dumps({"figures": figures}))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _figures(tmp_path, 1.001)
    use = ["--use", str(tmp_path)]
    assert main(use) == 0
    count = sum(len(row.goals) for row in ROWS)
    assert f"{count} of {count} goals met" in capsys.readouterr().out
    assert main([*use, "--floors"]) == 0
    _figures(tmp_path, 0.5)
    assert main(use) == 0
    at_once = [line for line in judge(read_figures(tmp_path.iterdir())) if line.met]
    assert {line.goal.value for line in at_once} == {1.0}, "where goal and floor are the same"
    assert main([*use, "--floors"]) == 0
    _figures(tmp_path, -0.5)
    assert main([*use, "--floors", "--only", "nvme_store"]) == 1
    assert "NO\n" in capsys.readouterr().out


def test_what_was_not_measured_is_not_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _figures(tmp_path, 2.0)
    (tmp_path / "seam.json").unlink()
    use = ["--use", str(tmp_path), "--floors"]
    assert main([*use, "--only", "nvme_store"]) == 0
    assert main(use) == 1
    assert capsys.readouterr().out.count("NOT MEASURED") == 2


def test_figures_of_no_row_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text(json.dumps({"figures": [{"row": "nvme.stores", "at": "", "value": 1}]}))
    with pytest.raises(ValueError, match=r"nvme\.stores"):
        read_figures([file])


def test_a_line_without_a_figure() -> None:
    line = Line(ROWS[0], "64 KiB", Goal(6), None)
    assert not line.met
    assert not line.kept


def test_figures_that_a_benchmark_prints() -> None:
    names = PRINTED["lookups"]
    assert set(names.values()) <= {row.name for row in ROWS}
    told = [{"name": "first time", "value": 0.4}, {"name": "whole call", "value": 9.0}]
    rows = rows_of(json.dumps({"figures": told}), names)
    assert rows == [{"row": "lookup.first", "at": "", "value": 0.4, "best": None}]
