"""vLLM with processes of its own: ``AsyncLLM`` here, an EngineCore, and a worker for each rank.

The caller's threads and vLLM's event loop meet in one place, and every call into the engine races the death of its
processes: vLLM itself may leave a call pending for ever when its EngineCore is killed. What must never happen here: a
sample labelled with a version that a rank does not hold; a process of the engine that outlives it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from elastic_refit.engines.base import NO_VERSION, PauseMode, Sample, SamplingSpec, ShardEngine, WeightReceiver
from elastic_refit.engines.checkpoint import require_checkpoint
from elastic_refit.engines.vllm_terms import (
    OWNER_VARIABLE,
    engine_arguments,
    is_turned_away,
    prompts_of,
    sample_of,
    sampling_params,
)
from elastic_refit.engines.watch import DeathWatch, end_processes, engine_processes
from elastic_refit.errors import ConfigError, ShardDied, ShardError
from elastic_refit.shared_memory import mapped_by, remove_abandoned

__all__ = ["VllmProcessEngine"]

T = TypeVar("T")

_END_S = 10.0


class VllmProcessEngine(ShardEngine):
    """One engine of ``width`` ranks. ``options`` are ``vllm.AsyncEngineArgs``' own names.

    Requests of any number of callers are batched continuously. ``pause`` says what becomes of those that run when a
    refit begins: ``wait`` lets them finish, ``abort`` starts them again afterwards, ``keep`` goes on with them under
    the new weights, so that their tokens have different labels.
    """

    has_workers = True

    def __init__(
        self,
        model: str,
        options: Mapping[str, Any] | None = None,
        *,
        width: int = 1,
        pause: PauseMode = "wait",
        initial_version: int = 0,
    ) -> None:
        """Raises ConfigError: no model, or an option that cannot be used here."""
        fitting = fitting_options(dict(options or {}), width)
        arguments = engine_arguments(str(require_checkpoint(model)), fitting, is_inline=False)
        self.width = width
        self._mode = pause
        self._count = itertools.count()
        self._worker = threading.Lock()
        self._update_open = False
        self._is_closed = False
        self._pauses = 0
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-loop", daemon=True)
        self._thread.start()
        os.environ[OWNER_VARIABLE] = str(os.getpid())
        before = engine_processes()
        try:
            self._llm = asyncio.run_coroutine_threadsafe(_start(arguments), self._loop).result()
        except BaseException:
            self._end_loop()
            raise
        self._processes = tuple(pid for pid in engine_processes() if pid not in before)
        self._segments = mapped_by(self._processes)
        self._watch = DeathWatch(self._processes)
        from elastic_refit.engines.vllm_worker import assume_version

        self.in_workers(partial(assume_version, initial_version))

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingSpec) -> list[Sample]:
        from vllm.exceptions import VLLMClientError

        try:
            return self._call(self._complete(prompts, sampling))
        except VLLMClientError as error:
            raise ValueError(str(error)) from error

    def pause(self) -> None:
        self._call(self._pause())

    def resume(self) -> None:
        if self._update_open:
            raise ShardError("cannot resume: a weight update is open; finish it or roll it back first")
        self._call(self._resume())

    def in_workers(self, function: Callable[[WeightReceiver], T]) -> list[T]:
        with self._worker:
            number = next(self._count)
            blob = pickle.dumps(function)
            answers = self._call(self._run(blob, number))
            outcomes = [pickle.loads(answer) for answer in answers]
            if any(outcome.number != number for outcome in outcomes):
                raise ShardError("a rank answered an older call: a worker RPC of somebody else's has raised")
            versions = {outcome.version for outcome in outcomes}
            self._update_open = any(outcome.update_open for outcome in outcomes)
            # Nothing is scheduled while ranks differ, or between their answers and this.
            self._call(self._label(versions.pop() if len(versions) == 1 else NO_VERSION))
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        return [outcome.value for outcome in outcomes]

    def when_dead(self, callback: Callable[[str], None]) -> None:
        self._watch.when_dead(callback)

    def pids(self) -> tuple[int, ...]:
        return (os.getpid(), *self._processes)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._watch.close()
        with contextlib.suppress(Exception):  # of an engine that is dead already; its processes end all the same
            asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result(_END_S)
        end_processes(self._processes, timeout_s=_END_S)
        remove_abandoned(self._segments)  # what vLLM's C++ part has made stays when one of its processes was killed
        self._end_loop()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_END_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on vLLM's loop, until it is done or a process of the engine is gone.

        Raises:
            ShardDied: a process has died, whatever the work waits for.
            ShardError: the engine is closed.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        if self._is_closed:
            work.close()
            raise ShardError("the engine is closed")
        call = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return self._watch.race(call)
        except EngineDeadError as error:
            raise ShardDied(self._watch.death or f"vLLM's engine is dead: {error}") from None
        finally:
            call.cancel()

    async def _complete(self, prompts: Sequence[Sequence[int]], sampling: SamplingSpec) -> list[Sample]:
        requests = enumerate(prompts_of(prompts))
        tasks = [asyncio.ensure_future(self._one(prompt, sampling_params(sampling, i))) for i, prompt in requests]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _one(self, prompt: Any, params: Any) -> Sample:
        """One request. Whoever comes in a pause waits for its end, and so does one that the pause has thrown out."""
        while True:
            await self._is_open.wait()
            pauses = self._pauses
            try:
                answers = self._llm.generate(prompt, params, f"request-{next(self._count)}")
                *_, output = [answer async for answer in answers]
            except Exception as error:
                if self._pauses > pauses and is_turned_away(error):
                    continue
                raise
            if output.outputs[0].finish_reason != "abort":
                return sample_of(output)
            if pauses == self._pauses:
                raise ShardError("vLLM aborted a request that nobody had asked it to")

    async def _run(self, blob: bytes, number: int) -> list[bytes]:
        """What our own worker call raises is never its own: it returns what went wrong."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            answers: list[bytes] = await self._llm.collective_rpc("elastic_refit_run", args=(blob, number))
        except EngineDeadError:
            raise
        except Exception as error:
            raise ShardError(f"vLLM could not call its workers: {error}") from error
        return answers

    async def _label(self, version: int) -> None:
        await self._llm.update_weight_version(str(version))

    async def _shut_down(self) -> None:
        from elastic_refit.engines.vllm_api import shut_down

        llm, self._llm = self._llm, None
        shut_down(llm)

    async def _pause(self) -> None:
        self._pauses += 1
        self._is_open.clear()
        # With its cache cleared, a request that goes on computes its past again with the new weights.
        await self._llm.pause_generation(mode=self._mode, clear_cache=True)

    async def _resume(self) -> None:
        await self._llm.resume_generation()
        self._is_open.set()


async def _start(arguments: Mapping[str, Any]) -> Any:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**{"disable_log_stats": True, **arguments}))


def fitting_options(options: dict[str, Any], width: int) -> dict[str, Any]:
    """The ranks of an engine are those of its tensor and pipeline parallelism; the first takes what is not said."""
    if options.get("data_parallel_size", 1) != 1:
        raise ConfigError("engine options: data_parallel_size must be 1: each replica is a shard of its own")
    stages = options.get("pipeline_parallel_size", 1)
    options.setdefault("tensor_parallel_size", width // stages)
    ranks = options["tensor_parallel_size"] * stages
    if ranks != width:
        raise ConfigError(
            f"engine options: tensor_parallel_size × pipeline_parallel_size is {ranks}, and fleet.widths says {width}",
            field="tensor_parallel_size",
        )
    return options
