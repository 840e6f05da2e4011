"""Engines that share one store, each with what the ones before it left behind.

An engine takes 10 to 25 s to start, so one serves as many tests as it can. In order: `warm` fills
the store; an engine inside its process reads that, meets faults and is killed; a server reads what
was left, meets other faults and is asked to end; an engine in processes of its own reads that, and
is killed; the last one, inside its process, reads what all of them left and answers the same
prompts without tiers too. Beside them two ranks have a store of their own.

Each prompt is stored by one of them and looked for by the next; the tests assert on what came out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tests.engine.actions import (
    Action,
    EngineOptions,
    EngineRun,
    FillDisk,
    Generate,
    Inject,
    Kill,
    Metrics,
    Output,
    ReadMetrics,
    Remove,
    ResetPrefixCache,
    Restart,
    Settle,
    Sleep,
    StartRefused,
)
from tests.engine.commands import Result, run_command
from tests.engine.control import write_plan
from tests.engine.harness import EngineRunner, ServerRunner
from tests.engine.tiers import (
    PLUGINS,
    cpu,
    deployment,
    faulty,
    hint,
    lmdb,
    nvme,
    options,
    plan_file,
    prompt,
    transfer_config,
)
from tiered_kv.testing.faults import Effect, Fault, FaultPlan, Method

PYTHONPATH = (PLUGINS / "faulty_store",)

ANSWER = 24
"""Tokens of an answer that is compared."""

BLOCKS = 31
"""Whole blocks of 32 tokens in a prompt of 1000, of which the last token is always computed."""

WARMED = (prompt(1), prompt(2, 700), prompt(3, 20))
STORED = (prompt(4), prompt(5, 700))
IN_PROCESS = (prompt(6), prompt(7, 700))
SERVED = (prompt(8), prompt(9, 700))
SEPARATE = (prompt(10), prompt(11, 700))
LOST_IN_PROCESS = tuple(prompt(seed) for seed in (12, 13, 14))
LOST_BY_SERVER = tuple(prompt(seed) for seed in (15, 16, 17))
NOT_WRITTEN = (prompt(18), prompt(19))
TROUBLED = (prompt(20), prompt(21, 700))
NO_ROOM = (prompt(22), prompt(23))
ROOM = (prompt(24), prompt(25, 700))
AFTERWARDS = (prompt(26), prompt(27, 700))
CROWD = tuple((*prompt(20, 960), *prompt(100 + number, 40)) for number in range(8))
"""Share the beginning of `TROUBLED[0]`."""
TROUBLE = (*TROUBLED, *NO_ROOM, *ROOM, *AFTERWARDS, *CROWD)
STOCK = tuple(
    tuple((17 * i + seed) % 256 + 3 for i in range(length)) for seed, length in ((1, 200), (2, 333))
)
CAPITAL = (
    "<|im_start|>user\nWhat is the capital of France? Answer in one short sentence.<|im_end|>\n"
    "<|im_start|>assistant\n"
)

LONG_AND_SHORT = [992, 672]
"""Tokens of prompts of 1000 and 700 that tiers supply, in whole blocks of 32."""

IDLE = Sleep(2.0)
"""After this, what was stored is in its tiers, without any engine step in between."""

LIMITS = {"retry_backoff": "1s", "lookup_wait": "2s", "load_deadline": "20s"}
"""A tier that failed is soon tried again; patient otherwise, for a slow or busy machine."""

RETRY = Sleep(2.0)
"""After this a tier that failed is tried again."""

NOTICED_SECONDS = 5.0
"""By then it is known that a tier's directory is gone."""

ANEW_SECONDS = 10.0
"""By then it was made anew."""

WARM_ENGINE = ("--dtype", "float32", "--block-size", "32", "--max-model-len", "2048")

READ_FAILS = {
    "missing": Effect.VANISH,
    "corrupt": Effect.FLIP,
    "tier_error": Effect.BLOCK_ERROR,
    "raise": Effect.TIER_ERROR,
}
"""How a read fails, by the name that it has in these lives."""

NOTHING = FaultPlan()
NOT_WRITING = FaultPlan(
    faults=(Fault(method=Method.WRITE, effect=Effect.TIER_ERROR, calls=(1,)),),
)


def every_read(failure: str) -> FaultPlan:
    """Every block of every read."""
    return FaultPlan(faults=(Fault(method=Method.READ, effect=READ_FAILS[failure]),))


def first_middle_last(failure: str) -> FaultPlan:
    """One block of a load: there is one read call per load, and each that fails is followed by the
    load of the good prefix, if any."""
    effect = READ_FAILS[failure]
    return FaultPlan(
        faults=tuple(
            Fault(method=Method.READ, effect=effect, calls=(call,), positions=(position,))
            for call, position in ((1, 0), (2, BLOCKS // 2), (4, BLOCKS - 1))
        )
    )


def ask(prompts: tuple[tuple[int, ...], ...], *tiers: str, name: str = "") -> Generate:
    """Answer prompts, from these tiers alone if any are named."""
    return Generate(
        prompts,
        max_tokens=ANSWER,
        logprobs=True,
        kv_transfer_params=hint(*tiers) if tiers else None,
        name=name,
    )


@dataclass(frozen=True, slots=True)
class ServerRun:
    """What a server did."""

    answers: Mapping[str, tuple[Output, ...]]
    at: Mapping[str, Metrics]
    left: tuple[int, ...]
    """Processes that were there after its end."""


@dataclass(frozen=True, slots=True)
class Lives:
    """Runs the engines; each method after the ones above it."""

    store: Path
    """Folder of the tiers that the engines share."""
    cache: Path
    """What engines cache."""
    model: Path
    run_engine: EngineRunner
    serve: ServerRunner

    # The store of the first tests: filled from the command line

    def warm(self) -> Result:
        """`tiered-kv warm`: computes `WARMED` and a conversation."""
        file = self.store / "prompts.jsonl"
        write_prompts(file)
        tiers = [cpu(), nvme(self.store), lmdb(self.store)]
        config = deployment(self.store, tiers, limits=LIMITS)
        return run_command(
            *("warm", str(file), "--config", str(config), "--model", str(self.model)),
            *(*WARM_ENGINE, "--json"),
            scratch=self.store,
            cache=self.cache,
            multiprocess=False,
        )

    def in_process(self) -> EngineRun:
        """No host tier; faults; killed after an idle time, with `IN_PROCESS` stored."""
        tiers = [nvme(self.store), lmdb(self.store), faulty(self.store)]
        config = deployment(self.store, tiers, limits=LIMITS)
        load = ask(LOST_IN_PROCESS, "bad")
        return self.run_engine(
            options(self.model, config),
            *(
                Settle(),
                ReadMetrics("start"),
                ask(WARMED, "pins", name="warmed"),
                ReadMetrics("warmed"),
            ),
            *(ask(LOST_IN_PROCESS, name="cold"), Settle()),
            # The first, a middle and the last block of a load are gone.
            *(self._inject(first_middle_last("missing")), ReadMetrics("missing: 0")),
            *(ResetPrefixCache(), ask(LOST_IN_PROCESS, "bad", name="missing")),
            *(Settle(), ReadMetrics("missing: 1")),
            *(ResetPrefixCache(), ask(LOST_IN_PROCESS, "bad", name="after missing")),
            *self._every_load_fails("corrupt", load),
            *self._every_load_fails("tier_error", load),
            # One token: no engine step follows the store, so only the timer submits it.
            *(Generate(IN_PROCESS, max_tokens=1, name="last"), IDLE, Kill()),
            pythonpath=PYTHONPATH,
        )

    def _inject(self, plan: FaultPlan = NOTHING) -> Inject:
        return Inject(str(plan_file(self.store)), plan.model_dump(mode="json"))

    def _every_load_fails(self, failure: str, load: Generate) -> tuple[Action, ...]:
        def named(name: str) -> Generate:
            return ask(LOST_IN_PROCESS, "bad", name=f"{failure}: {name}")

        return (
            *(self._inject(every_read(failure)), ReadMetrics(f"{failure}: 0")),
            *(ResetPrefixCache(), named("first"), Settle(), ResetPrefixCache(), named("second")),
            *(Settle(), ReadMetrics(f"{failure}: 1"), self._inject(), RETRY),
            *(ResetPrefixCache(), load, Settle(), ResetPrefixCache(), named("afterwards")),
        )

    def server(self) -> ServerRun:
        """Reads what was there before the kill; other faults; asked to end, with `SERVED`
        stored."""
        answers: dict[str, tuple[Output, ...]] = {}
        at: dict[str, Metrics] = {}
        tiers = [nvme(self.store), lmdb(self.store), faulty(self.store)]
        config = deployment(self.store, tiers, limits=LIMITS)
        plan = plan_file(self.store)
        write_plan(plan, {})
        with self.serve(
            options(self.model, config),
            "--enable-prompt-tokens-details",
            env={"VLLM_SERVER_DEV_MODE": "1"},
            pythonpath=PYTHONPATH,
        ) as server:

            def answer(asked: Generate) -> None:
                answers[asked.name] = server.generate(asked)

            server.settle()
            at["start"] = server.metrics()
            answer(ask(IN_PROCESS, "ssd", name="ssd"))
            at["ssd"] = server.metrics()
            server.reset_prefix_cache()
            answer(ask(IN_PROCESS, "pins", name="pins"))
            at["before store"] = server.metrics()
            answer(ask(SERVED, name="stored"))
            at["stored"] = server.metrics()

            answer(ask(LOST_BY_SERVER, name="cold"))
            server.settle()
            at["corrupt: 0"] = server.metrics()
            write_plan(plan, first_middle_last("corrupt").model_dump(mode="json"))
            server.reset_prefix_cache()
            answer(ask(LOST_BY_SERVER, "bad", name="corrupt"))
            server.settle()
            at["corrupt: 1"] = server.metrics()
            server.reset_prefix_cache()
            answer(ask(LOST_BY_SERVER, "bad", name="after corrupt"))

            at["raise: 0"] = server.metrics()
            write_plan(plan, every_read("raise").model_dump(mode="json"))
            for name in ("raise: first", "raise: second"):
                server.reset_prefix_cache()
                answer(ask(LOST_BY_SERVER, "bad", name=name))
            server.settle()
            at["raise: 1"] = server.metrics()
            write_plan(plan, {})
        return ServerRun(answers, at, tuple(server.group.members()))

    def separate(self) -> EngineRun:
        """Scheduler and worker in processes of their own; every tier; a write that fails; killed
        after an idle time, with `STORED` and `SEPARATE` stored."""
        tiers = [cpu(), nvme(self.store), lmdb(self.store), faulty(self.store)]
        config = deployment(self.store, tiers, limits=LIMITS)
        return self.run_engine(
            options(self.model, config, multiprocess=True),
            *(Settle(), ask(SERVED, "ssd", name="served"), ask(STORED, name="cold"), Settle()),
            *(ResetPrefixCache(), ReadMetrics("before")),
            *(ask(STORED, "host", name="host"), ReadMetrics("host"), ResetPrefixCache()),
            *(ask(STORED, "ssd", name="ssd"), ReadMetrics("ssd"), ResetPrefixCache()),
            *(ask(STORED, "pins", name="pins"), ReadMetrics("pins")),
            *(self._inject(NOT_WRITING), ask(NOT_WRITTEN[:1], name="not written")),
            *(Settle(), RETRY, ask(NOT_WRITTEN[1:], name="written"), Settle()),
            *(ResetPrefixCache(), ReadMetrics("before bad")),
            *(ask(NOT_WRITTEN, "bad", name="bad"), ReadMetrics("bad")),
            # One token: no engine step follows the store, so only the timer submits it.
            *(Generate(SEPARATE, max_tokens=1, name="last"), IDLE, Kill()),
            env={"VLLM_LOGGING_CONFIG_PATH": str(self._logging_of_jobs())},
            pythonpath=PYTHONPATH,
        )

    def _logging_of_jobs(self) -> Path:
        """The transfer engine logs on behalf of whoever submits a job: show who that is."""
        handler = {"class": "logging.StreamHandler"}
        file = self.store / "logging.json"
        settings = {
            "version": 1,
            "formatters": {"place": {"format": "%(pathname)s: %(message)s"}},
            "handlers": {"err": handler, "jobs": handler | {"formatter": "place"}},
            "loggers": {
                "vllm": {"handlers": ["err"], "level": "WARNING", "propagate": False},
                "tiered_kv.engine": {"handlers": ["jobs"], "level": "DEBUG", "propagate": False},
            },
        }
        file.write_text(json.dumps(settings))
        return file

    def troubled(self, disk: Path) -> EngineRun:
        """A tier that hangs, a disk that others fill, a directory that is deleted; it ends while
        the calls still hang.

        `disk` is a small file system that nobody else uses.
        """
        ssd = disk / "ssd"
        tiers = [nvme(disk, capacity="64MiB"), faulty(self.store, path=str(disk / "faulty"))]
        limits = LIMITS | {"load_deadline": "1s", "drain": "2s"}
        config = deployment(self.store, tiers, limits=limits, recompute={"gate": "off"})
        filler = str(disk / "filler")
        hang = FaultPlan(faults=(Fault(method=Method.READ, effect=Effect.HANG),))
        return self.run_engine(
            options(self.model, config),
            *(self._inject(), Settle(), ask(TROUBLED, name="cold"), Settle()),
            # Others take the whole disk, and give it back.
            *(FillDisk(filler), ask(NO_ROOM, name="no room"), Settle(), ResetPrefixCache()),
            *(ask(TROUBLED, "ssd", name="full: ssd"), ReadMetrics("full"), Remove(filler), RETRY),
            *(ask(ROOM, name="room"), Settle(), ResetPrefixCache()),
            *(ask(ROOM, "ssd", name="room: ssd"), ReadMetrics("room")),
            # The directory goes; it is made anew, and used again.
            *(Remove(str(ssd)), Sleep(NOTICED_SECONDS)),
            *(ResetPrefixCache(), ask(TROUBLED, "ssd", name="removed: ssd"), Sleep(ANEW_SECONDS)),
            *(Settle(), ask(AFTERWARDS, name="afterwards"), Settle(), ResetPrefixCache()),
            *(ask(AFTERWARDS, "ssd", name="afterwards: ssd"), ReadMetrics("anew")),
            # A tier hangs for ever; many ask for the same prefix at once.
            *(self._inject(hang), ResetPrefixCache(), _together(CROWD, "bad", name="hung")),
            *(ReadMetrics("hung"), ask(CROWD[:3], "bad", name="hung: later"), ResetPrefixCache()),
            ask(AFTERWARDS, "ssd", name="hung: ssd"),
            pythonpath=PYTHONPATH,
        )

    def last(self, hybrid: Path, smollm2: Path) -> EngineRun:
        """What the others left, the same prompts without tiers, and other models."""
        config = deployment(self.store, [nvme(self.store), lmdb(self.store)], limits=LIMITS)
        tiers = [cpu(), nvme(self.store, path=str(self.store / "groups"))]
        groups = deployment(self.store, tiers, chunk=4, limits=LIMITS)
        too_large = deployment(self.store, [nvme(self.store, capacity="1000TiB")])
        cpu_only = deployment(self.store, [cpu()])
        failing = transfer_config(cpu_only, kv_load_failure_policy="fail")
        stock = Generate(STOCK, max_tokens=ANSWER, logprobs=True, name="stock")
        everything = (*STORED, *SEPARATE, *NOT_WRITTEN, *SERVED, *IN_PROCESS)
        return self.run_engine(
            options(self.model, config),
            *(
                Settle(),
                ReadMetrics("start"),
                ask(SEPARATE, "ssd", name="separate ssd"),
                ReadMetrics("ssd"),
            ),
            *(ResetPrefixCache(), ask(SEPARATE, "pins", name="separate pins")),
            *(ReadMetrics("before pins"), ask(STORED, "pins", name="pins"), ReadMetrics("pins")),
            *(ResetPrefixCache(), ask(STORED, "ssd", name="ssd"), ReadMetrics("stored ssd")),
            # Without tiers
            *(Restart(EngineOptions(self.model)), stock, _named(stock, "own cache")),
            *(ReadMetrics("own cache"), ResetPrefixCache(), _named(stock, "after reset")),
            ask(everything, name="plain"),
            ask(TROUBLE, name="plain: trouble"),
            # Several KV groups, several engine blocks in a block
            *(Restart(EngineOptions(hybrid)), ask(STORED, name="groups: plain")),
            *(Restart(options(hybrid, groups)), ask(STORED, name="groups: cold"), Settle()),
            *(ResetPrefixCache(), ask(STORED, "host", name="groups: host")),
            *(ResetPrefixCache(), ask(STORED, "ssd", name="groups: ssd")),
            # A real language model
            Restart(EngineOptions(smollm2, dtype="bfloat16")),
            Generate((CAPITAL,), max_tokens=ANSWER, ignore_eos=False, name="capital"),
            StartRefused(options(self.model, too_large)),
            StartRefused(EngineOptions(self.model, kv_transfer_config=failing), ends=True),
        )

    def ranks(self, hybrid: Path, scratch: Path) -> EngineRun:
        """Two ranks, several KV groups, several engine blocks in a block; started twice. It is
        recorded what they were asked."""
        tiers = [cpu(), nvme(scratch)]
        trace = {"path": str(scratch / "trace")}
        config = deployment(scratch, tiers, chunk=4, limits=LIMITS, trace=trace)
        ranks = options(hybrid, config, multiprocess=True, tensor_parallel_size=2)
        return self.run_engine(
            ranks,
            *(ask(STORED, name="cold"), Settle()),
            *(ResetPrefixCache(), ask(STORED, "host", name="host")),
            *(ResetPrefixCache(), ask(STORED, "ssd", name="ssd")),
            *(Restart(ranks), Settle(), ask(STORED, "ssd", name="restarted")),
            env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        )


def _together(prompts: tuple[tuple[int, ...], ...], *tiers: str, name: str) -> Generate:
    """Like `ask`, all at once."""
    one = ask(prompts, *tiers, name=name)
    return replace(one, together=True)


def _named(asked: Generate, name: str) -> Generate:
    return Generate(asked.prompts, asked.max_tokens, logprobs=asked.logprobs, name=name)


def write_prompts(file: Path) -> None:
    """A file for `warm`: `WARMED`, and a conversation."""
    conversation = [{"role": "user", "content": "What is a block? " * 20}]
    lines = [{"token_ids": list(ids)} for ids in WARMED] + [{"messages": conversation}]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
