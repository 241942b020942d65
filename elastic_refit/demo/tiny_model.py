"""A causal language model small enough for any machine, made locally: no hub, no download, the same for every seed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from elastic_refit.engines.checkpoint import checkpoint_tensor_specs
from elastic_refit.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["Family", "ModelDescription", "checkpoint_tensor_specs", "load_trainer_model", "make_tiny_model"]

Family = Literal["qwen2", "llama"]

_HEAD_DIM = 32
"""The smallest that vLLM's CPU attention takes."""
_INITIALIZER_RANGE = 0.1
"""Wide enough that the logits of a tiny model are far from flat: wrong weights must show in the log-probabilities."""
_PAD, _EOS = "<|pad|>", "<|end|>"


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What :func:`make_tiny_model` wrote."""

    directory: str
    family: Family
    vocab_size: int
    eos_token_id: int
    num_tensors: int
    size_bytes: int


def make_tiny_model(
    directory: str | Path,
    *,
    family: Family,
    seed: int,
    tie_embeddings: bool = False,
    num_layers: int = 2,
    vocab_size: int = 384,
) -> ModelDescription:
    """Write a float32 checkpoint (about 1.5 MB) with a byte-level tokenizer into ``directory``.

    The same arguments give the same weights, bit for bit. ``vocab_size`` must hold the 256 bytes and two special
    tokens; ids beyond those decode to nothing.

    Raises:
        ConfigError: an argument cannot be used, or the directory cannot be written.
    """
    if vocab_size < 258:
        raise ConfigError(f"vocab_size: {vocab_size} cannot hold 256 bytes and two special tokens", field="vocab_size")
    path = Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
        eos_token_id = _write_tokenizer(path)
        _write_model(path, _config(family, vocab_size, num_layers, tie_embeddings, eos_token_id), seed)
    except OSError as error:
        raise ConfigError(f"model: cannot write into {str(directory)!r}: {error}", model=str(directory)) from error
    specs = checkpoint_tensor_specs(path)
    return ModelDescription(
        directory=str(path),
        family=family,
        vocab_size=vocab_size,
        eos_token_id=eos_token_id,
        num_tensors=len(specs),
        size_bytes=sum(spec.size_bytes for spec in specs),
    )


def load_trainer_model(directory: str | Path) -> PreTrainedModel:
    """The checkpoint as a trainer holds it: float32, on CPU, eager attention, dropout off.

    ``named_parameters()`` of it names exactly the tensors of the checkpoint, tied embeddings included.

    Raises:
        ConfigError: there is no checkpoint in ``directory``.
    """
    from elastic_refit.engines.torch_engine import load_causal_lm

    return load_causal_lm(directory)


def _config(
    family: Family, vocab_size: int, num_layers: int, tie_embeddings: bool, eos_token_id: int
) -> PretrainedConfig:
    from transformers import LlamaConfig, Qwen2Config

    families = {"qwen2": Qwen2Config, "llama": LlamaConfig}
    if family not in families:
        raise ConfigError(f"family: {family!r} is unknown; use one of {', '.join(families)}", field="family")
    config: PretrainedConfig = families[family](
        vocab_size=vocab_size,
        hidden_size=4 * _HEAD_DIM,
        intermediate_size=8 * _HEAD_DIM,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=_INITIALIZER_RANGE,
        tie_word_embeddings=tie_embeddings,
        eos_token_id=eos_token_id,
        bos_token_id=None,
        pad_token_id=eos_token_id - 1,
    )
    return config


def _write_tokenizer(path: Path) -> int:
    """Write the tokenizer; returns the id of its end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate([*alphabet, _PAD, _EOS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_PAD, _EOS])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=_PAD, eos_token=_EOS).save_pretrained(path)
    return vocab[_EOS]


def _write_model(path: Path, config: PretrainedConfig, seed: int) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    config.architectures = [type(model).__name__]
    config.save_pretrained(path)
    save_file(dict(model.named_parameters()), path / "model.safetensors", metadata={"format": "pt"})
