"""A YAML file as plain values, with the place of every key kept for error messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tiered_kv.errors import ConfigError

__all__ = ["ENV_PREFIX", "Document", "KeyPath", "Problem", "dotted", "fail", "read_document"]

ENV_PREFIX = "TIERED_KV__"
"""An environment variable `TIERED_KV__TIERS__0__CAPACITY` overrides the key `tiers.0.capacity`."""

KeyPath = tuple[str | int, ...]

_MAX_FILE_BYTES = 2**20
_PLAIN_TAGS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "bool", "null"))
_STR_TAGS = frozenset({"tag:yaml.org,2002:str", "tag:yaml.org,2002:timestamp"})
_TREE_TAGS = frozenset({"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"})


def dotted(key: KeyPath) -> str:
    """The key path as it is printed: `tiers.0.capacity`."""
    return ".".join(str(part) for part in key)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, and where."""

    key: KeyPath
    message: str
    line: int | None = None
    """1-based line in the file, where the key or its parent is in the file."""
    variable: str | None = None
    """Environment variable that set the value."""

    def render(self, file: Path) -> str:
        """As `file:line: key.path: message`."""
        place = str(file) if self.line is None else f"{file}:{self.line}"
        if self.variable is not None:
            place = f"environment variable {self.variable}"
        return ": ".join(filter(None, (place, dotted(self.key), self.message)))


@dataclass(slots=True)
class Document:
    """A file that was read. `values` holds dicts, lists, str, int, float, bool and None only."""

    file: Path
    values: dict[str, Any]
    lines: dict[KeyPath, int]
    """1-based line of every key."""
    variables: dict[KeyPath, str]
    """Environment variable of every key that one set."""
    problems: list[Problem]
    """What is wrong with the text itself: duplicate keys, tags, anchors, overrides."""

    def problem(self, key: KeyPath, message: str) -> Problem:
        """A problem at `key`, placed there or at the nearest parent that was written."""
        for length in range(len(key), -1, -1):
            if key[:length] in self.variables:
                return Problem(key, message, variable=self.variables[key[:length]])
            if key[:length] in self.lines:
                return Problem(key, message, self.lines[key[:length]])
        return Problem(key, message)


def fail(file: Path, problems: list[Problem]) -> ConfigError:
    """The one error that lists all problems, in the order of the file."""
    ordered = sorted(problems, key=lambda p: (p.line is None, p.line or 0))
    lines = tuple(dict.fromkeys(problem.render(file) for problem in ordered))
    first = ordered[0]
    return ConfigError(
        "\n".join(lines),
        file=file,
        line=first.line,
        key=dotted(first.key) or None,
        problems=lines,
    )


def read_document(file: Path, env: Mapping[str, str]) -> Document:
    """Read a file and apply the overrides in `env`.

    Raises:
        ConfigError: it cannot be read, is no YAML, or is no mapping. What is wrong beyond that is
            left in `problems`.
    """
    root = _compose(_text(file), file)
    builder = _Builder()
    try:
        values = None if root is None else builder.build(root, ())
    except RecursionError:
        raise fail(file, [Problem((), "is nested too deeply")]) from None
    if not isinstance(values, dict):
        found = "is empty" if values is None else f"holds a {type(values).__name__}"
        raise fail(file, [Problem((), f"{found}; expected keys such as `tiers:`", 1)])
    document = Document(file, values, builder.lines, {}, builder.problems)
    for variable in sorted(name for name in env if name.startswith(ENV_PREFIX)):
        _override(document, variable, env[variable])
    return document


def _text(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            raw = stream.read(_MAX_FILE_BYTES + 1)
    except FileNotFoundError as error:
        raise fail(file, [Problem((), "there is no such file")]) from error
    except IsADirectoryError as error:
        message = "is a directory; expected a YAML file"
        raise fail(file, [Problem((), message)]) from error
    except OSError as error:
        message = f"cannot be read: {error.strerror or error}"
        raise fail(file, [Problem((), message)]) from error
    except ValueError as error:  # a NUL in the name
        raise fail(file, [Problem((), f"is not a file name: {error}")]) from error
    if len(raw) > _MAX_FILE_BYTES:
        message = f"is longer than {_MAX_FILE_BYTES} bytes; this is no configuration"
        raise fail(file, [Problem((), message)])
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        message = f"is not UTF-8 text (byte {raw[error.start]:#04x})"
        raise fail(file, [Problem((), message, line)]) from error


def _compose(text: str, file: Path) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = ", ".join(filter(None, (error.context, error.problem)))
        line = None if mark is None else mark.line + 1
        raise fail(file, [Problem((), f"is not valid YAML: {message}", line)]) from error
    except yaml.YAMLError as error:  # characters that YAML does not allow
        first = str(error).splitlines()[0]
        raise fail(file, [Problem((), f"is not valid YAML: {first}")]) from error
    except RecursionError:
        raise fail(file, [Problem((), "is nested too deeply")]) from None


@dataclass(slots=True)
class _Builder:
    """Turns nodes into plain values; a value that cannot be built becomes None and a problem."""

    lines: dict[KeyPath, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    _seen: set[int] = field(default_factory=set)
    _scalars: yaml.constructor.SafeConstructor = field(
        default_factory=yaml.constructor.SafeConstructor
    )

    def build(self, node: yaml.Node, key: KeyPath) -> Any:
        self.lines.setdefault(key, node.start_mark.line + 1)
        if id(node) in self._seen:
            return self._refuse(node, key, "anchors and aliases are not allowed; repeat the value")
        self._seen.add(id(node))
        if node.tag not in _PLAIN_TAGS | _STR_TAGS | _TREE_TAGS:
            return self._refuse(node, key, f"the YAML tag {node.tag} is not allowed")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, key)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*key, place)) for place, item in enumerate(node.value)]
        if node.tag in _STR_TAGS:
            return node.value
        try:
            return self._scalars.construct_object(node)
        except ValueError:  # looks like a number to YAML's patterns, but is none
            return node.value

    def _mapping(self, node: yaml.MappingNode, key: KeyPath) -> dict[str, Any]:
        built: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._refuse(key_node, key, "a key is a list or a mapping; expected a word")
                continue
            inner = (*key, key_node.value)
            if key_node.value in built:
                first = self.lines[inner]
                self._refuse(key_node, inner, f"is given twice (first in line {first})")
                continue
            self.lines[inner] = key_node.start_mark.line + 1
            built[key_node.value] = self.build(value_node, inner)
        return built

    def _refuse(self, node: yaml.Node, key: KeyPath, message: str) -> None:
        self.problems.append(Problem(key, message, node.start_mark.line + 1))


def _override(document: Document, variable: str, text: str) -> None:
    parts = variable.removeprefix(ENV_PREFIX).lower().split("__")
    key: KeyPath = tuple(int(part) if part.isascii() and part.isdigit() else part for part in parts)

    def refuse(message: str) -> None:
        document.problems.append(Problem(key, message, variable=variable))

    try:
        node = _compose(text, document.file)
    except ConfigError:
        return refuse(f"the value {text!r} is not valid YAML")
    builder = _Builder()
    value = None if node is None else builder.build(node, key)
    if builder.problems:
        return refuse(builder.problems[0].message)

    obstacle = _put(document.values, key, value)
    if obstacle is not None:
        return refuse(obstacle)
    for inner in [known for known in document.variables if known[: len(key)] == key]:
        del document.variables[inner]
    document.variables[key] = variable
    return None


def _put(target: object, key: KeyPath, value: object) -> str | None:
    """Set a key below `target`, making mappings on the way; what is in the way, or None."""
    part, rest = key[0], key[1:]
    if isinstance(target, list) and isinstance(part, int):
        if part >= len(target):
            return f"the list has {len(target)} entries, counted from 0; {part} is none of them"
        if rest:
            return _put(target[part], rest, value)
        target[part] = value
        return None
    if isinstance(target, dict) and isinstance(part, str) and part:
        if rest:
            return _put(target.setdefault(part, {}), rest, value)
        target[part] = value
        return None
    if isinstance(target, list):
        return f"a list has no key {part!r}; expected a number"
    return f"there is no key {part!r} in {target!r}"
