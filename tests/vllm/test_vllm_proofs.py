"""Proof on one small bfloat16 engine: bit for bit what a fresh one does, never a corrupted bucket, flat memory."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from elastic_refit.core.ids import ShardId, TrainerId
from elastic_refit.core.messages import Fault, Received
from elastic_refit.engines.base import NO_VERSION, Sample, ShardEngine
from elastic_refit.engines.registry import build_engine
from elastic_refit.errors import ShardError
from elastic_refit.transports.base import HeldWeights, Packing
from tests.engine_lab import BUCKET_BYTES, INLINE, VLLM_OPTIONS, Lab
from tests.refit_group import Group, digests_sent

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")]

BFLOAT16 = {**VLLM_OPTIONS, "dtype": "bfloat16"}
REFITS, WARM_UP = 50, 20
FLAT_BYTES = 8 << 20
"""Less than six of the model's 1.4 MB: a leak of one copy per refit, or per abort, would be more."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab(tmp_path_factory.mktemp("model"), "vllm", "qwen2", tie_embeddings=True, options=BFLOAT16)
    yield lab
    lab.engine.close()


@pytest.fixture(scope="module")
def fresh() -> Iterator[list[ShardEngine]]:
    """Engines beside the lab's. Closing one ends what all engines of a process share, so all are closed at the end."""
    engines: list[ShardEngine] = []
    yield engines
    for engine in engines:
        engine.close()


def of_a_fresh_engine(lab: Lab, folder: Path, fresh: list[ShardEngine]) -> list[Sample]:
    """What an engine says that is loaded from the trainer's weights as they are."""
    lab.trainer.save_pretrained(folder)
    fresh.append(build_engine("vllm", str(folder), BFLOAT16, hosting=INLINE, initial_version=lab.version))
    return lab.sample_from(fresh[-1])


def abort(lab: Lab, cut: int) -> None:
    """A refit that is rolled back after ``cut`` buckets."""
    lab.step()
    lab.open()
    lab.feed(0, cut)
    lab.rollback()
    lab.engine.resume()


def test_in_bfloat16_tokens_and_logprobs_are_bit_for_bit_those_of_a_fresh_engine(
    lab: Lab, fresh: list[ShardEngine], tmp_path: Path
) -> None:
    before = lab.sample()
    lab.update()
    after = lab.sample()
    assert [sample.logprobs for sample in after] != [sample.logprobs for sample in before]
    assert after == of_a_fresh_engine(lab, tmp_path / "whole", fresh)
    abort(lab, lab.cuts()[1])
    lab.update()
    assert lab.sample() == of_a_fresh_engine(lab, tmp_path / "recovered", fresh)


def test_a_corrupted_bucket_is_never_served(lab: Lab) -> None:
    lab.step()
    group, old = Group(shards=1), lab.version - 1
    group.workers[ShardId(0)] = lab.engine.in_worker
    group.packing = Packing(BUCKET_BYTES)
    group.weights = HeldWeights({name: p.detach() for name, p in lab.trainer.named_parameters()})
    lab.engine.pause()
    answers, _ = group.transfer(group.build(1, [0]), lab.version)
    sent = digests_sent(answers)
    assert answers[ShardId(0)] == Received(sent)
    refused = group.commit(0, 1, lab.version, (*sent[:-1], sent[-1] ^ 1))
    assert isinstance(refused, Fault)
    assert "DigestMismatch" in refused.sentence
    assert group.members[ShardId(0)].serving_version is None
    with pytest.raises(ShardError, match="update is open"):
        lab.engine.resume()
    group.settle(TrainerId(0), 1)
    assert group.settle(ShardId(0), 1, version=lab.version, roll_back=True).serving_version is None
    lab.engine.resume()
    assert {sample.weight_version for sample in lab.sample()} == {NO_VERSION}
    assert old != NO_VERSION
    group.close()


def test_fifty_refits_with_one_aborted_in_three_leave_memory_flat(lab: Lab) -> None:
    resident = {}
    for number in range(REFITS):
        if number % 3 == 0:
            abort(lab, lab.cuts()[number % 4])
        lab.update()
        if number in (WARM_UP, REFITS - 1):
            gc.collect()
            resident[number] = psutil.Process(os.getpid()).memory_info().rss
    assert resident[REFITS - 1] - resident[WARM_UP] < FLAT_BYTES
    assert torch.isfinite(torch.tensor(lab.sample()[0].logprobs)).all()
