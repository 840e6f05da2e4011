"""Running halves answer whoever may ask, and `tiered-kv top` shows what they say."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.command_line import Cli
from tests.unit.simulation_rig import TWO_GROUPS, Stage, store_prompt, tokens
from tiered_kv.connector import LiveView, ask_all, live
from tiered_kv.connector.live import Answering
from tiered_kv.stats import StatsSnapshot
from tiered_kv.testing.faults import PATIENCE
from tiered_kv.testing.simulation import Simulation

MINE = f"@tiered-kv/{os.geteuid()}/{os.getpid()}/"


def sockets() -> int:
    """Those of this process."""
    return Path("/proc/net/unix").read_text().count(MINE)


def mine() -> list[LiveView]:
    return [view for view in ask_all() if view.pid == os.getpid()]


@contextmanager
def answered(engine: Simulation) -> Iterator[None]:
    """All halves answer meanwhile, as those of a real engine do."""
    halves = [engine.manager.view, *(worker.view for worker in engine.workers)]
    answering = [Answering(half().source, half) for half in halves]
    try:
        yield
    finally:
        for one in answering:
            one.close()


def view() -> LiveView:
    return LiveView("manager", "aa" * 8, os.getpid(), {}, {}, StatsSnapshot(1.0))


def test_what_an_engine_does_is_shown_while_it_is_idle(cli: Cli) -> None:
    before = sockets()
    with Simulation(Stage().assembly, TWO_GROUPS) as engine, answered(engine):
        assert engine.wait_ready()
        store_prompt(engine, tokens(1, 48))
        engine.forget_device_cache()
        engine.add(tokens(1, 48), tiers=("ssd",))
        engine.run()
        assert [one.source for one in mine()] == ["manager", "rank 0", "rank 1"]
        shown = cli("top", "--once")
        assert shown.code == 0
        print(shown.out)
        namespace = mine()[0].namespace
        found = {one["namespace"]: one for one in cli("top", "--json").json["deployments"]}
        ssd = found[namespace]["tiers"]["ssd"]
        print(ssd)
        assert ssd["state"] == "healthy"
        assert ssd["hits"] > 0
        assert ssd["stored_bytes"] >= ssd["loaded_bytes"] > 0
        assert ssd["reason"] == ""
        assert found[namespace]["tiers"]["host"]["state"] == "healthy"
        assert found[namespace]["tiers"]["host"]["capacity_bytes"] > 0
        assert namespace in shown.out
        assert f"rank 1 (pid {os.getpid()})" in shown.out
    assert sockets() == before


def test_why_a_tier_does_not_serve_is_shown(cli: Cli) -> None:
    stage = Stage()
    with Simulation(stage.assembly, TWO_GROUPS) as engine, answered(engine):
        assert engine.wait_ready()
        for rank in engine.workers:
            rank.engine.detach_failed("ssd", "the disk is on fire")
        shown = cli("top", "--once").out
        assert "down" in shown
        assert "ssd: could not be opened: the disk is on fire" in shown


def test_nobody_is_there(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "PREFIX", f"nobody-{os.getpid()}")
    shown = cli("top", "--once")
    assert shown.code == 1
    assert "no engine with tiers answers on this machine" in shown.out
    assert cli("top", "--json").json == {"deployments": []}
    assert cli("top", "--interval", "soon").code == 2


def test_halves_of_one_name_in_one_process_all_answer() -> None:
    answering = [Answering("manager", view) for _ in range(live.SAME_NAME + 1)]
    try:
        assert len(mine()) == live.SAME_NAME
    finally:
        for one in answering:
            one.close()
    assert not mine()


def test_who_does_not_read_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "ANSWER_SECONDS", 0.05)
    large = LiveView("x" * 2**22, "", os.getpid(), {}, {}, StatsSnapshot(1.0))
    answering = Answering("manager", lambda: large)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
            silent.connect(f"\0tiered-kv/{os.geteuid()}/{os.getpid()}/manager/0")
            assert [len(one.source) for one in mine()] == [2**22]
    finally:
        answering.close()


def test_a_view_that_fails_or_lies_ends_nothing() -> None:
    answers = [ValueError("not now"), None]

    def failing() -> LiveView:
        error = answers.pop(0)
        if error is not None:
            raise error
        return view()

    answering = Answering("manager", failing)
    try:
        assert mine() == []
        assert mine() == [view()]
    finally:
        answering.close()
        answering.close()


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"source": 1, "tiers": []})])
def test_what_is_no_view_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"version|Expecting"):
        LiveView.from_json(text)


def _ask_as_nobody(found: multiprocessing.SimpleQueue[int]) -> None:
    os.setgid(65534)
    os.setuid(65534)
    found.put(len(ask_all()))


@pytest.mark.skipif(os.geteuid() != 0, reason="another user is needed, which root alone can be")
def test_another_user_is_told_nothing() -> None:
    answering = Answering("manager", view)
    try:
        context = multiprocessing.get_context("spawn")
        found: multiprocessing.SimpleQueue[int] = context.SimpleQueue()
        child = context.Process(target=_ask_as_nobody, args=(found,))
        child.start()
        child.join(PATIENCE)
        assert child.exitcode == 0
        assert found.get() == 0
        assert len(mine()) == 1
    finally:
        answering.close()


def test_no_thread_and_no_socket_is_left() -> None:
    before, sockets_before = set(threading.enumerate()), sockets()
    answering = Answering("manager", view)
    [thread] = set(threading.enumerate()) - before
    assert thread.name == "tiered-kv-live"
    assert sockets() == sockets_before + 1
    answering.close()
    thread.join(PATIENCE)
    assert set(threading.enumerate()) <= before
    assert sockets() == sockets_before
