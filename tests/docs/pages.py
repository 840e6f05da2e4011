"""The documentation's pages, and what is fenced in them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

SOURCE = Path(os.environ.get("TIERED_KV_SOURCE", Path(__file__).parents[2]))
"""The source tree; the tests may run from a copy."""

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def page(name: str) -> str:
    """The text of a page of `docs/`."""
    return (SOURCE / "docs" / name).read_text(encoding="utf-8")


def fenced(name: str, language: str) -> list[str]:
    """The code blocks of one language in a page."""
    return [body for kind, body in _FENCE.findall(page(name)) if kind == language]


def tables(schema: dict[str, Any]) -> str:
    """The second half of `docs/configuration.md`: every setting, from the JSON schema."""
    groups = schema["$defs"]
    text = ""
    for title, group, words in _SECTIONS:
        model = schema if group is None else groups[group]
        rows = ["| key | default | meaning |", "|---|---|---|"]
        for name, field in model["properties"].items():
            target = groups.get(field.get("$ref", "").rpartition("/")[2], {})
            described = {"description": target.get("description")} | field
            rows.append(_row(name, described, required=name in model.get("required", ())))
        text += "\n".join(["", f"## {title}", "", *words, *rows, ""])
    return text


_SECTIONS: tuple[tuple[str, str | None, tuple[str, ...]], ...] = (
    ("The file", None, ()),
    ("namespace", "NamespaceSettings", ("`auto` is an empty mapping, a name `{name: NAME}`.", "")),
    ("placement", "Placement", ()),
    ("placement.admit", "Admit", ()),
    ("limits", "Limits", ()),
    ("recompute", "Recompute", ()),
    ("trace", "TraceSettings", ()),
    (
        "A tier of type cpu",
        "CpuSettings",
        ("At most one. Its capacity is per rank; that of all other types is per machine.", ""),
    ),
    ("eviction", "EvictionSettings", ()),
    ("A tier of type nvme", "NvmeSettings", ()),
    ("A tier of type lmdb", "LmdbSettings", ()),
)


def _row(name: str, field: dict[str, Any], *, required: bool) -> str:
    default = field.get("default")
    if required:
        shown = "required"
    elif "$ref" in field:
        shown = "see below"
    elif default is None:
        shown = "not set"
    else:
        shown = f"`{str(default).lower() if isinstance(default, bool) else default}`"
    return f"| `{name}` | {shown} | {field['description']} |"


def _write_tables() -> None:
    from tiered_kv import config
    from tiered_kv.plugins import Plugins

    text = page("configuration.md").partition("\n## The file")[0]
    target = SOURCE / "docs" / "configuration.md"
    target.write_text(text + tables(config.schema(Plugins())), encoding="utf-8")


if __name__ == "__main__":
    _write_tables()
