"""Sizes, durations and directories as an operator writes them.

Text must carry a unit that can be read in one way only. In Python code the same fields take plain
numbers: bytes for sizes, seconds for durations. (`pydantic.ByteSize` is not used: it accepts
"32G", bare numbers, bits, and any text after the unit.)
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from string import Template
from typing import Annotated, Any

from pydantic import (
    BeforeValidator,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainSerializer,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

__all__ = [
    "GIB",
    "KIB",
    "MIB",
    "TIB",
    "ByteRate",
    "ByteSize",
    "DailyBytes",
    "Directory",
    "Duration",
    "SizeOrPercent",
    "format_bytes",
    "format_seconds",
    "parse_bytes",
    "parse_seconds",
    "readable_bytes",
]

KIB = 2**10
MIB = 2**20
GIB = 2**30
TIB = 2**40

_MAX_BYTES = 2**63 - 1
_BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
_DECIMAL = {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_BYTE_UNITS = {"B": 1} | _BINARY | _DECIMAL
_TIME_UNITS = {
    "us": Decimal("0.000001"),
    "ms": Decimal("0.001"),
    "s": Decimal(1),
    "min": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86400),
}
_QUANTITY = re.compile(r"([+-]?\d{1,20}(?:\.\d{1,20})?)\s?([^\s\d.]*)", re.ASCII)

_SIZE_PATTERN = r"^\d+(\.\d+)? ?(B|[KMGTP]iB|[kKMGTP]B)$"
_PERCENT_PATTERN = r"^\d+(\.\d+)? ?%$"
_DURATION_PATTERN = r"^\d+(\.\d+)? ?(us|ms|s|min|h|d)$"


def _quantity(text: str, wanted: str) -> tuple[Decimal, str]:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not {wanted}")
    number = Decimal(match[1])
    if number < 0:
        raise ValueError(f"{text!r} is negative; expected {wanted}")
    return number, match[2]


def parse_bytes(text: str) -> int:
    """Read a size such as "32GiB", "512 MiB", "1.5TB" or "4096B"; gives bytes.

    Raises:
        ValueError: no number, no unit, an unknown or ambiguous unit, negative, or not whole bytes.
    """
    number, unit = _quantity(text, "a size with a unit, such as 32GiB")
    if unit not in _BYTE_UNITS:
        raise ValueError(_byte_unit_problem(text, number, unit))
    size = number * _BYTE_UNITS[unit]
    if size != int(size):
        raise ValueError(f"{text!r} is not a whole number of bytes")
    if size > _MAX_BYTES:
        raise ValueError(f"{text!r} is more than {_MAX_BYTES} bytes")
    return int(size)


def _byte_unit_problem(text: str, number: Decimal, unit: str) -> str:
    if not unit:
        return f"{text!r} has no unit; write {number}B for bytes, or for example {number}GiB"
    letter = unit[0].upper()
    for binary, decimal in zip(_BINARY, ("KB", "MB", "GB", "TB", "PB"), strict=True):
        if letter == binary[0] and unit.lower() in (
            letter.lower(),
            binary.lower(),
            decimal.lower(),
        ):
            return (
                f"{text!r} is ambiguous; write {number}{binary} "
                f"({int(number * _BINARY[binary])} bytes) or {number}{decimal} "
                f"({int(number * _DECIMAL[decimal])} bytes)"
            )
    return f"{text!r} has the unknown unit {unit!r}; use {', '.join(_BYTE_UNITS)}"


def format_bytes(size: int) -> str:
    """The shortest exact text that `parse_bytes` reads back as `size` bytes."""
    for unit, factor in reversed(_BINARY.items()):
        if size >= factor and size % factor == 0:
            return f"{size // factor}{unit}"
    return f"{size}B"


def readable_bytes(size: int) -> str:
    """About `size` bytes, for people: `1.5GiB`."""
    amount = float(size)
    unit = "B"
    for unit in ("B", *_BINARY):
        if amount < KIB:
            break
        if unit != "PiB":
            amount /= KIB
    return f"{amount:.4g}{unit}"


def parse_seconds(text: str) -> float:
    """Read a duration such as "2s", "50ms" or "1.5h"; gives seconds.

    Raises:
        ValueError: no number, no unit, an unknown or ambiguous unit, or negative.
    """
    number, unit = _quantity(text, "a duration with a unit, such as 2s or 50ms")
    if unit in _TIME_UNITS:
        return float(number * _TIME_UNITS[unit])
    if not unit:
        raise ValueError(f"{text!r} has no unit; write {number}s, or for example {number}ms")
    if unit.lower() == "m":
        raise ValueError(f"{text!r} is ambiguous; write {number}min or {number}ms")
    raise ValueError(f"{text!r} has the unknown unit {unit!r}; use {', '.join(_TIME_UNITS)}")


def format_seconds(seconds: float) -> str:
    """Exact text that `parse_seconds` reads back as `seconds`, in the largest whole unit."""
    amount = Decimal(repr(seconds))
    for unit, factor in reversed(_TIME_UNITS.items()):
        if amount and amount % factor == 0:
            return f"{int(amount / factor)}{unit}"
    return f"{amount:f}s"


def _is_text(info: ValidationInfo) -> bool:
    """Whether the value was written by an operator, not by Python code: `load` hands text on."""
    return info.mode == "json"


def _to_bytes(value: object, info: ValidationInfo) -> int:
    if isinstance(value, str):
        return parse_bytes(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{value!r} is not a size with a unit, such as 32GiB")
    if _is_text(info):
        return parse_bytes(str(value))  # says which units there are
    if not 0 <= value <= _MAX_BYTES:
        raise ValueError(f"{value} bytes is out of range")
    return value


def _to_seconds(value: object, info: ValidationInfo) -> float:
    if isinstance(value, str):
        return parse_seconds(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not a duration with a unit, such as 2s or 50ms")
    if _is_text(info):
        return parse_seconds(str(value))
    if not 0 <= value < float("inf"):
        raise ValueError(f"{value} seconds is out of range")
    return float(value)


ByteSize = Annotated[
    int,
    BeforeValidator(_to_bytes),
    PlainSerializer(format_bytes, return_type=str, when_used="json"),
    WithJsonSchema(
        {"type": "string", "pattern": _SIZE_PATTERN, "unit": "bytes", "examples": ["32GiB"]}
    ),
]
"""An `int` of bytes, 0 or more. As text: "32GiB", "500GB", "4096B". "32G" and "32" are refused."""


def _to_rate(value: object, info: ValidationInfo) -> int:
    # YAML reads a bare `off` as false.
    return 0 if value is False or value == "off" else _to_bytes(value, info)


ByteRate = Annotated[
    int,
    BeforeValidator(_to_rate),
    PlainSerializer(
        lambda rate: format_bytes(rate) if rate else "off", return_type=str, when_used="json"
    ),
    WithJsonSchema(
        {
            "anyOf": [{"const": "off"}, {"type": "string", "pattern": _SIZE_PATTERN}],
            "unit": "bytes per second",
            "examples": ["20MiB"],
        }
    ),
]
"""An `int` of bytes per second; 0 is "off". As text: "off", "20MiB"."""

DailyBytes = Annotated[
    int,
    BeforeValidator(_to_rate),
    PlainSerializer(
        lambda size: format_bytes(size) if size else "off", return_type=str, when_used="json"
    ),
    WithJsonSchema(
        {
            "anyOf": [{"const": "off"}, {"type": "string", "pattern": _SIZE_PATTERN}],
            "unit": "bytes per day",
            "examples": ["500GiB"],
        }
    ),
]
"""An `int` of bytes per day; 0 is "off". As text: "off", "500GiB"."""

Duration = Annotated[
    float,
    BeforeValidator(_to_seconds),
    PlainSerializer(format_seconds, return_type=str, when_used="json"),
    WithJsonSchema(
        {"type": "string", "pattern": _DURATION_PATTERN, "unit": "seconds", "examples": ["50ms"]}
    ),
]
"""A `float` of seconds, 0 or more. As text: "2s", "50ms", "5min". "5m" and "5" are refused."""


@dataclass(frozen=True, slots=True)
class SizeOrPercent:
    """A size in bytes, or a share of a whole that is known later. Exactly one is set."""

    size: int | None = None
    """Bytes, 0 or more."""
    percent: float | None = None
    """From 0 to below 100."""

    def __post_init__(self) -> None:
        """Check that exactly one of the two is set."""
        if (self.size is None) == (self.percent is None):
            raise ValueError("set either size or percent")

    def of(self, whole: int) -> int:
        """Bytes, where the whole has `whole` bytes."""
        if self.size is not None:
            return self.size
        return int(whole * (self.percent or 0.0) / 100)

    def __str__(self) -> str:
        return format_bytes(self.size) if self.size is not None else f"{self.percent:g}%"

    @classmethod
    def parse(cls, text: str) -> SizeOrPercent:
        """Read "10%" or a size such as "20GiB".

        Raises:
            ValueError: neither of the two, or not below 100%.
        """
        if not text.strip().endswith("%"):
            return cls(size=parse_bytes(text))
        number, _ = _quantity(text.strip().removesuffix("%"), "a percentage, such as 10%")
        if number >= 100:
            raise ValueError(f"{text!r} is not below 100%")
        return cls(percent=float(number))

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[Any], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls._validate,
            serialization=core_schema.plain_serializer_function_ser_schema(str, when_used="json"),
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        pattern = f"{_SIZE_PATTERN}|{_PERCENT_PATTERN}"
        unit = "bytes or percent"
        return {"type": "string", "pattern": pattern, "unit": unit, "examples": ["10%", "20GiB"]}

    @classmethod
    def _validate(cls, value: object) -> SizeOrPercent:
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls.parse(value)
        raise ValueError(f"{value!r} is not a size or a percentage, such as 20GiB or 10%")


def _to_directory(value: object, info: ValidationInfo) -> Path:
    if isinstance(value, Path):
        path = value
    elif not isinstance(value, str) or not value or "\0" in value:
        raise ValueError(f"{value!r} is not a directory")
    else:
        env: Mapping[str, str] = (info.context or {}).get("env", os.environ)
        path = Path(_expand(value, env))
    if not path.is_absolute():
        raise ValueError(
            f"{str(value)!r} is not absolute; the engine's processes may run elsewhere, "
            "so write the whole path (~ and $NAME are expanded)"
        )
    return path


def _expand(text: str, env: Mapping[str, str]) -> str:
    try:
        expanded = Template(text).substitute(env)
    except KeyError as error:
        raise ValueError(f"{text!r} names ${error.args[0]}, which is not set") from error
    except ValueError as error:
        raise ValueError(f"{text!r} has a $ that names no variable; write $$ for $") from error
    if expanded == "~" or expanded.startswith("~/"):
        return env.get("HOME", str(Path.home())) + expanded[1:]
    if expanded.startswith("~"):
        return str(Path(expanded).expanduser())
    return expanded


Directory = Annotated[
    Path,
    PlainValidator(_to_directory),
    WithJsonSchema({"type": "string", "unit": "path", "examples": ["/mnt/nvme0/kv"]}),
]
"""An absolute directory; `~`, `$NAME` and `${NAME}` are expanded in text. It need not exist."""
