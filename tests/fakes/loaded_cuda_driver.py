"""Importing this loads the fake CUDA driver, once per process; also a plug-in of pytest (`-p`)."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tests.fakes.cuda_driver import FakeCudaDriver

FOLDER = "FAKE_CUDA_FOLDER"
"""Environment variable: a folder for the driver's file."""

driver = FakeCudaDriver(Path(tempfile.mkdtemp(dir=os.environ[FOLDER])))
