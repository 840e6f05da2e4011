"""The I/O engine `kvikio` for host memory, and which mode is in effect: real KvikIO, no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.kvikio_process import run_scenario
from tiered_kv_nvme.faults import of_kvikio, translate
from tiered_kv_nvme.groups import EndOfFile

MODULE = "tests.stores.kvikio_host"


@pytest.mark.parametrize("name", ["sizes", "huge", "joined", "headers", "truncated", "close"])
def test_host_memory(name: str, tmp_path: Path) -> None:
    run_scenario(MODULE, name, tmp_path)


@pytest.mark.faults
@pytest.mark.parametrize("name", ["no_kvikio", "no_libcufile", "no_nvidia_fs", "no_answer"])
def test_what_is_missing_is_said_and_nothing_hangs(name: str, tmp_path: Path) -> None:
    run_scenario(MODULE, name, tmp_path)


@pytest.mark.faults
def test_a_missing_driver_is_found_before_kvikio_is_asked(tmp_path: Path) -> None:
    run_scenario(MODULE, "no_libcuda", tmp_path, driver=False)


@pytest.mark.parametrize("name", ["refused_by_cufile", "everything_there"])
def test_gds_is_switched_on_only_where_cufile_came_up(name: str, tmp_path: Path) -> None:
    run_scenario(MODULE, name, tmp_path)


@pytest.mark.parametrize(
    ("said", "number", "shown"),
    [
        ("KvikIO failure at: a.cpp:1: POSIX error on pread: Input/output error", 5, "failing"),
        ("POSIX error: No space left on device", 28, "free some space"),
        ("cuFile error: GPU memory is gone", 0, "KvikIO: cuFile error: GPU memory is gone"),
    ],
)
def test_errors_of_kvikio_are_translated(said: str, number: int, shown: str) -> None:
    error = of_kvikio(RuntimeError(said))
    assert error.errno == number
    assert not isinstance(error, EndOfFile)
    assert shown in str(translate(error, "read", Path("/kv/segment-000001"), "ssd"))


def test_the_end_of_a_file_is_told_from_errors() -> None:
    assert isinstance(
        of_kvikio(RuntimeError("KvikIO failure at: x:1: POSIX error: EOF")), EndOfFile
    )
