"""The demo's model: the same for every seed, complete, and refused in one sentence where it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from elastic_refit.core.manifest import build_manifest
from elastic_refit.demo.tiny_model import Family, load_trainer_model, make_tiny_model
from elastic_refit.engines.checkpoint import checkpoint_tensor_specs, layer_order
from elastic_refit.errors import ConfigError
from elastic_refit.transports.packing import tensor_specs

MODELS = pytest.mark.parametrize(("family", "tied"), [("qwen2", False), ("qwen2", True), ("llama", False)])


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen")
    make_tiny_model(directory, family="qwen2", seed=1)
    return directory


def test_one_seed_gives_one_model_and_another_seed_another(qwen: Path, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "same", family="qwen2", seed=1)
    make_tiny_model(tmp_path / "other", family="qwen2", seed=2)
    weights = (qwen / "model.safetensors").read_bytes()
    assert (tmp_path / "same" / "model.safetensors").read_bytes() == weights
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != weights


def test_making_a_model_leaves_the_callers_random_numbers_alone(tmp_path: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    make_tiny_model(tmp_path, family="llama", seed=1)
    assert torch.equal(torch.rand(1), expected)


@MODELS
def test_the_trainers_parameters_are_the_tensors_of_the_checkpoint(family: Family, tied: bool, tmp_path: Path) -> None:
    made = make_tiny_model(tmp_path, family=family, seed=1, tie_embeddings=tied)
    model = load_trainer_model(tmp_path)
    specs = checkpoint_tensor_specs(tmp_path)
    assert sorted(tensor_specs(model.named_parameters()), key=lambda spec: layer_order(spec.name)) == specs
    assert all(spec.dtype == "float32" for spec in specs)
    assert ("lm_head.weight" in [spec.name for spec in specs]) is not tied
    assert (made.num_tensors, made.size_bytes) == (len(specs), sum(spec.size_bytes for spec in specs))


def test_headers_alone_say_what_the_file_holds(qwen: Path) -> None:
    with safe_open(qwen / "model.safetensors", framework="pt") as file:
        expected = tensor_specs((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
    assert {spec.name: spec for spec in checkpoint_tensor_specs(qwen)} == {spec.name: spec for spec in expected}


def test_a_refit_of_it_has_buckets_to_be_struck_in(qwen: Path) -> None:
    assert build_manifest(checkpoint_tensor_specs(qwen), 256 * 1024).num_buckets >= 4


def test_layers_sort_by_number_and_fused_tensors_stand_together() -> None:
    names = [f"model.layers.{n}.self_attn.{p}_proj.weight" for n in (10, 2) for p in "kvqo"]
    names += ["model.layers.2.mlp.up_proj.weight", "model.layers.2.mlp.down_proj.weight"]
    names += ["model.layers.2.mlp.gate_proj.weight"]
    ordered = sorted(names, key=layer_order)
    assert [name.split(".")[2] for name in ordered] == ["2"] * 7 + ["10"] * 4
    projections = [name.split(".")[-2] for name in ordered[:7]]
    assert projections == [*("down_proj", "gate_proj", "up_proj"), *("o_proj", "q_proj", "k_proj", "v_proj")]


def test_the_tokenizer_gives_back_every_text_byte_for_byte(qwen: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(qwen, local_files_only=True)
    text = "What is 17 + 25?\n  \t«é中» "
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_its_end_token_is_the_tokenizers_and_the_models(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    made = make_tiny_model(tmp_path, family="llama", seed=1)
    model = load_trainer_model(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path, local_files_only=True).eos_token_id == made.eos_token_id
    assert (model.config.eos_token_id, model.config.vocab_size) == (made.eos_token_id, made.vocab_size)


@pytest.mark.parametrize("missing", ["directory", "config.json", "model.safetensors"])
def test_a_model_that_is_not_there_is_one_sentence_naming_what_is_missing(missing: str, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    if missing != "directory":
        make_tiny_model(directory, family="llama", seed=1, num_layers=1)
        (directory / missing).unlink()
    words = {"directory": "no directory", "config.json": "no config.json", "model.safetensors": r"no \*.safetensors"}
    for read in (checkpoint_tensor_specs, load_trainer_model):
        with pytest.raises(ConfigError, match=words[missing]) as caught:
            read(directory)
        assert str(directory) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x02" + bytes(7) + b"[]"], ids=["empty", "noise", "list"])
def test_a_file_that_is_no_safetensors_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="not a safetensors file"):
        checkpoint_tensor_specs(tmp_path)


def test_an_unknown_family_or_a_vocabulary_too_small_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gpt5"):
        make_tiny_model(tmp_path, family="gpt5", seed=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="vocab_size"):
        make_tiny_model(tmp_path, family="llama", seed=1, vocab_size=100)


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        make_tiny_model(tmp_path / "file" / "model", family="llama", seed=1)
