"""A mixture of experts on the CPU, where vLLM's own reload leaves the experts unpacked and the logits wrong."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from elastic_refit.core.manifest import build_manifest
from elastic_refit.demo.tiny_model import make_tiny_model
from elastic_refit.engines.base import SamplingSpec, ShardEngine
from elastic_refit.engines.checkpoint import layer_order
from elastic_refit.engines.registry import build_engine
from elastic_refit.transports.packing import tensor_specs
from tests.engine_lab import (
    BUCKET_BYTES,
    EXACT,
    INLINE,
    PROMPTS,
    STALE,
    VLLM_OPTIONS,
    begin,
    feed,
    finish,
    logprob_gap,
)

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")]


@pytest.fixture
def engines() -> Iterator[list[ShardEngine]]:
    """Whatever is put here is closed."""
    engines: list[ShardEngine] = []
    yield engines
    for engine in engines:
        engine.close()


def make_mixture(folder: Path, seed: int) -> torch.nn.Module:
    """A tiny mixture of experts, whose checkpoint names its tensors otherwise than the model does."""
    from transformers import AutoModelForCausalLM, MixtralConfig

    tiny = make_tiny_model(folder, family="llama", seed=seed)  # for its tokenizer
    config = MixtralConfig(
        vocab_size=tiny.vocab_size,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
        num_local_experts=4,
        eos_token_id=tiny.eos_token_id,
        bos_token_id=None,
        pad_token_id=tiny.eos_token_id - 1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)  # type: ignore[operator]
    return model


def test_a_mixture_of_experts_takes_its_tensors_by_their_checkpoint_names_and_packs_them_anew(
    engines: list[ShardEngine], tmp_path: Path
) -> None:
    models: list[Any] = [make_mixture(tmp_path / name, seed) for seed, name in enumerate(("old", "new"))]
    engine = build_engine("vllm", str(tmp_path / "old"), VLLM_OPTIONS, hosting=INLINE)
    engines.append(engine)
    sampling = SamplingSpec(max_tokens=16, seed=3)
    assert logprob_gap(models[0], engine.generate(PROMPTS, sampling)) < EXACT
    for version, name in ((1, "new"), (2, "old")):
        tensors = load_file(tmp_path / name / "model.safetensors")
        assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in tensors
        items = sorted(tensors.items(), key=lambda item: layer_order(item[0]))
        engine.pause()
        engine.in_workers(partial(begin, build_manifest(tensor_specs(items), BUCKET_BYTES)))
        engine.in_workers(partial(feed, [items[start : start + 5] for start in range(0, len(items), 5)]))
        engine.in_workers(partial(finish, version))
        engine.resume()
        samples = engine.generate(PROMPTS, sampling)
        assert {sample.weight_version for sample in samples} == {version}
        assert logprob_gap(models[version % 2], samples) < EXACT
        assert logprob_gap(models[1 - version % 2], samples) > STALE
