"""ls, stat, verify, gc, export and import on real tiers, beside a live writer too."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import Cli, Ran
from tests.faults.namespaces import unshared
from tests.stores.upkeep_children import reserve_and_stay, write_until_told
from tests.stores.upkeep_tiers import OPENERS, RANKS, Tiers
from tiered_kv.testing.conformance.blocks import (
    BLOCK_BYTES,
    NAMESPACE,
    OTHER_NAMESPACE,
    assert_held,
    keys,
    put,
)
from tiered_kv.testing.conformance.children import start

KINDS = ("nvme", "lmdb")
ONE, TWO = NAMESPACE.id.hex(), OTHER_NAMESPACE.id.hex()


@pytest.fixture(params=KINDS)
def tiers(request: pytest.FixtureRequest, tmp_path: Path) -> Tiers:
    return Tiers(request.param, tmp_path)


def only(ran: Ran, code: int = 0) -> Any:
    """What is said of the first tier."""
    assert ran.code == code, ran.err
    return ran.json["tiers"][0]


def test_what_reads_serves_for_what_was_shipped_read_only(cli: Cli, tiers: Tiers) -> None:
    tiers.fill("a", range(8))
    tiers.fill("a", range(3), other=True)
    for config in (tiers.config, tiers.read_only):
        held = {one["namespace"]: one for one in only(cli("ls", config, "--json"))["namespaces"]}
        assert list(held) == sorted([ONE, TWO])
        assert (held[ONE]["blocks"], held[TWO]["blocks"]) == (8, 3)
        assert held[ONE]["used_bytes"] == 8 * RANKS * BLOCK_BYTES
        assert held[ONE]["telling"] == ["model"]
        assert not held[ONE]["in_use"]
        listed = cli("ls", config, "--tier", "a", "--namespace", ONE[:5]).out.split()
        assert sorted(listed) == sorted(one.hex() for one in keys(range(8)))
        told = only(cli("stat", config, "--json"))
        assert told["blocks"] == 11
        assert 11 * RANKS * BLOCK_BYTES <= told["used_bytes"] <= told["capacity_bytes"]
        assert told["modes"]
        assert [d["field"] for d in told["alike"][0]["differences"]] == ["model"]
        read = only(cli("verify", config, "--tier", "a", "--json"))["read"]
        assert {(one["namespace"], one["rank"], one["blocks"]) for one in read} == {
            *((ONE, rank, 8) for rank in range(RANKS)),
            *((TWO, rank, 3) for rank in range(RANKS)),
        }
    name = tiers.folder / "out"
    ran = cli("export", tiers.read_only, name, "--tier", "a", "--namespace", ONE)
    assert ran.code == 0, ran.err
    for refused in (
        cli("verify", tiers.read_only, "--tier", "a", "--repair"),
        cli("gc", tiers.read_only, "--tier", "a", "--unused", "--yes"),
        cli("import", tiers.read_only, name, "--tier", "a"),
    ):
        assert (refused.code, refused.out) == (2, "")
        assert "tier 'a' is read only (access: read)" in refused.err


IN_ONE_PROCESS = """
import json, sys
from tiered_kv.cli import main

codes = []
for command in json.loads(sys.argv[1]):
    sys.argv = ["tiered-kv", *command]
    try:
        main()
    except SystemExit as end:
        codes.append(end.code)
print(json.dumps(codes), file=sys.stderr)
"""


def run_all(before: list[str], *commands: list[str | Path]) -> tuple[list[int], str, str]:
    """Run commands after each other in one process, begun by these words; their exit codes, and
    what they printed."""
    given = json.dumps([[str(word) for word in command] for command in commands])
    ran = subprocess.run(
        [*before, sys.executable, "-c", IN_ONE_PROCESS, given],
        check=False,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    *said, codes = ran.stderr.splitlines()
    return json.loads(codes), ran.stdout, "\n".join(said)


def test_what_reads_serves_on_a_read_only_mount(tiers: Tiers) -> None:
    """The configuration says that it may be written."""
    tiers.fill("a", range(8))
    mounted = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
    codes, out, said = run_all(
        [*unshared(), "sh", "-c", mounted, str(tiers.folder / "a")],
        ["ls", tiers.config],
        ["stat", tiers.config],
        ["verify", tiers.config],
        ["gc", tiers.config, "--dry-run"],
        ["export", tiers.config, tiers.folder / "out", "--tier", "a", "--namespace", ONE],
        ["gc", tiers.config, "--tier", "a", "--unused", "--yes"],
    )
    assert codes == [0, 0, 0, 0, 0, 1], said
    assert f"8 blocks of {RANKS} ranks" in out
    assert said.count("Read-only file system") == 1


def test_a_closed_stdout_is_like_dev_null(cli: Cli, tiers: Tiers) -> None:
    """And nothing that is printed gets into a file of the tier that has its number."""
    tiers.fill("a", range(8))
    closed = ["sh", "-c", 'exec "$0" "$@" >&-']
    export: list[str | Path] = ["export", tiers.config, "-", "--tier", "a", "--namespace", ONE]
    for commands in ([["ls", tiers.config], export], [export]):
        codes, _, said = run_all(closed, *commands)
        assert codes == [0] * len(commands), said
        assert f"8 blocks of {RANKS} ranks" in said
    read = only(cli("verify", tiers.config, "--tier", "a", "--json"))["read"]
    assert [one["blocks"] for one in read] == [8] * RANKS


def test_what_reads_drops_nothing_that_a_lower_capacity_has_no_room_for(
    cli: Cli, tiers: Tiers
) -> None:
    tiers.fill("a", range(80))
    lowered = Tiers(tiers.kind, tiers.folder, capacity="5MiB").config.rename(
        tiers.folder / "lowered.yaml"
    )
    Tiers(tiers.kind, tiers.folder)
    for command in (
        ["ls", lowered, "--tier", "a", "--namespace", ONE],
        ["stat", lowered, "--tier", "a"],
        ["verify", lowered, "--tier", "a"],
        ["export", lowered, tiers.folder / "out", "--tier", "a", "--namespace", ONE],
        ["gc", lowered, "--tier", "a", "--dry-run"],
    ):
        ran = cli(*command)
        assert ran.code == 0, ran.err
    with tiers.opened("a", 0) as store:
        assert_held(store, range(80))


def test_tiers_without_a_directory_hold_nothing_and_get_none(cli: Cli, tiers: Tiers) -> None:
    for command in ("ls", "stat", "verify", "gc"):
        more = ("--yes",) if command == "gc" else ()
        ran = cli(command, tiers.config, *more)
        assert ran.code == 0, ran.err
        assert ran.out
    assert {one.name for one in tiers.folder.iterdir()} == {"deployment.yaml", "read-only.yaml"}
    refused = cli("export", tiers.config, "out", "--tier", "a", "--namespace", "00")
    assert refused.code == 2
    assert "there is no namespace '00'; the tier holds none" in refused.err


def test_a_directory_of_somebody_else_is_refused(cli: Cli, tiers: Tiers) -> None:
    for name in "ab":
        (tiers.folder / name).mkdir()
        (tiers.folder / name / "important.txt").write_text("mine")
    for command in ("ls", "stat", "verify", "gc"):
        more = ("--yes",) if command == "gc" else ()
        ran = cli(command, tiers.config, "--tier", "a", *more)
        assert ran.code in (1, 2), (command, ran.out)
        assert str(tiers.folder / "a") in ran.err
        assert "Traceback" not in ran.err
    assert [one.name for one in (tiers.folder / "a").iterdir()] == ["important.txt"]


def test_verify_finds_every_flip_in_stored_blocks(cli: Cli, tiers: Tiers) -> None:
    tiers.fill("a", range(20))
    rng = random.Random(3)
    flipped = set()
    for turn in range(30):
        number, rank = rng.randrange(20), rng.randrange(RANKS)
        if (number, rank) not in flipped:
            bits = 8 * (16 if turn % 3 == 0 else BLOCK_BYTES)
            tiers.flip("a", number, rank, rng.randrange(bits))
            flipped.add((number, rank))
    found = only(cli("verify", tiers.config, "--tier", "a", "--json"), code=1)
    by_rank = {read["rank"]: (read["corrupt"], read["missing"]) for read in found["read"]}
    print(f"{len(flipped)} parts of blocks with a flipped bit, (corrupt, missing): {by_rank}")
    for rank in range(RANKS):
        assert sum(by_rank[rank]) == sum(of == rank for _, of in flipped)
    assert only(cli("verify", tiers.config, "--tier", "a", "--json"), code=1) == found
    repaired = only(cli("verify", tiers.config, "--tier", "a", "--repair", "--json"))
    assert repaired["left"] == {}
    bad = {number for number, _ in flipped}
    good = [number for number in range(20) if number not in bad]
    read = only(cli("verify", tiers.config, "--tier", "a", "--json"))["read"]
    assert [one["blocks"] for one in read] == [len(good)] * RANKS
    for rank in range(RANKS):
        with tiers.opened("a", rank) as store:
            if rank == 0:
                assert store.contains(keys(sorted(bad))) == [False] * len(bad)
            assert sorted(put(store, sorted(bad), rank)) == sorted(bad)
    for rank in range(RANKS):
        with tiers.opened("a", rank) as store:
            assert_held(store, range(20), rank)


def test_gc_gives_back_what_a_killed_process_left(cli: Cli, tiers: Tiers) -> None:
    tiers.fill("a", range(8))
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    arguments = tiers.arguments("a")
    child = start(reserve_and_stay, OPENERS[tiers.kind], arguments, range(100, 110), theirs)
    assert ours.poll(60)
    assert ours.recv() == "written"
    assert only(cli("ls", tiers.config, "--json"))["namespaces"][0]["in_use"]
    refused = cli("gc", tiers.config, "--namespace", ONE, "--yes")
    assert refused.code == 2
    assert "is in use" in refused.err
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    plan = only(cli("gc", tiers.config, "--dry-run", "--json"))
    done = only(cli("gc", tiers.config, "--yes", "--json"))
    print(f"left over: {plan['leftovers']}; removed: {done['removed']}")
    assert only(cli("gc", tiers.config, "--dry-run", "--json"))["leftovers"] == {}
    assert only(cli("verify", tiers.config, "--tier", "a", "--json"))["left"] == {}
    with tiers.opened("a", 0) as store:
        assert store.contains(keys(range(100, 110))) == [False] * 10
        assert_held(store, range(8))
    assert not only(cli("ls", tiers.config, "--json"))["namespaces"][0]["in_use"]


def test_gc_drops_namespaces_and_nothing_else(cli: Cli, tiers: Tiers) -> None:
    tiers.fill("a", range(8))
    tiers.fill("a", range(20), other=True)
    shown = cli("gc", tiers.config, "--namespace", TWO[:6], "--dry-run")
    assert shown.code == 0
    assert TWO in shown.out
    assert len(only(cli("ls", tiers.config, "--json"))["namespaces"]) == 2
    done = only(cli("gc", tiers.config, "--namespace", TWO[:6], "--yes", "--json"))
    assert done["dropped_blocks"] == {TWO: 20}
    print(f"20 blocks dropped, {done['given_back_bytes']} bytes given back")
    [left] = only(cli("ls", tiers.config, "--json"))["namespaces"]
    assert (left["namespace"], left["blocks"]) == (ONE, 8)
    assert only(cli("verify", tiers.config, "--tier", "a", "--json"))["left"] == {}
    with tiers.opened("a", 1) as store:
        assert_held(store, range(8), 1)
        assert not only(cli("gc", tiers.config, "--unused", "--yes", "--json"))["dropped_blocks"]
    done = only(cli("gc", tiers.config, "--unused", "--yes", "--json"))
    assert done["dropped_blocks"] == {ONE: 8}
    assert only(cli("ls", tiers.config, "--json"))["namespaces"] == []


def test_an_archive_carries_blocks_to_another_tier(cli: Cli, tiers: Tiers) -> None:
    tiers.fill("a", range(12))
    file = tiers.folder / "warm.archive"
    before = os.umask(0)
    try:
        out = cli("export", tiers.config, file, "--tier", "a", "--namespace", ONE[:4], "--json")
        into = cli("import", tiers.config, file, "--tier", "b", "--expect", ONE, "--json")
    finally:
        os.umask(before)
    assert (out.code, into.code) == (0, 0), out.err + into.err
    assert (out.json["blocks"], out.json["bytes"]) == (12, 12 * RANKS * BLOCK_BYTES)
    assert (into.json["parts"], into.json["present"]) == (12 * RANKS, 0)
    for path in (file, tiers.folder / "b", *(tiers.folder / "b").rglob("*")):
        assert stat.S_IMODE(path.lstat().st_mode) & 0o077 == 0, path
    for rank in range(RANKS):
        with tiers.opened("b", rank) as store:
            assert_held(store, range(12), rank)
    again = cli("import", tiers.config, file, "--tier", "b", "--json")
    assert (again.json["parts"], again.json["present"]) == (0, 12 * RANKS)
    assert only(cli("verify", tiers.config, "--tier", "b", "--json"))["left"] == {}


def test_through_a_pipe(tiers: Tiers) -> None:
    tiers.fill("a", range(12))
    program = [sys.executable, "-c", "from tiered_kv.cli import main; main()"]
    which = ["--tier", "a", "--namespace", ONE, "--json"]
    out = subprocess.Popen(
        [*program, "export", str(tiers.config), "-", *which],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    done = subprocess.run(
        [*program, "import", str(tiers.config), "-", "--tier", "b", "--json"],
        stdin=out.stdout,
        capture_output=True,
        check=False,
    )
    assert out.stdout is not None
    out.stdout.close()
    _, said = out.communicate()
    assert (out.returncode, done.returncode) == (0, 0), said + done.stderr
    assert json.loads(done.stdout)["parts"] == 12 * RANKS
    assert json.loads(said.splitlines()[-1])["blocks"] == 12
    with tiers.opened("b", 1) as store:
        assert_held(store, range(12), 1)


def test_a_reader_of_the_pipe_that_goes_away(tiers: Tiers) -> None:
    tiers.fill("a", range(40))
    done = subprocess.run(
        f"{sys.executable} -c 'from tiered_kv.cli import main; main()' export "
        f"{tiers.config} - --tier a --namespace {ONE} | head -c 1000 >/dev/null; "
        "exit ${PIPESTATUS[0]}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "cannot write stdout: [Errno 32] Broken pipe" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("tiers", ["nvme"], indirect=True)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_export_that_is_ended_in_its_last_moment_leaves_nothing(
    tiers: Tiers, number: signal.Signals
) -> None:
    """The signal comes when the file is flushed."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("needs strace")
    tiers.fill("a", range(12))
    there = sorted(tiers.folder.iterdir())
    with tempfile.TemporaryDirectory() as elsewhere:
        log = Path(elsewhere) / "log"
        command = [strace, "-f", "-y", "-qq", "-e", "trace=fsync", "-o", str(log)]
        command += ["-e", f"inject=fsync:signal={number.name}"]
        command += [sys.executable, "-c", "from tiered_kv.cli import main; main()", "export"]
        command += [str(tiers.read_only), str(tiers.folder / "out"), "--tier", "a"]
        done = subprocess.run(
            [*command, "--namespace", ONE], check=False, capture_output=True, text=True
        )
        if not log.exists():
            pytest.skip(f"may not trace: {done.stderr}")
        calls = log.read_text()
    print(calls)
    assert "/.out." in calls.partition("\n")[0]
    assert sorted(tiers.folder.iterdir()) == there
    assert (done.returncode, done.stdout) == (130, "")


def test_damaged_archives_leave_only_what_verified(cli: Cli, tiers: Tiers) -> None:
    tiers.fill("a", range(12))
    file = tiers.folder / "warm.archive"
    assert cli("export", tiers.config, file, "--tier", "a", "--namespace", ONE).code == 0
    whole = file.read_bytes()
    rng = random.Random(11)
    kept = 0
    for number in range(4):
        place = rng.randrange(1000, len(whole))
        cut = number % 2
        spoiled = (
            whole[:place]
            if cut
            else whole[:place] + bytes([whole[place] ^ 1 << rng.randrange(8)]) + whole[place + 1 :]
        )
        file.write_bytes(spoiled)
        ran = cli("import", tiers.config, file, "--tier", "b", "--json")
        assert ran.code == 1
        assert "the archive is damaged" in ran.json["damage"]
        assert "the archive is damaged" in ran.err
        kept += ran.json["parts"]
        assert only(cli("verify", tiers.config, "--tier", "b", "--json"))["left"] == {}
    print(f"{kept} parts of blocks came in before the damage")
    assert kept
    file.write_bytes(whole)
    assert cli("import", tiers.config, file, "--tier", "b").code == 0
    for rank in range(RANKS):
        with tiers.opened("b", rank) as store:
            assert_held(store, range(12), rank)


def test_more_than_a_tier_holds_evicts_and_keeps_to_the_budget(cli: Cli, tiers: Tiers) -> None:
    tiers.fill("a", range(100))
    file = tiers.folder / "warm.archive"
    assert cli("export", tiers.config, file, "--tier", "a", "--namespace", ONE).code == 0
    small = Tiers(tiers.kind, tiers.folder, capacity="8MiB")
    ran = cli("import", small.config, file, "--tier", "b", "--json")
    assert (ran.code, bool(ran.json["full"])) == (1, True), ran.err
    held = only(cli("stat", small.config, "--tier", "b", "--json"))
    print(f"{ran.json['evicted_blocks']} evicted, {held['blocks']} blocks held")
    assert ran.json["evicted_blocks"] > 0
    assert 15 < held["blocks"] < 100
    folder = tiers.folder / "b"
    used = sum(one.lstat().st_blocks * 512 for one in folder.rglob("*") if one.is_file())
    assert used <= 8 * 2**20
    assert cli("verify", small.config, "--tier", "b").code == 0


def test_a_tier_without_room_ends_an_import_with_the_reason(cli: Cli, tiers: Tiers) -> None:
    tiers.fill("a", range(12))
    file = tiers.folder / "warm.archive"
    assert cli("export", tiers.config, file, "--tier", "a", "--namespace", ONE).code == 0
    tiers.config.write_text(tiers.config.read_text().replace("min_free: 0%", "min_free: 99.99%"))
    ran = cli("import", tiers.config, file, "--tier", "b")
    assert ran.code == 1
    assert "0 parts of blocks, 0B, stored" in ran.out
    assert "tier 'b' is full" in ran.err
    assert "bytes free" in ran.err or "min_free" in ran.err


@pytest.mark.timeout(300)
def test_beside_a_live_writer(cli: Cli, tiers: Tiers) -> None:
    """An engine's ranks store, read and evict all the time; every command works meanwhile, and
    they do not harm each other."""
    tiers.fill("a", range(10), other=True)
    context = multiprocessing.get_context("spawn")
    stop, told = context.Pipe()
    ours, theirs = context.Pipe()
    arguments = [tiers.arguments("a", rank) for rank in range(RANKS)]
    child = start(write_until_told, OPENERS[tiers.kind], arguments, told, theirs)
    try:
        assert ours.poll(60)
        assert ours.recv() == "began"
        counts = dict.fromkeys(("ls", "stat", "verify", "gc", "export", "import"), 0)
        for turn in range(3):
            held = {
                one["namespace"]: one
                for one in only(cli("ls", tiers.config, "--json"))["namespaces"]
            }
            assert held[ONE]["in_use"]
            counts["ls"] += held[ONE]["blocks"] > 0
            counts["stat"] += only(cli("stat", tiers.config, "--json"))["blocks"] > 0
            read = only(cli("verify", tiers.config, "--tier", "a", "--json"))
            counts["verify"] += sum(one["blocks"] for one in read["read"])
            repair = cli("verify", tiers.config, "--tier", "a", "--repair", "--json")
            assert only(repair)["left"] == {}
            counts["gc"] += cli("gc", tiers.config, "--tier", "a", "--yes").code == 0
            file = tiers.folder / f"out-{turn}"
            out = cli("export", tiers.config, file, "--tier", "a", "--namespace", ONE, "--json")
            assert out.code == 0, out.err
            counts["export"] += out.json["blocks"]
            into = cli("import", tiers.config, file, "--tier", "b", "--json")
            assert into.code == 0, into.err
            counts["import"] += into.json["parts"]
            back = cli("import", tiers.config, file, "--tier", "a", "--json")
            assert back.code == 0, back.err
        assert cli("gc", tiers.config, "--tier", "a", "--namespace", ONE, "--yes").code == 2
        dropped = only(cli("gc", tiers.config, "--tier", "a", "--unused", "--yes", "--json"))
        assert ONE not in dropped["dropped_blocks"]
        assert child.is_alive()
    finally:
        stop.send("stop")
    assert ours.poll(60)
    stored, refused, found, wrong, evicted = ours.recv()
    child.join(60)
    print(
        f"{tiers.kind}: {counts}; beside {stored} blocks stored, {refused} batches refused, "
        f"{found} read, {evicted} evicted"
    )
    assert child.exitcode == 0
    assert wrong == 0
    assert min(counts.values()) > 0
    assert min(stored, found, evicted) > 0
    assert only(cli("verify", tiers.config, "--tier", "a", "--json"))["left"] == {}
    assert only(cli("verify", tiers.config, "--tier", "b", "--json"))["left"] == {}
