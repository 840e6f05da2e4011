"""A sqlite tier under the commands that have no engine, in one process: `looked_after.py CONFIG`.

Run with the package installed, in the directory that holds the tier.
"""

from __future__ import annotations

import contextlib
import io
import json
import sqlite3
import sys
from pathlib import Path
from typing import Any

from tiered_kv.cli import main
from tiered_kv.config import load
from tiered_kv.connector.assembly import Assembly
from tiered_kv.contracts import BlockStore
from tiered_kv.plugins import Plugins
from tiered_kv.testing.conformance.blocks import NAMESPACE, StoreArguments, put

CONFIG = sys.argv[1]


def told(command: str, *more: str, status: int = 0) -> Any:
    """What a command says of the tier."""
    sys.argv = ["tiered-kv", command, CONFIG, *more, "--json"]
    code, said = 0, io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            main()
    except SystemExit as end:
        code = int(end.code or 0)
    assert code == status, (command, code)
    answer = json.loads(said.getvalue())
    return answer.get("tiers", [answer])[0]


def opened(rank: int) -> BlockStore:
    """A rank's store, with blocks in it."""
    assembly = Assembly(load(Path(CONFIG), Plugins()), Plugins().deployed(["sqlite"]))
    geometry = StoreArguments(Path(), rank=rank, world_size=2).geometry
    store = assembly.open_namespace("rows", geometry, NAMESPACE, writable=True)
    put(store, range(6), rank)
    return store


stores = [opened(rank) for rank in range(2)]
[held] = told("ls")["namespaces"]
assert (held["blocks"], held["ranks"], held["in_use"]) == (6, 2, True)
assert told("gc", "--unused", "--yes")["dropped_blocks"] == {}
for one in stores:
    one.close()
[held] = told("ls")["namespaces"]
assert (held["blocks"], held["in_use"]) == (6, False)
assert told("stat")["modes"]["io"] == "sqlite"
reads = told("verify")["read"]
assert [(read["rank"], read["blocks"], read["corrupt"]) for read in reads] == [(0, 6, 0), (1, 6, 0)]
which = ("--tier", "rows", "--namespace", held["namespace"][:4])
assert told("export", "archive", *which)["blocks"] == 6
with sqlite3.connect(Path("rows", "blocks.sqlite")) as database:
    database.execute("UPDATE bytes SET data = zeroblob(LENGTH(data)) WHERE id = 1")
    database.execute("DELETE FROM bytes WHERE id = 2")
database.close()
found = told("verify", status=1)
assert found["structure"]["found"] == {"rows without bytes": 1}
assert found["left"] == {"rows without bytes": 1, "corrupt blocks": 1, "missing blocks": 1}
assert told("verify", "--repair")["left"] == {}
assert told("ls")["namespaces"][0]["blocks"] == 4
assert told("import", "archive", "--tier", "rows")["parts"] == 3
assert told("ls")["namespaces"][0]["blocks"] == 6
assert told("gc", "--unused", "--yes")["dropped_blocks"] == {held["namespace"]: 6}
assert told("ls")["namespaces"] == []
print("6 blocks were looked after")
