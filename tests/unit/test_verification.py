"""`verify: always | first | never`: what is compared at the end of a load from a store."""

from __future__ import annotations

import threading

import pytest

from tests.unit.doubles import FastSpec, SlowSpec, content, fast, key
from tests.unit.engine_rig import Rig
from tiered_kv.checksum import BlockChecksum
from tiered_kv.config import Deployment, TierSettings, schema
from tiered_kv.connector.care import care_of
from tiered_kv.contracts import NewBlock, VerifyMode
from tiered_kv.engine.verification import TierVerification
from tiered_kv.plugins import Plugins
from tiered_kv.stats import StatsRecorder
from tiered_kv.testing.memory_tier import MemorySettings
from tiered_kv.values import BlockKey, BlockStatus

OK, CORRUPT = BlockStatus.OK, BlockStatus.CORRUPT


def test_what_is_bad_is_counted_by_tier() -> None:
    with Rig() as rig:
        rig.fast.fill(range(4))
        rig.fast.spoil(2)
        [result] = rig.run(rig.load_from(1, range(4), FastSpec))
        assert result.statuses == (OK, OK, CORRUPT, OK)
        tier = rig.snapshot().tier("fast")
        assert (tier.corrupt, tier.unverified) == ({"load": 1}, 0)
        assert rig.snapshot().tier("slow").corrupt == {}


def test_a_bad_block_can_be_stored_again_at_once() -> None:
    with Rig() as rig:
        rig.fast.fill([1])
        rig.fast.spoil(1)
        [lost] = rig.run(rig.load_from(1, [1], FastSpec))
        assert lost.statuses == (CORRUPT,)
        [again] = rig.run(rig.load_from(2, [1], FastSpec))
        assert again.statuses == (BlockStatus.MISSING,)
        [stored] = rig.run(rig.store(3, [1], FastSpec))
        assert stored.ok
        assert rig.engine.drain(30)
        [found] = rig.run(rig.load_from(4, [1], FastSpec))
        assert found.ok


def test_never_serves_what_rotted_and_says_so() -> None:
    with Rig(verify={"fast": VerifyMode.NEVER}) as rig:
        rig.fast.fill(range(3))
        rig.slow.fill([4])
        rig.fast.spoil(1)
        rig.slow.spoil(4)
        [rotten] = rig.run(rig.load_from(1, range(3), FastSpec))
        assert rotten.statuses == (OK, OK, OK)
        assert rig.cache.blocks[1] != content(1)
        [other] = rig.run(rig.load_from(2, [4], SlowSpec))
        assert other.statuses == (CORRUPT,)
        assert rig.snapshot().tier("fast").unverified == 3
        assert rig.snapshot().tier("slow").unverified == 0
        modes = rig.engine.modes()
        assert modes["fast->cpu"]["verify"] == "never"
        assert modes["slow->cpu"]["verify"] == "always"
        assert all("verify" not in modes[hop] for hop in ("cpu->fast", "gpu->cpu", "cpu->gpu"))


def test_first_compares_a_block_once_and_again_when_it_was_stored_anew() -> None:
    with Rig(verify={"fast": VerifyMode.FIRST}) as rig:
        rig.fast.fill(range(2))
        rig.fast.spoil(0)
        [first] = rig.run(rig.load_from(1, range(2), FastSpec))
        assert first.statuses == (CORRUPT, OK)
        rig.fast.spoil(1)
        [second] = rig.run(rig.load_from(2, [1], FastSpec))
        assert second.statuses == (OK,)  # it is not looked at any more
        assert rig.snapshot().tier("fast").unverified == 1
        rig.fast.delete([key(1)])
        [stored] = rig.run(rig.store(3, [1], FastSpec))
        assert stored.ok
        assert rig.engine.drain(30)
        rig.fast.spoil(1)
        [third] = rig.run(rig.load_from(4, [1], FastSpec))
        assert third.statuses == (CORRUPT,)


@pytest.mark.parametrize("mode", list(VerifyMode))
def test_a_direct_handler_is_told(mode: VerifyMode) -> None:
    """It verifies by itself."""
    with Rig(direct=True, verify={"fast": mode}) as rig:
        rig.fast.fill([0])
        [result] = rig.run(rig.load(1, {fast(0): [0]}))
        assert result.ok
        assert rig.engine.modes()["fast->gpu"]["verify"] == mode.value


def block(number: int, value: int = 0) -> NewBlock:
    return NewBlock(BlockKey(b"%d" % number), BlockChecksum(100, value))


def test_first_knows_a_block_by_its_key_and_its_checksum() -> None:
    stats = StatsRecorder("rank 0")
    tier = TierVerification(VerifyMode.FIRST, "t", stats)
    assert tier.due([block(1), block(2)]) == [True, True]
    tier.passed([block(1)])
    assert tier.due([block(1), block(2)]) == [False, True]
    assert tier.due([block(1, 7)]) == [True]
    tier.replaced([block(1)])
    assert tier.due([block(1)]) == [True]
    assert stats.snapshot().tier("t").unverified == 1
    assert tier.due([]) == []
    tier.passed([])


def test_first_remembers_so_many_and_what_is_used_longest() -> None:
    tier = TierVerification(VerifyMode.FIRST, "t", StatsRecorder("rank 0"), most=100)
    for start in range(0, 1_000, 10):
        tier.passed([block(n) for n in range(start, start + 10)])
        assert tier.due([block(0)]) == [False]
    kept = [not due for due in tier.due([block(n) for n in range(1_000)])]
    print(f"{sum(kept)} of 1000 blocks are remembered")
    assert 100 <= sum(kept) <= 201
    assert all(kept[900:])
    assert sum(kept[1:700]) == 0
    assert len(tier._young) + len(tier._old) <= 200


def test_it_is_asked_from_several_threads() -> None:
    tier = TierVerification(VerifyMode.FIRST, "t", StatsRecorder("rank 0"), most=1_000)
    wrong: list[int] = []

    def use(first: int) -> None:
        for number in range(first, first + 400):
            tier.passed([block(number)])
            if tier.due([block(number)]) != [False]:
                wrong.append(number)

    threads = [threading.Thread(target=use, args=(1_000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong


def test_the_settings_of_a_store() -> None:
    settings = MemorySettings(name="m")
    assert (settings.verify, settings.scrub) == ("always", 0)
    assert settings.model_dump(mode="json")["scrub"] == "off"
    for written, rate in {"off": 0, "20MiB": 20 * 2**20, "1500B": 1500}.items():
        read = MemorySettings.model_validate_json(f'{{"name": "m", "scrub": "{written}"}}')
        assert read.scrub == rate
    assert MemorySettings.model_validate({"name": "m", "scrub": False}).scrub == 0
    for nonsense in ('"sometimes"', "7", '"7"', "true", '"20MiB/s"'):
        with pytest.raises(ValueError, match="scrub"):
            MemorySettings.model_validate_json(f'{{"name": "m", "scrub": {nonsense}}}')
    with pytest.raises(ValueError, match="verify"):
        MemorySettings.model_validate({"name": "m", "verify": "sometimes"})


def test_a_plug_in_whose_settings_know_nothing_of_it_is_verified_always() -> None:
    class Old(TierSettings, frozen=True):
        pass

    deployment = Deployment(tiers=(Old(name="old", type="old"),))
    assert care_of(deployment) == {}
    with Rig() as rig:
        assert rig.engine.modes()["fast->cpu"]["verify"] == "always"


def test_the_schema_gives_both_for_our_stores() -> None:
    text = str(schema(Plugins()))
    assert text.count("'scrub': {") == text.count("'verify': {") == 2
