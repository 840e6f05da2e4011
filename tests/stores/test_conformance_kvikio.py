"""nvme with `io: kvikio`, and gpu <-> nvme: real KvikIO under a fake CUDA driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.kvikio_process import cufile_environment
from tiered_kv.testing.conformance.runs import run_instance


@pytest.mark.timeout(400)  # a suite as a whole, in a child process
@pytest.mark.parametrize("instance", ["TestKvikioStore", "TestGpuToNvme", "TestNvmeToGpu"])
def test_kvikio_keeps_the_contracts(instance: str, tmp_path: Path) -> None:
    run = run_instance(
        Path(__file__).with_name("kvikio_instances.py"),
        tmp_path,
        checks=[instance],
        environment=cufile_environment() | {"FAKE_CUDA_FOLDER": str(tmp_path)},
        plugins=["tests.fakes.loaded_cuda_driver"],
    )
    failed = [one for one in run.outcomes if one.outcome == "failed"]
    print(f"{instance}: {run.passed} checks passed, {run.skipped} skipped")
    assert not failed, failed
    assert run.passed > 20
