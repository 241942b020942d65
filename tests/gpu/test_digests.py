"""A bucket on a GPU and its copy on a CPU have one digest."""

from __future__ import annotations

import pytest
import torch

from elastic_refit.transports.digests import digest_bucket

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("size", [1, 9, 128 * 1024, 1_000_003])
def test_sum64_is_the_same_on_a_gpu_and_on_a_cpu(size: int) -> None:
    bucket = torch.randint(0, 256, (size,), dtype=torch.uint8)
    assert digest_bucket(bucket.cuda(), "sum64") == digest_bucket(bucket, "sum64")
