"""Finding a namespace by the beginning of its id, and telling why two are not one."""

from __future__ import annotations

import pytest

from tiered_kv.upkeep import NoSuchNamespace, find, properties, resemblances, telling
from tiered_kv.values import Fingerprint, Namespace

IDS = [bytes.fromhex(text) for text in ("00aa000000000000", "00ab000000000000", "ff00000000000000")]


def namespace(epoch: bytes = b"", **fields: str) -> Namespace:
    return Namespace(Fingerprint.of({"model": "m", "dtype": "bf16", "tp": "1"} | fields), epoch)


@pytest.mark.parametrize("text", ["f", "FF00", "ff00000000000000", " ff "])
def test_the_beginning_is_enough(text: str) -> None:
    assert find(text, [*IDS, *IDS]) == IDS[2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("00a", "'00a' is the beginning of 00aa000000000000, 00ab000000000000; give more digits"),
        ("00ac", "there is no namespace '00ac'; did you mean 00a[ab]000000000000?"),
        ("1234567890", "there is no namespace '1234567890'; there are 00aa0000"),
        ("", "there is no namespace ''; there are"),
        ("../x", "there is no namespace '../x'; there are"),
        ("ff0000000000000000", "did you mean ff00000000000000"),
    ],
)
def test_what_cannot_be_found_says_what_comes_near(text: str, said: str) -> None:
    with pytest.raises(NoSuchNamespace, match=said):
        find(text, IDS)


def test_where_nothing_is_and_where_much_is() -> None:
    with pytest.raises(NoSuchNamespace, match="the tier holds none"):
        find("00", [])
    many = [bytes([number, *bytes(7)]) for number in range(100)]
    with pytest.raises(NoSuchNamespace, match=r"and 92 more$"):
        find("ee", many)


def test_fields_that_tell() -> None:
    assert telling([]) == ()
    assert telling([namespace()]) == ()
    assert telling([namespace(), namespace(tp="2"), namespace(more="x")]) == ("more", "tp")
    assert telling([namespace(), namespace(b"\1\2")]) == ("epoch",)
    assert properties(namespace(b"\1\2"))["epoch"] == "0102"


def test_the_nearest_is_told_once_with_what_differs() -> None:
    one, two = namespace(), namespace(tp="2")
    far = Namespace(Fingerprint.of({f"field{i}": "x" for i in range(5)}))
    [pair] = resemblances([one, two, far])
    assert {pair.namespace, pair.other} == {one.id, two.id}
    assert pair.differences == (("tp", "1", "2"),)
    assert resemblances([one]) == []
    assert resemblances([one, far]) == []
    third = namespace(tp="2", more="x")
    found = resemblances([one, two, third])
    told = {frozenset({pair.namespace, pair.other}) for pair in found}
    assert told == {frozenset({one.id, two.id}), frozenset({two.id, third.id})}
    assert found[1].differences == (("more", "x", ""),)
