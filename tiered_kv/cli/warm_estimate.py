"""`tiered-kv warm --dry-run`: how much it would be, told without an engine.

Tokens are those of the model's tokenizer, bytes those of its `config.json`. How fast a tier takes
blocks is measured by writing a few to it and removing them again, as `check` does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import typer

from tiered_kv.cli.output import bytes_text, print_json, warn
from tiered_kv.cli.prompt_file import PlacedPrompt, TokenIds
from tiered_kv.cli.tending import StoreTier
from tiered_kv.cli.warming import duration_text
from tiered_kv.connector.chunking import auto_chunk
from tiered_kv.errors import TieredKVError, UnsupportedError, reason_in
from tiered_kv.planning import find_config, kv_shape
from tiered_kv.values import PAGE_BYTES, BlockKey, CacheGeometry, Fingerprint, GroupGeometry

if TYPE_CHECKING:
    from tiered_kv.config import Deployment
    from tiered_kv.plugins import Plugins
    from tiered_kv.vllm.engine_process import Chat

__all__ = ["Estimate", "TierEstimate", "estimate", "print_estimate", "write_speed"]

ENGINE_BLOCK = 16
"""Tokens of an engine block where nothing else is said, as vLLM has it on GPUs."""

MOST_COUNT = 2**20
"""More are neither ranks nor tokens of a block."""

PROBE_BYTES = 32 * 2**20
PROBE_BLOCK_BYTES = 2**20

_PROBE = Fingerprint.of({"purpose": "tiered-kv warm --dry-run"})
"""A namespace of its own: no engine finds the blocks, and none of its blocks is touched."""


@dataclass(frozen=True, slots=True)
class TierEstimate:
    """What would go into one tier."""

    bytes: int
    """At most: what is there already is not taken off."""
    capacity: int
    bytes_per_second: float | None
    """None where it could not be measured; `why` says why."""
    seconds: float | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Estimate:
    """How much a warm-up would be."""

    prompts: int
    prompt_tokens: int
    block_tokens: int
    """Tokens in whole blocks, which is what tiers can hold."""
    tokens_per_block: int
    bytes_per_token: float
    """Over all ranks."""
    known_from: str
    """Where the bytes are known from, for people."""
    tiers: Mapping[str, TierEstimate]
    tokens_per_second: float | None
    compute_seconds: float | None

    @property
    def seconds(self) -> float | None:
        """Computing and writing go on side by side; None where one of them is not known."""
        parts = [self.compute_seconds, *(tier.seconds for tier in self.tiers.values())]
        known = [part for part in parts if part is not None]
        return max(known) if len(known) == len(parts) else None


def estimate(
    deployment: Deployment,
    plugins: Plugins,
    tiers: Sequence[str],
    arguments: Mapping[str, Any],
    prompts: Sequence[PlacedPrompt],
    tokens_per_second: float | None,
) -> Estimate:
    """Count tokens and bytes, and measure the tiers.

    Args:
        deployment: as it will be used.
        plugins: that it was loaded with.
        tiers: names of the tiers that are to be warmed.
        arguments: of `vllm.LLM`.
        prompts: what is to be stored.
        tokens_per_second: what the engine computes; None: as the deployment says, if it does.

    Raises:
        typer.BadParameter: a size among the arguments is none.
        TieredKVError: the model's tokenizer or `config.json` is not here or not understood.
    """
    model = str(arguments["model"])
    ranks = _count(arguments, "tensor_parallel_size", 1)
    engine_block = _count(arguments, "block_size", ENGINE_BLOCK)
    dtype = str(arguments.get("kv_cache_dtype") or "auto")
    if dtype == "auto":
        dtype = str(arguments.get("dtype") or "auto")
    shape = kv_shape(find_config(model), dtype, ranks)
    lengths = _lengths(str(arguments.get("tokenizer") or model), prompts)
    chunk = deployment.chunk or auto_chunk(
        int(shape.rank_bytes_per_token * engine_block), engine_block
    )
    block = engine_block * chunk
    held = sum(length // block * block for length in lengths)
    size = int(held * shape.bytes_per_token)
    computed = tokens_per_second or deployment.recompute.tokens_per_second
    found: dict[str, TierEstimate] = {}
    for name in tiers:
        settings = deployment.tier(name)
        rate, why = write_speed(StoreTier(settings, deployment, plugins))
        seconds = None if rate is None else size / rate
        found[name] = TierEstimate(size, int(settings.capacity), rate, seconds, why)
    return Estimate(
        prompts=len(lengths),
        prompt_tokens=sum(lengths),
        block_tokens=held,
        tokens_per_block=block,
        bytes_per_token=shape.bytes_per_token,
        known_from=shape.source,
        tiers=found,
        tokens_per_second=computed,
        compute_seconds=None if computed is None else sum(lengths) / computed,
    )


def _count(arguments: Mapping[str, Any], name: str, otherwise: int) -> int:
    value = arguments.get(name)
    if value is None:
        return otherwise
    if type(value) is not int or not 0 < value <= MOST_COUNT:
        raise typer.BadParameter(
            f"{name} is {value!r:.60}, not a whole number from 1 to {MOST_COUNT}",
            param_hint="--engine-args",
        )
    return value


def print_estimate(found: Estimate, *, as_json: bool) -> None:
    """To stdout; what would not fit to stderr."""
    if as_json:
        print_json(asdict(found) | {"seconds": found.seconds})
    else:
        typer.echo(
            f"{found.prompts} prompts, {found.prompt_tokens} tokens, {found.block_tokens} of them "
            f"in whole blocks of {found.tokens_per_block}"
        )
        typer.echo(f"{bytes_text(int(found.bytes_per_token))} per token ({found.known_from})")
        for name, tier in found.tiers.items():
            speed = f"not known how fast: {tier.why}"
            if tier.seconds is not None and tier.bytes_per_second is not None:
                took = duration_text(tier.seconds)
                speed = f"about {took} at {bytes_text(int(tier.bytes_per_second))}/s, as measured"
            typer.echo(f"tier {name}: at most {bytes_text(tier.bytes)}, {speed}")
        if found.compute_seconds is None:
            typer.echo("computing: not known how long; say --tokens-per-second")
        else:
            typer.echo(
                f"computing: about {duration_text(found.compute_seconds)} at "
                f"{found.tokens_per_second:g} tokens per second"
            )
        typer.echo("What is there already is not taken off: that takes an engine to tell.")
    for name, tier in found.tiers.items():
        if tier.bytes > tier.capacity:
            warn(
                f"tier {name}: {bytes_text(tier.bytes)} do not fit into its capacity of "
                f"{bytes_text(tier.capacity)}"
            )


def write_speed(tier: StoreTier) -> tuple[float | None, str]:
    """Bytes per second that a tier takes now; or None, and why that was not measured. Nothing is
    evicted for it: where the tier has no free room it is not measured."""
    from contextlib import suppress

    from tiered_kv.contracts import StoredNamespace
    from tiered_kv.values import Namespace

    groups = (GroupGeometry(0, PROBE_BLOCK_BYTES, 1, 16),)
    stored = StoredNamespace(Namespace(_PROBE), CacheGeometry(groups, 0, 1), 0, 0, in_use=False)
    try:
        with tier.store(stored, 0, writable=True) as store:
            stat = store.stat()
            if stat.capacity_bytes - stat.used_bytes < 2 * PROBE_BYTES:
                return None, "it has no free room to measure with"
            rate = _timed(store)
        with tier.maintenance(writable=True) as maintenance, suppress(ValueError):
            maintenance.drop(stored.namespace.id)  # refused where another dry run goes on
    except TieredKVError as error:
        return None, reason_in(tier.name, error)
    return rate, ""


def _timed(store: Any) -> float:
    import mmap

    from tiered_kv.checksum import BlockChecksum
    from tiered_kv.contracts import NewBlock

    count = PROBE_BYTES // PROBE_BLOCK_BYTES
    memory = memoryview(mmap.mmap(-1, PROBE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    memory[:] = os.urandom(PAGE_BYTES) * (PROBE_BYTES // PAGE_BYTES)
    views = [memory[i * PROBE_BLOCK_BYTES :][:PROBE_BLOCK_BYTES] for i in range(count)]
    keys = [BlockKey(os.urandom(32)) for _ in range(count)]
    blocks = [
        NewBlock(key, BlockChecksum.capture(key, 0, view))
        for key, view in zip(keys, views, strict=True)
    ]
    began = time.perf_counter()
    half = count // 2
    for some in (slice(0, half), slice(half, count)):
        places = [place for place in store.reserve(blocks[some]) if place is not None]
        store.write(places, views[some])
        store.publish(places)
    seconds = time.perf_counter() - began
    store.delete(keys)
    return PROBE_BYTES / seconds


# Tokens


def _lengths(tokenizer: str, prompts: Sequence[PlacedPrompt]) -> list[int]:
    """Tokens of each prompt; the tokenizer is loaded where one is needed."""
    loaded: Any = None
    lengths: list[int] = []
    for placed in prompts:
        prompt = placed.prompt
        if isinstance(prompt, TokenIds):
            lengths.append(len(prompt.ids))
            continue
        loaded = loaded or _tokenizer(tokenizer)
        if isinstance(prompt, str):
            lengths.append(len(loaded.encode(prompt)))
        else:
            text = _rendered(loaded, prompt)
            lengths.append(len(loaded.encode(text, add_special_tokens=False)))
    return lengths


def _tokenizer(name: str) -> Any:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UnsupportedError(
            "counting tokens needs transformers, which vLLM brings: "
            'pip install "tiered-kv[vllm]", or give token_ids'
        ) from error
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UnsupportedError(
            f"the tokenizer of {name} cannot be loaded from this machine: {error}"
        ) from error


def _rendered(tokenizer: Any, chat: Chat) -> Any:
    """The text of a conversation; texts in parts are joined, as for most templates."""
    messages: list[dict[str, Any]] = []
    for message in chat.messages:
        said = dict(message)
        if isinstance(said.get("content"), list):
            parts = [part for part in said["content"] if isinstance(part, dict)]
            said["content"] = "\n".join(str(part.get("text", "")) for part in parts)
        messages.append(said)
    return tokenizer.apply_chat_template(
        messages,
        tools=list(chat.tools) or None,
        tokenize=False,
        add_generation_prompt=True,
        **chat.template_arguments,
    )
