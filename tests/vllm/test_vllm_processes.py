"""vLLM with processes of its own and two tensor-parallel ranks: the engine suite, and what only it can do."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from elastic_refit.engines.base import Hosting, PauseMode, Sample, SamplingSpec, WeightReceiver
from elastic_refit.engines.vllm_process import VllmProcessEngine
from elastic_refit.errors import ShardDied, ShardError
from elastic_refit.processes import is_living
from elastic_refit.shared_memory import mapped_by
from tests.engine_lab import EXACT, Lab, logprob_gap
from tests.engine_suite import *  # noqa: F403 - every test of the suite is one of this module
from tests.waiting import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")]

LONG = SamplingSpec(max_tokens=100, seed=4)
WAIT_S = 120.0


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One engine for all tests, in their order; the last one kills it."""
    lab = Lab(tmp_path_factory.mktemp("model"), "vllm", "qwen2", hosting=Hosting(width=2))
    yield lab
    lab.engine.close()
    if lab.fleet is not None:
        lab.fleet.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def engine_of(lab: Lab) -> VllmProcessEngine:
    assert isinstance(lab.engine, VllmProcessEngine)
    return lab.engine


def running(lab: Lab, threads: ThreadPoolExecutor, sampling: SamplingSpec = LONG) -> Future[list[Sample]]:
    """A generation that has begun and is not done."""
    generation = threads.submit(lab.engine.generate, [[7, 8, 9]] * 2, sampling)
    wait_until(lambda: engine_of(lab)._llm.get_num_unfinished_requests() > 0, WAIT_S)
    return generation


def pid_of(receiver: WeightReceiver) -> int:
    return os.getpid()


def block(receiver: WeightReceiver) -> None:
    threading.Event().wait()


def test_callers_are_batched_and_the_workers_answer_meanwhile(lab: Lab, threads: ThreadPoolExecutor) -> None:
    first = running(lab, threads)
    second = threads.submit(lab.engine.generate, [[1, 2]], SamplingSpec(max_tokens=1))
    workers = lab.engine.in_workers(pid_of)
    assert len(set(workers)) == 2
    assert set(workers) < set(lab.engine.pids())
    assert len(second.result(WAIT_S)[0].token_ids) == 1
    assert not first.done(), "the short request waited for the long ones"
    assert [len(sample.token_ids) for sample in first.result(WAIT_S)] == [100, 100]


def update_with_an_abort_inside(lab: Lab, threads: ThreadPoolExecutor) -> list[Sample]:
    """A refit that is rolled back half fed and begun again; what came in between is answered by the new version."""
    lab.step()
    lab.open()
    asked = threads.submit(lab.sample)
    lab.feed(0, lab.manifest.num_buckets // 2)
    lab.rollback()
    lab.open()
    lab.feed(0, lab.manifest.num_buckets)
    lab.finish()
    assert not asked.done()
    lab.engine.resume()
    samples = asked.result(WAIT_S)
    assert {sample.weight_version for sample in samples} == {lab.version}
    assert logprob_gap(lab.trainer, samples) < EXACT
    return samples


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_a_request_that_ran_is_of_one_version_and_one_that_came_in_a_refit_of_the_new_one(
    lab: Lab, threads: ThreadPoolExecutor, mode: PauseMode
) -> None:
    engine_of(lab)._mode = mode
    old = lab.version
    generation = running(lab, threads)
    update_with_an_abort_inside(lab, threads)
    samples = generation.result(WAIT_S)
    assert {sample.weight_version for sample in samples} == {old if mode == "wait" else lab.version}
    assert logprob_gap(lab.previous if mode == "wait" else lab.trainer, samples) < EXACT
    lab.require_exact()


def test_a_request_that_is_kept_across_a_refit_says_which_version_made_each_token(
    lab: Lab, threads: ThreadPoolExecutor
) -> None:
    engine_of(lab)._mode = "keep"
    mixed: list[Sample] = []
    while not mixed:
        generation = running(lab, threads)
        update_with_an_abort_inside(lab, threads)
        mixed = [sample for sample in generation.result(WAIT_S) if len(set(sample.token_versions)) > 1]
    engine_of(lab)._mode = "wait"
    for sample in mixed:
        cut = sample.token_versions.index(lab.version)
        assert sample.token_versions == (lab.version - 1,) * cut + (lab.version,) * (100 - cut)
        old = replace(sample, token_ids=sample.token_ids[:cut], logprobs=sample.logprobs[:cut])
        new = replace(
            sample,
            prompt_ids=sample.prompt_ids + sample.token_ids[:cut],
            token_ids=sample.token_ids[cut:],
            logprobs=sample.logprobs[cut:],
        )
        assert logprob_gap(lab.previous, [old]) < EXACT
        assert logprob_gap(lab.trainer, [new]) < EXACT
    lab.require_exact()


def test_a_stock_finish_of_an_incomplete_update_labels_nothing_and_no_older_answer_is_taken_for_one(lab: Lab) -> None:
    """A worker call that raises leaves the other rank's answers one call behind: vLLM's own, and it stays so."""
    engine = engine_of(lab)
    lab.open()
    with pytest.raises(Exception, match="missing"):
        engine._call(engine._llm.finish_weight_update("8"))
    assert engine._call(engine._llm.get_weight_version()) == str(lab.version)
    with pytest.raises(ShardError, match="missing"):
        lab.engine.in_workers(pid_of)
    for _ in range(2):
        with pytest.raises(ShardError, match="older call"):
            lab.engine.in_workers(pid_of)


def test_the_death_of_one_rank_is_noticed_in_flight_and_nobody_is_left(lab: Lab, threads: ThreadPoolExecutor) -> None:
    engine, told = engine_of(lab), Future[str]()
    engine.when_dead(told.set_result)
    lab.engine.pause()
    waiting = threads.submit(lab.sample)
    blocked = threads.submit(lab.engine.in_workers, block)
    processes = [psutil.Process(pid) for pid in engine.pids()[1:]]
    segments = mapped_by(engine.pids()[1:])
    assert any("cpushm" in segment for segment in segments), "what vLLM's C++ part has made"
    core, victim = processes[0], processes[-1]
    assert core.ppid() == os.getpid()
    victim.kill()
    for call in (blocked, waiting):
        with pytest.raises(ShardDied):
            call.result(timeout=20)
    assert told.result(timeout=20)
    lab.engine.close()
    with pytest.raises(ShardError, match="closed"):
        lab.sample()
    assert not any(map(is_living, processes))
    assert not [segment for segment in segments if Path(segment).exists()]
