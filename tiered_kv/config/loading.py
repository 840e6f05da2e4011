"""From a YAML file to a frozen `Deployment`, or one error that lists every problem."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache, reduce
from operator import or_
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, Protocol, get_args

from pydantic import BaseModel, Field, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import ErrorDetails, core_schema

from tiered_kv.config.agreement import disagreements
from tiered_kv.config.document import Document, KeyPath, Problem, fail, read_document
from tiered_kv.config.model import CpuSettings, Deployment, TierSettings
from tiered_kv.config.units import SizeOrPercent, format_bytes, format_seconds
from tiered_kv.errors import PluginError

__all__ = ["TierTypes", "deployment_model", "load", "schema"]

_CORE: dict[str, type[TierSettings]] = {"cpu": CpuSettings}


_NOTHING = object()


class TierTypes(Protocol):
    """The tier types that backends bring, beside `cpu`, which is the core's own."""

    def names(self) -> tuple[str, ...]:
        """Every name that the `type` of a tier may have beside `cpu`."""
        ...

    def settings(self, name: str) -> type[TierSettings]:
        """The settings model of the type `name`.

        Raises:
            KeyError: no backend has this name.
            PluginError: the backend cannot be loaded, or cannot be a tier.
        """
        ...


def deployment_model(settings_by_type: Mapping[str, type[TierSettings]]) -> type[Deployment]:
    """The model of a deployment whose tiers are of these types; each is told by its `type`."""
    return _made(tuple(settings_by_type.values()))


@lru_cache(maxsize=16)  # so that equal files give equal deployments
def _made(models: tuple[type[TierSettings], ...]) -> type[Deployment]:
    tier: Any = reduce(or_, models)
    if len(models) > 1:
        tier = Annotated[tier, Field(discriminator="type")]
    tiers: Any = GenericAlias(tuple, (tier, ...))
    declared = Deployment.model_fields["tiers"].description
    return create_model(
        "Deployment",
        __base__=Deployment,
        __doc__=Deployment.__doc__,
        tiers=(tiers, Field(min_length=1, description=declared)),
    )


def load(
    path: str | os.PathLike[str], types: TierTypes, env: Mapping[str, str] = os.environ
) -> Deployment:
    """Read a deployment. Only the backends that it names are loaded; no directory is touched.

    Raises:
        ConfigError: listing every problem as `file:line: key.path: message`.
    """
    file = Path(path)
    document = read_document(file, env)
    models, problems = _models(document, types)
    context = {"env": env}
    deployment: Deployment | None = None
    try:
        deployment = deployment_model(models).model_validate_json(
            json.dumps(document.values), strict=True, context=context
        )
    except ValidationError as error:
        handled = {problem.key[:2] for problem in problems}
        for detail in error.errors(include_url=False):
            if not _is_echo(detail, document) and detail["loc"][:2] not in handled:
                problems.append(_explained(detail, document, models))
        problems += _disagreements(document, models, context)
    problems += document.problems
    if problems or deployment is None:
        raise fail(file, problems)
    return deployment


def schema(types: TierTypes) -> dict[str, Any]:
    """JSON schema of the YAML file, for editors; types whose backend cannot be loaded are left
    out."""
    models = dict(_CORE)
    for name in types.names():
        try:
            models[name] = types.settings(name)
        except PluginError:
            continue
    made = deployment_model(models).model_json_schema(schema_generator=_Schema)
    items = made["properties"]["tiers"]["items"]
    for entry in items.get("oneOf", [items]):
        tier = made["$defs"][entry["$ref"].rpartition("/")[2]]
        tier["required"] = ["type", *tier.get("required", ())]  # in Python it has a default
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | made


class _Schema(GenerateJsonSchema):
    """Writes defaults as an operator would: "2GiB", not 2147483648."""

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        made = super().default_schema(schema)
        default, given = made.get("default"), schema.get("default")
        if isinstance(given, SizeOrPercent):
            made["default"] = str(given)
        elif made.get("unit") == "bytes" and isinstance(default, int):
            made["default"] = format_bytes(default)
        elif made.get("unit") == "seconds" and isinstance(default, int | float):
            made["default"] = format_seconds(default)
        return made


def _tiers(document: Document) -> dict[int, dict[str, Any]]:
    """The entries of `tiers` that are mappings, by their place."""
    tiers = document.values.get("tiers")
    found = enumerate(tiers) if isinstance(tiers, list) else ()
    return {place: tier for place, tier in found if isinstance(tier, dict)}


def _models(
    document: Document, types: TierTypes
) -> tuple[dict[str, type[TierSettings]], list[Problem]]:
    """The settings models of the types that are named, and what is wrong with the others."""
    models = dict(_CORE)
    problems: list[Problem] = []
    for place, tier in _tiers(document).items():
        name = tier.get("type")
        try:
            if str(name) not in models:
                models[str(name)] = types.settings(str(name))
        except PluginError as error:
            problems.append(document.problem(("tiers", place, "type"), str(error)))
        except KeyError:
            what = f"{name!r} is no tier type" if "type" in tier else "is missing"
            known = _nearest(name, sorted({*types.names(), *_CORE}), "types")
            problems.append(document.problem(("tiers", place, "type"), f"{what}; {known}"))
    return models, problems


def _nearest(word: object, known: list[str], what: str) -> str:
    near = get_close_matches(word, known, 1) if isinstance(word, str) else []
    every = f"the {what} are {', '.join(known)}" if known else f"there are no {what} here"
    return f"did you mean {near[0]!r}? ({every})" if near else every


def _disagreements(
    document: Document, models: dict[str, type[TierSettings]], context: dict[str, Any]
) -> list[Problem]:
    """What does not fit together among the parts that are valid by themselves."""
    valid: dict[int, TierSettings] = {}
    names: set[str] = set()
    for place, tier in _tiers(document).items():
        if isinstance(tier.get("name"), str):
            names.add(tier["name"])
        model = models.get(str(tier.get("type")))
        if model is not None:
            try:
                valid[place] = model.model_validate_json(
                    json.dumps(tier), strict=True, context=context
                )
            except ValidationError:
                continue
    placement = document.values.get("placement")
    write = placement.get("write") if isinstance(placement, dict) else None
    if not isinstance(write, list) or not all(isinstance(name, str) for name in write):
        write = None
    return [
        document.problem(found.loc, found.message)
        for found in disagreements(valid, write, frozenset(names))
    ]


def _is_echo(detail: ErrorDetails, document: Document) -> bool:
    """Whether an error only repeats others: entries that failed are missing from their list, and
    `_disagreements` says more than the model does."""
    if detail["type"] != "too_short":
        return detail["type"] == "disagreement"
    at: object = document.values
    for part in detail["loc"]:
        at = _get(at, part)
    return bool(at)


def _explained(
    detail: ErrorDetails, document: Document, models: dict[str, type[TierSettings]]
) -> Problem:
    """A pydantic error in the operator's words, placed in the file."""
    key, parent = _place(detail["loc"], detail["type"], document, models)
    context = detail.get("ctx", {})
    match detail["type"]:
        case "extra_forbidden":
            valid = sorted(parent.model_fields) if parent is not None else []
            message = f"unknown key; {_nearest(str(key[-1]), valid, 'keys')}"
        case "missing":
            about = parent.model_fields[str(key[-1])].description if parent is not None else None
            message = "is missing" + (f": {about}" if about else "")
        case "value_error":
            message = str(context.get("error", detail["msg"]))
        case "too_short":
            message = f"needs at least {context['min_length']} entry"
        case _:
            message = detail["msg"].replace("Input should", "should")
            for theirs, ours in (("valid array", "list"), ("n object", " mapping")):
                message = message.replace(theirs, ours)
            message += f", is {reprlib.repr(detail['input'])}"
    return document.problem(key, message)


def _place(
    loc: KeyPath, kind: str, document: Document, models: dict[str, type[TierSettings]]
) -> tuple[KeyPath, type[BaseModel] | None]:
    """The key path of an error as it is in the file (pydantic puts union tags between), and the
    model that the last key belongs to."""
    key: list[str | int] = []
    at: object = document.values
    model: type[BaseModel] | None = Deployment
    owner = model
    for position, part in enumerate(loc):
        last = position == len(loc) - 1
        in_tier = len(key) == 2 and key[0] == "tiers"
        if in_tier and not last and part == _get(at, "type"):
            continue
        child = _get(at, part)
        if child is _NOTHING and not (last and kind == "missing"):
            continue
        key.append(part)
        owner, at = model, child
        if len(key) == 2 and key[0] == "tiers":
            model = models.get(str(_get(at, "type")))
        else:
            model = _submodel(model, part)
    return tuple(key), owner


def _get(value: object, part: str | int) -> object:
    if isinstance(value, dict):
        return value.get(part, _NOTHING)
    if isinstance(value, list) and isinstance(part, int) and part < len(value):
        return value[part]
    return _NOTHING


def _submodel(model: type[BaseModel] | None, part: str | int) -> type[BaseModel] | None:
    if model is None or part not in model.model_fields:
        return None
    annotation: object = model.model_fields[str(part)].annotation
    for one in (annotation, *get_args(annotation)):  # the second: `Model | None`
        if isinstance(one, type) and issubclass(one, BaseModel):
            return one
    return None
