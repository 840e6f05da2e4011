"""Found by every Python that is started with this folder in its path: loads the fake CUDA driver,
so that it is there before anything else, and tells at the end how often it was called."""

from __future__ import annotations

import atexit
import json
import os
import tempfile
from pathlib import Path

from tests.fakes.cuda_driver import FakeCudaDriver

folder = Path(tempfile.mkdtemp(dir=os.environ["FAKE_CUDA_DRIVER"]))
driver = FakeCudaDriver(folder)


@atexit.register
def tell() -> None:
    (folder / "calls.json").write_text(json.dumps(driver.calls()))
