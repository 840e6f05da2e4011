"""Runs scenarios on a real vLLM, and a real OpenAI server, in child processes."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.engine.actions import (
    Action,
    EngineOptions,
    EngineRun,
    Generate,
    Kill,
    Metrics,
    Output,
    Sample,
    StartRefused,
    decode_run,
    encode_scenario,
)
from tests.engine.control import SHORT, await_settled
from tests.engine.processes import (
    ProcessGroup,
    environment,
    free_port,
    remove_shared_memory,
    running,
)

_CHILD = Path(__file__).with_name("child.py")


class EngineFailedError(AssertionError):
    """The engine's process ended in a way that the scenario did not ask for."""


class EngineRunner:
    """Runs engines one after another; each in a scratch folder of its own."""

    def __init__(self, scratch: Path, cache: Path) -> None:
        """`scratch` holds what each run leaves; `cache` is what runs may share."""
        self._scratch = scratch
        self._cache = cache
        self._numbers = itertools.count()

    def __call__(
        self,
        options: EngineOptions,
        *actions: Action,
        env: Mapping[str, str] | None = None,
        pythonpath: Sequence[Path] = (),
        timeout: float = 300.0,
    ) -> EngineRun:
        """Run the actions on a fresh engine and return when its processes are gone.

        Args:
            env: added to the environment of the engine.
            pythonpath: folders with modules or distributions that the engine shall find, such
                as a test's own plug-in.
            timeout: seconds for the whole run, start of the engine included.

        Raises:
            EngineFailedError: the engine ended by itself, or with an error; the message holds
                what it printed.
            TimeoutError: it hung; the message holds the stacks of all its threads.
        """
        folder = self._scratch / f"engine-{next(self._numbers)}"
        folder.mkdir(parents=True)
        scenario, results = folder / "scenario.json", folder / "results.jsonl"
        scenario.write_text(encode_scenario(options, actions))
        variables = environment(
            self._cache, multiprocess=options.multiprocess, pythonpath=pythonpath
        )
        command = [str(_CHILD), str(scenario), str(results)]
        with running(command, env=variables | dict(env or {}), scratch=folder) as group:
            status = group.wait(timeout)
        killed = any(isinstance(action, Kill) for action in actions)
        refused = any(isinstance(action, StartRefused) and action.ends for action in actions)
        if status != (-signal.SIGKILL if killed else 1 if refused else 0):
            raise EngineFailedError(f"the engine ended with status {status}:\n{group.log()}")
        with results.open() as file:
            run = decode_run(file, killed=killed, log=group.log())
        remove_shared_memory(run.left_behind)
        return run


class Server:
    """A running OpenAI-compatible server on loopback."""

    def __init__(self, group: ProcessGroup, port: int) -> None:
        self.group = group
        self.port = port
        self.model = "model"

    def get(self, path: str, *, timeout: float = 30.0) -> str:
        """Body of a GET.

        Raises:
            EngineFailedError: the answer's status is not 200.
            OSError: no answer.
        """
        return self._request("GET", path, None, timeout)

    def post(self, path: str, body: Mapping[str, Any], *, timeout: float = 120.0) -> Any:
        """Decoded answer to a JSON body; errors as for `get`."""
        answer = self._request("POST", path, json.dumps(body), timeout)
        return json.loads(answer) if answer else None

    def complete(self, prompt: str | Sequence[int], **settings: Any) -> Any:
        """A greedy completion, as the server answers it."""
        request = {"model": self.model, "prompt": prompt, "temperature": 0.0} | settings
        return self.post("/v1/completions", request)

    def generate(self, asked: Generate) -> tuple[Output, ...]:
        """Answers to the prompts, one after another. Needs a server that tells the details of the
        prompt's tokens."""
        return tuple(self._answer(prompt, asked) for prompt in asked.prompts)

    def _answer(self, prompt: str | Sequence[int], asked: Generate) -> Output:
        settings: dict[str, Any] = {
            "max_tokens": asked.max_tokens,
            "ignore_eos": asked.ignore_eos,
            "return_token_ids": True,
        }
        if asked.kv_transfer_params is not None:
            settings["kv_transfer_params"] = dict(asked.kv_transfer_params)
        answer = self.complete(prompt, **settings)
        [choice] = answer["choices"]
        return Output(
            token_ids=tuple(choice["token_ids"]),
            text=choice["text"],
            finish_reason=choice["finish_reason"],
            num_cached_tokens=(answer["usage"]["prompt_tokens_details"] or {}).get(
                "cached_tokens", 0
            ),
            first_token_latency=0.0,
        )

    def reset_prefix_cache(self) -> None:
        """Forget what the engine itself has cached; needs `VLLM_SERVER_DEV_MODE=1`."""
        self._request("POST", "/reset_prefix_cache", None, 30.0)

    def settle(self) -> None:
        """Wait until every tier is open and nothing is left to be written to any."""

        def look() -> Metrics:
            self.generate(SHORT)
            return self.metrics()

        await_settled(look)

    def metrics(self) -> Metrics:
        """All samples of `/metrics`."""
        return Metrics(
            tuple(
                Sample(sample.name, sample.value, dict(sample.labels))
                for family in text_string_to_metric_families(self.get("/metrics"))
                for sample in family.samples
            )
        )

    def _request(self, method: str, path: str, body: str | None, timeout: float) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        with contextlib.closing(connection):
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode()
            if answer.status != http.client.OK:
                raise EngineFailedError(f"{method} {path}: {answer.status} {answer.reason}\n{text}")
            return text


class ServerRunner:
    """Starts OpenAI servers; each in a scratch folder of its own."""

    def __init__(self, scratch: Path, cache: Path) -> None:
        """`scratch` holds what each run leaves; `cache` is what runs may share."""
        self._scratch = scratch
        self._cache = cache
        self._numbers = itertools.count()

    @contextlib.contextmanager
    def __call__(
        self,
        options: EngineOptions,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        pythonpath: Sequence[Path] = (),
        ready_within: float = 300.0,
        stop_within: float = 60.0,
    ) -> Iterator[Server]:
        """A server that answers; asked to end when the block is left, and then made to.

        Args:
            arguments: further ones of the server's command line.
            env: added to the environment of the server.
            pythonpath: folders with modules or distributions that the engine shall find.
            ready_within: seconds until it must answer.
            stop_within: seconds that it gets to end by itself.

        Raises:
            EngineFailedError: it ended before it was ready; the message holds what it printed.
            TimeoutError: it did not become ready; the message holds all stacks.
        """
        folder = self._scratch / f"server-{next(self._numbers)}"
        port = free_port()
        variables = environment(self._cache, multiprocess=True, pythonpath=pythonpath)
        command = _server_command(options, port, arguments)
        with running(command, env=variables | dict(env or {}), scratch=folder) as group:
            server = Server(group, port)
            _await_ready(server, ready_within)
            yield server
            if group.poll() is None:
                group.terminate(stop_within)


def _server_command(options: EngineOptions, port: int, arguments: Sequence[str]) -> list[str]:
    # The console script `vllm serve` needs a distribution of that name; the module does not.
    command = ["-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
    settings: dict[str, Any] = {
        "port": port,
        "model": options.model,
        "served_model_name": "model",
        "dtype": options.dtype,
        "block_size": options.block_size,
        "max_model_len": options.max_model_len,
        "tensor_parallel_size": options.tensor_parallel_size,
        "seed": 0,
        "shutdown_timeout": 20,
    }
    if options.kv_transfer_config is not None:
        settings["kv_transfer_config"] = json.dumps(dict(options.kv_transfer_config))
    for name, value in (settings | dict(options.extra)).items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    return [*command, "--enforce-eager", *arguments]


def _await_ready(server: Server, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if server.group.poll() is not None:
            raise EngineFailedError(f"the server ended before it answered:\n{server.group.log()}")
        try:
            server.get("/health", timeout=5.0)
        except (OSError, http.client.HTTPException, EngineFailedError):
            time.sleep(0.25)
        else:
            return
    server.group.dump_stacks()
    raise TimeoutError(f"the server did not answer within {seconds:.0f} s:\n{server.group.log()}")
