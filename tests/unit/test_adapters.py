"""What the blocks of requests with an adapter are named by."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tiered_kv.connector import UNNAMED, Adapter, Adapters, Naming
from tiered_kv.connector.adapters import COMPLAIN_AGAIN_SECONDS, MOST_QUEUED, Inquiry
from tiered_kv.connector.weights import weights_identity
from tiered_kv.errors import IdentityError

PATIENCE = 30.0
WAIT = 0.05


class Bench:
    """Adapters in a dictionary, and a clock that is set by hand."""

    def __init__(self) -> None:
        self.files = {"/a": "first", "/b": "other"}
        self.reading = threading.Event()
        self.reading.set()
        self.asked: list[str] = []
        self.begun = threading.Event()
        self.now = 100.0
        self.adapters = self.process()

    def process(self) -> Adapters:
        return Adapters(self.identify, wait=WAIT, clock=lambda: self.now)

    def identify(self, path: str) -> str:
        self.asked.append(path)
        self.begun.set()
        assert self.reading.wait(PATIENCE)
        if path not in self.files:
            raise IdentityError(f"{path} holds no weight file")
        return self.files[path]

    def settled(self, inquiry: Inquiry, adapters: Adapters | None = None) -> Naming:
        if inquiry.found is not None:
            inquiry.found.exception(PATIENCE)
        return self.settled_now(inquiry, adapters)

    def settled_now(self, inquiry: Inquiry, adapters: Adapters | None = None) -> Naming:
        naming = (adapters or self.adapters).naming(inquiry)
        assert naming is not None
        return naming

    def name(self, adapter: Adapter, adapters: Adapters | None = None) -> Naming:
        among = adapters or self.adapters
        return self.settled(among.ask(adapter), among)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.reading.set()
    bench.adapters.close()


A = Adapter("a", "/a", 1)


def test_an_adapter_is_named_by_its_contents(bench: Bench) -> None:
    first = bench.name(A)
    assert first.cached
    assert not first.host_only
    assert first.salt != UNNAMED.salt
    assert bench.name(A) == first
    # Under another name, in another process, after it was loaded again unchanged.
    assert bench.name(Adapter("b", "/a", 2)) == first
    assert bench.name(A, bench.process()) == first
    assert bench.name(Adapter("a", "/a", 7)) == first
    assert bench.name(Adapter("a", "/b", 3)).salt != first.salt
    assert bench.name(Adapter("a", "/a", 1, "3d")).salt != first.salt
    assert bench.asked == ["/a", "/a", "/a", "/a", "/a", "/b", "/a"]


def test_one_that_was_replaced_is_not_cached_until_the_next_process(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    first = bench.name(A)
    bench.files["/a"] = "second"
    with caplog.at_level(logging.WARNING):
        assert not bench.name(A).cached
        assert not bench.name(A).cached
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "load changed weights from a new path" in caplog.text
    bench.files["/a"] = "first"  # the engine may have either by now
    assert not bench.name(A).cached
    assert bench.name(Adapter("b", "/b", 2)).cached
    bench.files["/a"] = "second"
    second = bench.name(A, bench.process())
    assert second.cached
    assert second.salt != first.salt


def test_after_a_reset_it_is_used_for_the_first_time_again(bench: Bench) -> None:
    bench.name(A)
    bench.files["/a"] = "second"
    assert not bench.name(A).cached
    bench.adapters.forget()
    assert bench.name(A).cached


def test_one_without_identity_stays_in_the_host_tier_of_this_process(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    gone = Adapter("c", "/c", 5)
    with caplog.at_level(logging.WARNING):
        first = bench.name(gone)
        assert bench.name(gone) == first
    assert "stay in the host tier" in caplog.text
    assert len(caplog.records) == 1
    assert first.cached
    assert first.host_only
    assert bench.name(Adapter("d", "/c", 6)).salt != first.salt
    assert bench.name(gone, bench.process()).salt != first.salt
    # Unloaded and loaded again under the same name: nobody can tell whether it is the same.
    assert not bench.name(Adapter("c", "/c", 7)).cached


def test_a_request_waits_so_long_and_no_longer(bench: Bench) -> None:
    bench.reading.clear()
    late = bench.adapters.ask(A)
    assert bench.begun.wait(PATIENCE)
    assert bench.adapters.naming(late) is None
    bench.now += WAIT
    given_up = bench.adapters.naming(late)
    assert given_up == Naming(cached=False)
    bench.reading.set()
    assert late.found is not None
    assert late.found.result(PATIENCE) == "first"
    assert bench.adapters.naming(late) == given_up  # its blocks have one name alone
    assert bench.name(A).cached


def test_files_that_are_not_read_are_told_of_once_a_minute(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.reading.clear()
    for wait in (WAIT, WAIT, COMPLAIN_AGAIN_SECONDS):
        given_up = [bench.adapters.ask(A) for _ in range(100)]
        bench.now += wait
        assert not any(bench.settled_now(one).cached for one in given_up)
    assert len(caplog.records) == 2


def test_requests_share_a_look_that_has_not_begun(bench: Bench) -> None:
    bench.reading.clear()
    running = bench.adapters.ask(A)
    assert bench.begun.wait(PATIENCE)
    later = [bench.adapters.ask(A) for _ in range(100)]
    assert all(one.found is not running.found for one in later)
    bench.files["/a"] = "second"
    bench.reading.set()
    assert all(bench.settled(one).cached for one in later)
    assert bench.asked == ["/a", "/a"]


def test_what_waits_to_be_looked_at_is_bounded(bench: Bench) -> None:
    bench.reading.clear()
    bench.adapters.ask(A)
    assert bench.begun.wait(PATIENCE)
    waiting = [bench.adapters.ask(Adapter("x", f"/{n}", n)) for n in range(MOST_QUEUED)]
    assert all(bench.adapters.naming(one) is None for one in waiting)
    assert bench.adapters.naming(bench.adapters.ask(Adapter("x", "/more", 9))) == Naming(
        cached=False
    )


def test_trouble_of_any_kind_is_no_identity(bench: Bench) -> None:
    def fail(_: str) -> str:
        raise OSError(5, "Input/output error")

    adapters = Adapters(fail, wait=WAIT)
    assert bench.name(A, adapters).host_only
    adapters.close()
    assert adapters.naming(adapters.ask(A)) == Naming(cached=False)


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "adapter_model.safetensors").write_bytes(os.urandom(5_000)),
        lambda folder: (folder / "adapter_config.json").write_text('{"lora_alpha": 32}'),
    ],
    ids=["weights", "scale"],
)
def test_the_files_of_an_adapter_are_its_identity(
    change: Callable[[Path], object], tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(os.urandom(5_000))
    (folder / "adapter_config.json").write_text('{"lora_alpha": 16}')
    cache = tmp_path / "weights.json"
    first = weights_identity(folder, cache=cache)
    assert weights_identity(folder, cache=cache) == first
    change(folder)
    assert weights_identity(folder, cache=cache) != first
