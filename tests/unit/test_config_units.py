from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from tiered_kv.config import (
    GIB,
    KIB,
    MIB,
    TIB,
    ByteSize,
    Directory,
    Duration,
    SizeOrPercent,
    format_bytes,
    format_seconds,
    readable_bytes,
)
from tiered_kv.config.units import parse_bytes, parse_seconds

SIZE: TypeAdapter[int] = TypeAdapter(ByteSize)
TIME: TypeAdapter[float] = TypeAdapter(Duration)
SHARE: TypeAdapter[SizeOrPercent] = TypeAdapter(SizeOrPercent)
PLACE: TypeAdapter[Path] = TypeAdapter(Directory)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0B", 0),
        ("4096B", 4096),
        ("1KiB", KIB),
        ("512 MiB", 512 * MIB),
        ("1.5GiB", 3 * GIB // 2),
        ("1TiB", TIB),
        ("1kB", 1000),
        ("32GB", 32 * 10**9),
        ("0.5PB", 5 * 10**14),
        (" 3MB ", 3 * 10**6),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not a size"),
        ("GiB", "is not a size"),
        ("many", "is not a size"),
        ("1e3B", "is not a size"),
        ("32", "has no unit"),
        ("32G", "32GiB (34359738368 bytes) or 32GB (32000000000 bytes)"),
        ("32g", "ambiguous"),
        ("32Gb", "ambiguous"),
        ("32gib", "ambiguous"),
        ("32Gbit", "unknown unit 'Gbit'"),
        ("32GiB/rank", "unknown unit 'GiB/rank'"),
        ("32GiB per rank", "is not a size"),
        ("-1GiB", "negative"),
        ("0.3B", "whole number of bytes"),
        ("9000000PiB", "more than"),
        ("٣GiB", "is not a size"),
        ("1" * 50 + "GiB", "is not a size"),
    ],
)
def test_wrong_sizes(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


@given(st.integers(0, 2**63 - 1))
def test_sizes_survive_their_text(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == size


@given(st.integers(0, 10**12).map(lambda micros: micros / 10**6))
def test_durations_survive_their_text(seconds: float) -> None:
    assert parse_seconds(format_seconds(seconds)) == seconds


@given(st.text())
def test_any_text_is_a_size_or_a_clear_error(text: str) -> None:
    said = ""
    try:
        size = parse_bytes(text)
    except ValueError as error:
        size, said = 0, str(error)
    assert size >= 0
    assert not said or repr(text) in said


def test_text_and_numbers_in_python_code() -> None:
    assert SIZE.validate_python(4096) == 4096
    assert SIZE.validate_python("4KiB") == 4096
    assert TIME.validate_python(2) == 2.0
    assert TIME.validate_python("50ms") == 0.05
    for wrong in (-1, True, 1.5, None, 2**63):
        with pytest.raises(ValidationError):
            SIZE.validate_python(wrong)
    for unfit in (-1.0, True, None, float("nan"), float("inf")):
        with pytest.raises(ValidationError):
            TIME.validate_python(unfit)


def test_numbers_in_text_need_a_unit() -> None:
    for adapter in (SIZE, TIME):
        with pytest.raises(ValidationError, match="has no unit"):
            adapter.validate_json("4096")
    with pytest.raises(ValidationError, match="is not a size"):
        SIZE.validate_json("true")


def test_sizes_are_written_as_text() -> None:
    assert SIZE.dump_json(3 * MIB) == b'"3MiB"'
    assert TIME.dump_json(0.05) == b'"50ms"'
    assert SHARE.dump_json(SizeOrPercent(percent=10)) == b'"10%"'


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2s", 2.0),
        ("50ms", 0.05),
        ("250us", 0.00025),
        ("5min", 300.0),
        ("1.5h", 5400.0),
        ("1d", 86400.0),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("5", "has no unit"),
        ("5m", "write 5min or 5ms"),
        ("5M", "write 5min or 5ms"),
        ("5 weeks", "unknown unit 'weeks'"),
        ("-5s", "negative"),
        ("soon", "is not a duration"),
    ],
)
def test_wrong_durations(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_seconds(text)


def test_size_or_percent() -> None:
    assert SHARE.validate_python("10%").of(1000) == 100
    assert SHARE.validate_python("2KiB").of(1000) == 2048
    assert SHARE.validate_python("0%").of(1000) == 0
    assert str(SizeOrPercent.parse("2.5%")) == "2.5%"
    for wrong in ("100%", "-1%", "%", 10, None, "10 percent"):
        with pytest.raises(ValidationError):
            SHARE.validate_python(wrong)
    with pytest.raises(ValueError, match="either"):
        SizeOrPercent()


def test_directories_expand_home_and_variables() -> None:
    env = {"HOME": "/home/op", "DISK": "/mnt/a"}

    def read(text: str) -> str:
        return str(PLACE.validate_python(text, context={"env": env}))

    assert read("~/kv") == "/home/op/kv"
    assert read("$DISK/kv") == "/mnt/a/kv"
    assert read("${DISK}1/kv") == "/mnt/a1/kv"
    assert read("/a$$b") == "/a$b"
    for wrong in ("kv", "$NOPE/kv", "/a$", "", "/a\0b"):
        with pytest.raises(ValidationError):
            read(wrong)
    assert PLACE.validate_python(Path("/a$b")) == Path("/a$b")


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0B"), (1023, "1023B"), (1536, "1.5KiB"), (3 * GIB // 2, "1.5GiB"), (2**60, "1024PiB")],
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert readable_bytes(size) == text
