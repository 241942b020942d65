"""What is vLLM's own: the stock weight-transfer API with our backend, refused options, requests that were left over."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_refit.core.manifest import build_manifest
from elastic_refit.demo.tiny_model import load_trainer_model, make_tiny_model
from elastic_refit.engines.base import SamplingSpec
from elastic_refit.engines.registry import build_engine
from elastic_refit.engines.vllm_engine import VllmEngine
from elastic_refit.errors import ConfigError, PlanMismatch, TransportError
from elastic_refit.transports.packing import tensor_specs
from tests.engine_lab import EXACT, INLINE, PROMPTS, VLLM_OPTIONS, Lab, logprob_gap

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_tiny_model(directory, family="llama", seed=11)
    return directory


class Stock:
    """A plain ``vllm.LLM`` that knows of us by the backend's name alone, and weights to send to it."""

    def __init__(self, directory: Path) -> None:
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        from elastic_refit.engines.vllm_worker import register

        register()
        register()
        self.llm: Any = LLM(
            model=str(directory), weight_transfer_config=WeightTransferConfig(backend="elastic_refit"), **VLLM_OPTIONS
        )
        self.trainer = load_trainer_model(directory)
        self.weights = [(name, tensor.detach()) for name, tensor in self.trainer.named_parameters()]
        self.llm.init_weight_transfer_engine(
            {"init_info": {"manifest": build_manifest(tensor_specs(self.weights), 1 << 18).to_dict()}}
        )

    def send(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        self.llm.update_weights({"update_info": {"tensors": [(name, tensor.clone()) for name, tensor in tensors]}})

    def logits_gap(self) -> float:
        """Between the engine's and the trainer's log-probability of one greedy token."""
        from vllm import SamplingParams, TokensPrompt

        self.llm.reset_prefix_cache()
        (output,) = self.llm.generate(
            [TokensPrompt(prompt_token_ids=[3, 1, 4])],
            SamplingParams(max_tokens=1, temperature=0, logprobs=0),
            use_tqdm=False,
        )
        (token,) = output.outputs[0].token_ids
        with torch.no_grad():
            policy = torch.log_softmax(self.trainer(input_ids=torch.tensor([[3, 1, 4]])).logits[0, -1].float(), dim=-1)
        return abs(float(policy[token]) - float(output.outputs[0].logprobs[0][token].logprob))


@pytest.fixture(scope="module")
def stock(directory: Path) -> Iterator[Stock]:
    stock = Stock(directory)
    yield stock
    stock.llm.llm_engine.engine_core.shutdown()


def test_the_stock_update_api_finds_the_backend_and_applies_and_labels_a_whole_update(stock: Stock) -> None:
    with torch.no_grad():
        for _, tensor in stock.weights:
            tensor.mul_(1.1)
    assert stock.logits_gap() > EXACT
    stock.llm.start_weight_update()
    for start in range(0, len(stock.weights), 5):
        stock.send(stock.weights[start : start + 5])
    stock.llm.finish_weight_update("7")
    assert stock.llm.get_weight_version() == "7"
    assert stock.logits_gap() < EXACT


def test_the_stock_finish_of_an_incomplete_update_raises_and_never_labels(stock: Stock) -> None:
    before = stock.llm.get_weight_version()
    stock.llm.start_weight_update()
    stock.send(stock.weights[:-1])
    with pytest.raises(TransportError, match="1 tensors are missing"):
        stock.llm.finish_weight_update("8")
    assert stock.llm.get_weight_version() == before
    stock.send(stock.weights[-1:])
    stock.llm.finish_weight_update("8")
    assert stock.llm.get_weight_version() == "8"
    assert stock.logits_gap() < EXACT


@pytest.mark.parametrize("name", ["model.layers.9.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"])
def test_after_a_refused_chunk_the_engine_runs_and_takes_the_next_update(stock: Stock, name: str) -> None:
    """The first name is of no model, and ours to refuse; the second has another shape, and vLLM refuses it."""
    stock.llm.start_weight_update()
    stock.send(stock.weights[:4])
    with pytest.raises((PlanMismatch, AssertionError, RuntimeError)):
        stock.send([(name, torch.zeros(2, 2))])
    with pytest.raises(RuntimeError, match="without a matching start"):
        stock.llm.finish_weight_update("9")
    assert math.isfinite(stock.logits_gap())
    stock.llm.start_weight_update()
    stock.send(stock.weights)
    stock.llm.finish_weight_update("9")
    assert stock.logits_gap() < EXACT


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab(tmp_path_factory.mktemp("model"), "vllm", "qwen2")
    yield lab
    lab.engine.close()


def test_requests_of_a_generation_that_broke_do_not_haunt_the_next(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(lab.engine, VllmEngine)
    engine = lab.engine._llm.llm_engine
    step, steps = engine.step, iter(range(100))

    def breaking() -> Any:
        if next(steps) == 2:
            raise RuntimeError("struck")
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(engine, "step", breaking)
        with pytest.raises(RuntimeError, match="struck"):
            lab.sample()
    assert not engine.has_unfinished_requests()
    lab.require_exact()
    lab.update()
    lab.require_exact()


def test_a_half_fed_update_that_is_rolled_back_leaves_no_parameter_without_memory(lab: Lab) -> None:
    assert isinstance(lab.engine, VllmEngine)
    for cut in lab.cuts():
        lab.step()
        lab.open()
        lab.feed(0, cut)
        lab.rollback()
        (on_meta,) = lab.engine._llm.apply_model(
            lambda model: [name for name, tensor in model.named_parameters() if tensor.is_meta]
        )
        assert on_meta == []
    lab.update()
    lab.require_exact()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size must be 1"),
        ({"worker_extension_cls": "mine.Extension"}, "'worker_extension_cls' is set by elastic-refit"),
    ],
)
def test_an_option_that_cannot_be_used_is_named(options: dict[str, Any], words: str, directory: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        build_engine("vllm", str(directory), options, hosting=INLINE)


def test_an_engine_outside_its_process_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(ConfigError, match="VLLM_ENABLE_V1_MULTIPROCESSING must be 0"):
        build_engine("vllm", str(directory), {}, hosting=INLINE)


def test_the_initial_version_labels_samples_until_the_first_update(directory: Path) -> None:
    engine = build_engine("vllm", str(directory), VLLM_OPTIONS, hosting=INLINE, initial_version=41)
    try:
        samples = engine.generate(PROMPTS, SamplingSpec(max_tokens=4, seed=1))
        assert {sample.weight_version for sample in samples} == {41}
        assert logprob_gap(load_trainer_model(directory), samples) < EXACT
    finally:
        engine.close()
