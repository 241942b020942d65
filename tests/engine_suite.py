"""What every engine promises: the suite that a new one must pass.

A test module imports ``*`` from here, gives a fixture ``lab`` of module scope, and ends with a test that calls
:func:`close_and_be_refused`. Each test leaves the engine serving the trainer's version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from elastic_refit.core.events import CommitMode
from elastic_refit.core.ids import ShardId, TrainerId
from elastic_refit.core.manifest import Manifest, build_manifest
from elastic_refit.engines.base import NO_VERSION, SamplingSpec, WeightReceiver
from elastic_refit.errors import DigestMismatch, PlanMismatch, ShardError, TransportError
from elastic_refit.transports.base import HeldWeights, Packing
from elastic_refit.transports.packing import tensor_specs
from tests.engine_lab import BUCKET_BYTES, EXACT, PROMPTS, Lab, feed, logprob_gap
from tests.refit_group import Group
from tests.waiting import wait_until
from tests.wide_fleet import WideFleet

__all__ = [
    "close_and_be_refused",
    "test_a_completion_ends_with_the_end_token_unless_it_is_ignored",
    "test_a_manifest_without_all_weights_of_the_model_never_becomes_a_version",
    "test_a_new_engine_serves_the_checkpoint_as_its_initial_version",
    "test_a_refit_that_breaks_off_and_is_taken_up_again_is_exact_in_both_commits",
    "test_a_request_during_an_update_waits_and_is_answered_by_the_new_version",
    "test_a_rollback_before_the_first_tensor_leaves_the_old_version_whole",
    "test_a_tensor_is_taken_once_and_only_if_it_is_of_this_update",
    "test_after_a_rollback_the_engine_runs_is_of_no_version_and_takes_a_whole_update",
    "test_an_aborted_update_can_be_fed_on_and_is_exact_wherever_it_was_cut",
    "test_an_empty_prompt_is_the_callers_mistake_and_the_engine_goes_on",
    "test_an_incomplete_update_can_neither_be_finished_nor_served",
    "test_an_update_that_broke_off_inside_a_tensor_can_only_be_rolled_back",
    "test_functions_in_the_workers_run_one_at_a_time",
    "test_logprobs_are_those_of_the_policy_at_temperature_one",
    "test_no_prompts_give_no_samples",
    "test_pausing_and_resuming_twice_is_the_same_as_once",
    "test_samples_come_in_the_order_of_their_prompts",
    "test_seeded_sampling_repeats_and_equal_prompts_get_different_completions",
    "test_two_updates_each_make_the_engine_equal_the_trainer",
    "test_what_a_function_in_the_workers_returns_or_raises_arrives_at_the_caller",
]


def test_a_new_engine_serves_the_checkpoint_as_its_initial_version(lab: Lab) -> None:
    lab.require_exact()


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
def test_logprobs_are_those_of_the_policy_at_temperature_one(lab: Lab, temperature: float) -> None:
    assert logprob_gap(lab.trainer, lab.sample(temperature)) < EXACT


def test_seeded_sampling_repeats_and_equal_prompts_get_different_completions(lab: Lab) -> None:
    first = lab.sample(seed=5)
    assert first == lab.sample(seed=5)
    assert first != lab.sample(seed=6)
    assert PROMPTS[0] == PROMPTS[1]
    assert first[0].token_ids != first[1].token_ids


def test_samples_come_in_the_order_of_their_prompts(lab: Lab) -> None:
    assert [list(sample.prompt_ids) for sample in lab.sample()] == PROMPTS


def test_a_completion_ends_with_the_end_token_unless_it_is_ignored(lab: Lab) -> None:
    eos, prompts, stopped = lab.trainer.config.eos_token_id, [[7]] * 16, 0
    for seed in range(4):
        ignoring = lab.engine.generate(prompts, SamplingSpec(max_tokens=48, seed=seed))
        heeding = lab.engine.generate(prompts, SamplingSpec(max_tokens=48, seed=seed, ignore_eos=False))
        for full, sample in zip(ignoring, heeding, strict=True):
            end = full.token_ids.index(eos) + 1 if eos in full.token_ids else 48
            assert len(full.token_ids) == 48
            assert sample.token_ids == full.token_ids[:end]
            assert len(sample.logprobs) == end
            stopped += end < 48
    assert stopped, "no sample met the end token: nothing was tested"


def test_no_prompts_give_no_samples(lab: Lab) -> None:
    assert lab.engine.generate([], SamplingSpec(max_tokens=4)) == []


def test_an_empty_prompt_is_the_callers_mistake_and_the_engine_goes_on(lab: Lab) -> None:
    with pytest.raises(ValueError, match="prompt"):
        lab.engine.generate([[1, 2], []], SamplingSpec(max_tokens=4))
    lab.require_exact()


def test_two_updates_each_make_the_engine_equal_the_trainer(lab: Lab) -> None:
    for _ in range(2):
        lab.update()
        lab.require_exact()


def test_a_request_during_an_update_waits_and_is_answered_by_the_new_version(lab: Lab) -> None:
    lab.step()
    lab.open()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lab.sample)
        lab.feed(0, lab.manifest.num_buckets)
        lab.finish()
        assert not answer.done()
        lab.engine.resume()
        samples = answer.result(timeout=60)
    assert {sample.weight_version for sample in samples} == {lab.version}
    assert logprob_gap(lab.trainer, samples) < EXACT


def test_pausing_and_resuming_twice_is_the_same_as_once(lab: Lab) -> None:
    lab.engine.pause()
    lab.engine.pause()
    lab.engine.resume()
    lab.engine.resume()
    lab.require_exact()


def rank_of(receiver: WeightReceiver) -> int:
    return receiver.rank


def mismatch(receiver: WeightReceiver) -> None:
    raise DigestMismatch(f"bucket 3 differs at rank {receiver.rank}", bucket=3)


def test_what_a_function_in_the_workers_returns_or_raises_arrives_at_the_caller(lab: Lab) -> None:
    assert lab.engine.in_workers(rank_of) == list(range(lab.engine.width))
    assert lab.engine.in_worker(rank_of) == 0
    with pytest.raises(DigestMismatch, match="rank 0") as caught:
        lab.engine.in_workers(mismatch)
    assert caught.value.bucket == 3
    lab.require_exact()


def wait_inside(folder: Path, receiver: WeightReceiver) -> None:
    (folder / f"inside {receiver.rank}").touch()
    wait_until((folder / "leave").exists, 60)


def was_left(folder: Path, receiver: WeightReceiver) -> bool:
    return (folder / "leave").exists()


def test_functions_in_the_workers_run_one_at_a_time(lab: Lab, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(lab.engine.in_workers, partial(wait_inside, tmp_path))
        for rank in range(lab.engine.width):
            wait_until((tmp_path / f"inside {rank}").exists, 60)
        second = pool.submit(lab.engine.in_workers, partial(was_left, tmp_path))
        assert not second.done()
        (tmp_path / "leave").touch()
        first.result(timeout=60)
        assert all(second.result(timeout=60))


def test_an_aborted_update_can_be_fed_on_and_is_exact_wherever_it_was_cut(lab: Lab) -> None:
    for cut in lab.cuts():
        lab.step()
        lab.open()
        lab.feed(0, cut)
        lab.feed(cut, lab.manifest.num_buckets)
        lab.finish()
        lab.engine.resume()
        lab.require_exact()


def test_an_incomplete_update_can_neither_be_finished_nor_served(lab: Lab) -> None:
    lab.step()
    lab.open()
    lab.feed(0, lab.manifest.num_buckets - 1)
    with pytest.raises(TransportError, match="missing"):
        lab.finish()
    with pytest.raises(ShardError, match="update is open"):
        lab.engine.resume()
    lab.feed(lab.manifest.num_buckets - 1, lab.manifest.num_buckets)
    lab.finish()
    lab.engine.resume()
    lab.require_exact()


def test_a_tensor_is_taken_once_and_only_if_it_is_of_this_update(lab: Lab) -> None:
    name, tensor = next(iter(lab.trainer.named_parameters()))

    def feed_alone(name: str) -> None:
        lab.engine.in_workers(partial(feed, [[(name, tensor.detach().clone())]]))

    with pytest.raises(PlanMismatch, match="no update is open"):
        feed_alone(name)
    lab.step()
    lab.open()
    lab.feed(0, lab.manifest.num_buckets)
    for wrong in (name, "model.layers.7.mlp.up_proj.weight"):
        with pytest.raises(PlanMismatch, match=wrong):
            feed_alone(wrong)
    with pytest.raises(PlanMismatch, match="open"):
        lab.open()
    lab.finish()
    lab.engine.resume()
    lab.require_exact()


def test_an_update_that_broke_off_inside_a_tensor_can_only_be_rolled_back(lab: Lab) -> None:
    name, parameter = next(iter(lab.trainer.named_parameters()))
    lab.step()
    lab.open()
    with pytest.raises((AssertionError, RuntimeError)):
        lab.engine.in_workers(partial(feed, [[(name, parameter.detach()[:5].clone())]]))
    with pytest.raises(PlanMismatch, match="rolled back"):
        lab.feed(0, lab.manifest.num_buckets)
    lab.rollback()
    lab.engine.resume()
    assert {sample.weight_version for sample in lab.sample()} == {NO_VERSION}
    lab.update()
    lab.require_exact()


def test_a_rollback_before_the_first_tensor_leaves_the_old_version_whole(lab: Lab) -> None:
    lab.open()
    lab.rollback()
    lab.rollback()
    lab.engine.resume()
    lab.require_exact()


def test_after_a_rollback_the_engine_runs_is_of_no_version_and_takes_a_whole_update(lab: Lab) -> None:
    for cut in lab.cuts():
        lab.step()
        lab.open()
        lab.feed(0, cut)
        lab.rollback()
        lab.engine.resume()
        assert {sample.weight_version for sample in lab.sample()} == {NO_VERSION}
        lab.update()
        lab.require_exact()


def test_a_manifest_without_all_weights_of_the_model_never_becomes_a_version(lab: Lab) -> None:
    for left_out in ("layers.1.self_attn.k_proj.weight", "layers.0.mlp.down_proj.weight", "embed_tokens.weight"):
        parameters = [(name, p) for name, p in lab.trainer.named_parameters() if not name.endswith(left_out)]
        manifest = build_manifest(tensor_specs(parameters), 1 << 20)
        with pytest.raises(TransportError):  # when it is noticed is the engine's affair
            whole_update_with(lab, manifest)
        lab.rollback()
        lab.engine.resume()
        assert {sample.weight_version for sample in lab.sample()} <= {NO_VERSION, lab.version}
        lab.update()
        lab.require_exact()


def whole_update_with(lab: Lab, manifest: Manifest) -> None:
    lab.open(manifest)
    lab.feed(0, manifest.num_buckets, manifest)
    lab.finish()


class InlineShard:
    """The lab's engine as the only shard of a group in this process."""

    def __init__(self, lab: Lab, commit: CommitMode) -> None:
        self._lab = lab
        self._group = Group(shards=1, commit=commit)
        self._group.workers[ShardId(0)] = lab.engine.in_worker
        self._group.packing = Packing(BUCKET_BYTES)

    def break_off(self) -> int:
        """A refit of the lab's version that the trainer breaks off in the middle; through which bucket it came."""
        group, version = self._group, self._lab.version
        group.weights = BreakingWeights(self._lab, lambda: group.applied(ShardId(0)))
        self._lab.engine.pause()
        group.transfer(group.build(1, [0]), version)
        group.settle(TrainerId(0), 1)
        return group.settle(ShardId(0), 1, version=version).applied_through

    def retry(self, through: int) -> None:
        self._lab.engine.pause()
        self._group.refit(self._lab.version, epoch=2, shards=[0], start=through + 1)
        self._group.close()


class WorkerShard:
    """The same, of an engine with workers: its participants are where its ranks are."""

    def __init__(self, lab: Lab, commit: CommitMode) -> None:
        self._lab = lab
        self._commit: CommitMode = commit
        if lab.fleet is None:  # a worker takes its seat once
            lab.fleet = WideFleet(lab.engine, lab.directory, Packing(BUCKET_BYTES))
        self._fleet = lab.fleet

    def break_off(self) -> int:
        fleet, version = self._fleet, self._lab.version
        self._weights = BreakingWeights(self._lab, lambda: fleet.beacon().applied)
        fleet.build()
        for each in fleet.transfer(fleet.ready(version, self._weights, commit=self._commit)):
            each.result(timeout=60)
        return fleet.settle(version).applied_through

    def retry(self, through: int) -> None:
        self._fleet.refit(self._lab.version, self._weights, start=through + 1, commit=self._commit)


class BreakingWeights(HeldWeights):
    """The lab's trainer, which breaks once in the middle, when the shard has taken two buckets."""

    def __init__(self, lab: Lab, applied: Callable[[], int]) -> None:
        super().__init__({name: parameter.detach() for name, parameter in lab.trainer.named_parameters()})
        self._breaks_at: str | None = list(self.tensors)[len(self.tensors) // 2]
        self._applied = applied

    def materialize(self, names: Sequence[str]) -> Mapping[str, torch.Tensor]:
        if self._breaks_at in names:
            self._breaks_at = None
            wait_until(lambda: self._applied() >= 1, 30)
            raise RuntimeError("no more weights for now")
        return super().materialize(names)


@pytest.mark.parametrize("commit", ["streamed", "staged"])
def test_a_refit_that_breaks_off_and_is_taken_up_again_is_exact_in_both_commits(lab: Lab, commit: CommitMode) -> None:
    before, old = lab.sample(), lab.version
    lab.step()
    shard = (WorkerShard if lab.engine.has_workers else InlineShard)(lab, commit)
    through = shard.break_off()
    assert through >= 1
    if commit == "staged":
        lab.engine.resume()
        assert lab.sample() == before
        assert {sample.weight_version for sample in before} == {old}
    shard.retry(through)
    lab.engine.resume()
    lab.require_exact()


def close_and_be_refused(lab: Lab) -> None:
    """The last test of a case: it ends the engine."""
    assert len(lab.engine.pids()) >= 1
    lab.engine.pause()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lab.sample)
        lab.engine.close()
        with pytest.raises(ShardError, match="closed"):
            waiting.result(timeout=60)
    with pytest.raises(ShardError, match="closed"):
        lab.sample()
    lab.engine.close()
