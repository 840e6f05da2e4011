"""How much of a prefix a store holds."""

from __future__ import annotations

import random

import pytest

from tiered_kv.connector.holding import GroupHolding, block_tokens, held_tokens

YES, NO = True, False


@pytest.mark.parametrize(
    ("there", "tokens"),
    [
        ([], 0),
        ([NO, YES, YES], 0),
        ([YES, YES, NO, YES], 32),
        ([YES, YES, YES], 48),
    ],
)
def test_one_group_is_held_as_far_as_there_is_no_gap(there: list[bool], tokens: int) -> None:
    assert held_tokens([GroupHolding(16, there)]) == tokens


def test_a_window_needs_its_last_blocks_alone() -> None:
    window = GroupHolding(16, [NO, NO, YES, YES], 32)
    assert held_tokens([window]) == 64
    assert held_tokens([GroupHolding(16, [YES] * 4), window]) == 64
    assert held_tokens([GroupHolding(16, [YES] * 3 + [NO]), window]) == 0
    early = GroupHolding(16, [YES, NO, YES, YES], 32)
    assert held_tokens([GroupHolding(16, [YES] * 3 + [NO]), early]) == 16


def test_groups_of_other_lengths_meet_where_both_are_whole() -> None:
    assert block_tokens([16, 24]) == 48
    assert block_tokens([]) == held_tokens([]) == 0
    assert held_tokens([GroupHolding(16, [YES] * 7), GroupHolding(24, [YES] * 4)]) == 96
    assert held_tokens([GroupHolding(16, [YES] * 5), GroupHolding(24, [YES] * 4)]) == 48


def test_as_the_definition_has_it() -> None:
    """Against the plain definition: every block of the window before a position is there."""
    rng = random.Random(7)
    found: set[int] = set()
    for _ in range(400):
        groups = [
            GroupHolding(
                rng.choice([8, 16]),
                [rng.random() < 0.8 for _ in range(rng.randrange(9))],
                rng.choice([None, 1, 16, 20]),
            )
            for _ in range(rng.randrange(1, 3))
        ]
        step = block_tokens([group.tokens for group in groups])
        most = min(len(group.there) * group.tokens for group in groups)
        expected = max(
            (
                tokens
                for tokens in range(step, most + 1, step)
                if all(
                    there
                    for group in groups
                    for place, there in enumerate(group.there[: tokens // group.tokens])
                    if group.window is None or (place + 1) * group.tokens > tokens - group.window
                )
            ),
            default=0,
        )
        assert held_tokens(groups) == expected
        found.add(expected)
    print("lengths found:", sorted(found))
    assert len(found) > 4
