"""The alarm that submits what no engine step follows."""

from __future__ import annotations

import threading
import time

import pytest

from tiered_kv.testing.faults import PATIENCE
from tiered_kv.threads import Alarm

FAR = 3600.0


def threads_named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_it_calls_once_for_each_time_that_it_was_set_and_on_one_thread() -> None:
    rang: list[threading.Thread] = []
    called = threading.Semaphore(0)

    def ring() -> None:
        rang.append(threading.current_thread())
        called.release()

    alarm = Alarm("one alarm", ring)
    began = time.monotonic()
    for _ in range(20):
        alarm.set(0.001)
        alarm.set(FAR)  # it is set already
        assert called.acquire(timeout=PATIENCE)
    assert time.monotonic() - began >= 20 * 0.001
    print("calls:", len(rang), "threads:", {thread.name for thread in rang})
    assert len(rang) == 20
    assert set(rang) == set(threads_named("one alarm"))
    assert len(set(rang)) == 1
    alarm.close()
    rang[0].join(PATIENCE)
    assert not rang[0].is_alive()


def test_what_was_stopped_does_not_call_and_the_next_one_does() -> None:
    called = threading.Event()
    alarm = Alarm("stopped alarm", called.set)
    for _ in range(1000):
        alarm.set(0.05)
        alarm.stop()
    assert len(threads_named("stopped alarm")) == 1
    assert not called.is_set()
    alarm.set(0.001)
    assert called.wait(PATIENCE)
    alarm.close()


@pytest.mark.parametrize("was_set", [False, True])
def test_a_closed_one_never_calls_and_its_thread_ends(*, was_set: bool) -> None:
    called = threading.Event()
    alarm = Alarm("closed alarm", called.set)
    if was_set:
        alarm.set(FAR)
    alarm.close()
    alarm.close()
    alarm.set(0.0)
    for thread in threads_named("closed alarm"):
        thread.join(PATIENCE)
    assert not threads_named("closed alarm")
    assert not called.is_set()


def test_where_no_thread_is_to_be_had_setting_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    alarm = Alarm("no alarm", lambda: None)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            alarm.set(0.0)
    alarm.set(FAR)
    assert len(threads_named("no alarm")) == 1
    alarm.close()
