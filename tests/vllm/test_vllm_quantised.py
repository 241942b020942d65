"""A quantised engine: int8 weights and scales as the trainer quantises them, packed anew by each refit.

On a CPU vLLM multiplies int8 by packed copies that it makes when a layer has its weights, and forgets the originals.
(Its online fp8 has no CPU kernel in 0.32: ``static_scaled_fp8_quant`` takes no arguments there.)
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from elastic_refit.core.manifest import build_manifest
from elastic_refit.demo.tiny_model import make_tiny_model
from elastic_refit.engines.base import NO_VERSION, Sample, SamplingSpec, ShardEngine
from elastic_refit.engines.checkpoint import layer_order
from elastic_refit.engines.registry import build_engine
from elastic_refit.errors import PlanMismatch, TransportError
from elastic_refit.transports.base import NamedTensors
from elastic_refit.transports.packing import BucketUnpacker, tensor_specs
from tests.engine_lab import BUCKET_BYTES, INLINE, PROMPTS, VLLM_OPTIONS, begin, carried, feed, finish, rollback

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")]

INT8 = {**VLLM_OPTIONS, "dtype": "bfloat16"}
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SCHEME = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}
"""The checkpoint format of llm-compressor's W8A8: one scale per output channel, activations quantised as they come."""


def quantise(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Linear layers as int8 and one scale per row, in bfloat16 as everything else."""
    quantised = {}
    for name, tensor in tensors.items():
        if name.endswith(tuple(f"{layer}.weight" for layer in LINEAR)):
            scale = tensor.abs().amax(dim=1, keepdim=True).clamp(min=1e-8) / 127
            quantised[name] = (tensor / scale).round().clamp(-127, 127).to(torch.int8)
            quantised[f"{name}_scale"] = scale.to(torch.bfloat16)
        else:
            quantised[name] = tensor.to(torch.bfloat16)
    return quantised


def make_quantised(folder: Path, seed: int) -> list[tuple[str, torch.Tensor]]:
    """A checkpoint in ``folder``; returns its tensors in the order of the layers."""
    make_tiny_model(folder, family="qwen2", seed=seed, tie_embeddings=False)
    path, config = folder / "model.safetensors", folder / "config.json"
    tensors = quantise(load_file(path))
    save_file(tensors, path, metadata={"format": "pt"})
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": SCHEME}))
    return sorted(tensors.items(), key=lambda item: layer_order(item[0]))


@dataclass(frozen=True)
class Pair:
    """An engine that began with other weights than the trainer's, and one that was loaded from the trainer's."""

    engine: ShardEngine
    trained: list[tuple[str, torch.Tensor]]
    expected: list[Sample]

    def begin(self, items: Sequence[tuple[str, torch.Tensor]]) -> list[NamedTensors]:
        """Open an update of ``items``; returns what each bucket completes, after the way through bytes."""
        manifest = build_manifest(tensor_specs(items), BUCKET_BYTES)
        self.engine.pause()
        self.engine.in_workers(partial(begin, manifest))
        return carried(dict(items), manifest, BucketUnpacker(manifest), range(manifest.num_buckets))

    def feed(self, fed: Sequence[NamedTensors]) -> None:
        self.engine.in_workers(partial(feed, fed))

    def finish(self) -> None:
        self.engine.in_workers(partial(finish, 1))
        self.engine.resume()

    def roll_back(self) -> None:
        self.engine.in_workers(rollback)
        self.engine.resume()


def sample(engine: ShardEngine) -> list[Sample]:
    return engine.generate(PROMPTS, SamplingSpec(max_tokens=16, seed=3))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Closing an engine ends what all engines of a process share, so both are closed at the end."""
    folder, engines = tmp_path_factory.mktemp("quantised"), []
    trained = [make_quantised(folder / name, seed) for seed, name in enumerate(("old", "new"))][1]
    for name in ("old", "new"):
        engines.append(build_engine("vllm", str(folder / name), INT8, hosting=INLINE, initial_version=1))
    pair = Pair(engines[0], trained, sample(engines[1]))
    assert [each.logprobs for each in sample(pair.engine)] != [each.logprobs for each in pair.expected]
    yield pair
    for engine in engines:
        engine.close()


def test_the_engine_multiplies_by_int8(pair: Pair) -> None:
    (kinds,) = pair.engine.in_workers(linear_weights)
    assert kinds == {torch.int8}


def linear_weights(receiver: Any) -> set[torch.dtype]:
    """The types in which the linear layers of a worker hold their weights."""
    layers = receiver._worker.model_runner.model.model.named_modules()
    return {layer.weight.dtype for name, layer in layers if name.endswith("_proj")}


def test_a_refit_of_int8_weights_and_scales_is_bit_for_bit_a_fresh_engine(pair: Pair) -> None:
    pair.feed(pair.begin(pair.trained))
    pair.finish()
    assert sample(pair.engine) == pair.expected


def test_after_an_abort_a_whole_refit_is_bit_for_bit_a_fresh_engine(pair: Pair) -> None:
    fed = pair.begin(pair.trained)
    pair.feed(fed[: len(fed) // 2])
    pair.roll_back()
    assert {each.weight_version for each in sample(pair.engine)} == {NO_VERSION}
    pair.feed(pair.begin(pair.trained))
    pair.finish()
    assert sample(pair.engine) == pair.expected


@pytest.mark.parametrize("lacking", [".weight_scale", "layers.1.self_attn.k_proj.weight_scale", "k_proj.weight"])
def test_a_layer_without_a_scale_or_a_part_is_not_served(pair: Pair, lacking: str) -> None:
    pair.feed(pair.begin([item for item in pair.trained if not item[0].endswith(lacking)]))
    with pytest.raises(TransportError, match=r"has not all weights of model\.layers"):
        pair.finish()
    pair.roll_back()
    pair.feed(pair.begin(pair.trained))
    pair.finish()
    assert sample(pair.engine) == pair.expected


def test_weights_that_nobody_quantised_are_refused_before_anything_is_touched(pair: Pair) -> None:
    plain = [(name, tensor.to(torch.bfloat16)) for name, tensor in pair.trained if not name.endswith("_scale")]
    with pytest.raises(PlanMismatch, match="is int8, and nothing that is pushed is"):
        pair.begin(plain)
    pair.engine.resume()
    assert sample(pair.engine) == pair.expected
