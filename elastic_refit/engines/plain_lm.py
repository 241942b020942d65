"""A Llama decoder in plain torch: the same checkpoint, parameter names and numbers as transformers, without it.

It loads in a tenth of the time, keeps no cache of keys and values, and is meant for small models: a fleet of test
shards that are killed and made anew all the time. Float32 on the CPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from elastic_refit.engines.checkpoint import require_checkpoint
from elastic_refit.errors import ConfigError

__all__ = ["PlainLM", "PlainShape", "load_plain_lm", "write_plain_checkpoint"]

_WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True)
class PlainShape:
    """The numbers of a Llama model, by the names that ``config.json`` gives them."""

    vocab_size: int = 384
    hidden_size: int = 128
    intermediate_size: int = 256
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0


@dataclass(frozen=True, slots=True)
class _Output:
    logits: torch.Tensor
    past_key_values: torch.Tensor
    """Every token so far, which is all that this decoder remembers."""


class PlainLM(nn.Module):
    """Called as a causal LM of transformers is; ``logits`` are those of the ``input_ids``."""

    generation_config = None

    def __init__(self, shape: PlainShape) -> None:
        super().__init__()
        self.model = _Decoder(shape)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)

    def forward(
        self, input_ids: torch.Tensor, past_key_values: torch.Tensor | None = None, use_cache: bool = True
    ) -> _Output:
        ids = input_ids if past_key_values is None else torch.cat([past_key_values, input_ids], dim=-1)
        return _Output(self.lm_head(self.model(ids))[:, -input_ids.shape[-1] :], ids)


class _Decoder(nn.Module):
    def __init__(self, shape: PlainShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self._head_dim = shape.hidden_size // shape.num_attention_heads
        self._theta = shape.rope_theta

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(ids)
        turns = self._turns(ids.shape[-1])
        for layer in self.layers:
            hidden = layer(hidden, turns)
        normed: torch.Tensor = self.norm(hidden)
        return normed

    def _turns(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotary position embedding (arXiv 2104.09864): cosine and sine, [length, head_dim]."""
        steps = torch.arange(0, self._head_dim, 2, dtype=torch.float32) / self._head_dim
        angles = torch.outer(torch.arange(length, dtype=torch.float32), self._theta**-steps).repeat(1, 2)
        return angles.cos(), angles.sin()


class _Layer(nn.Module):
    def __init__(self, shape: PlainShape) -> None:
        super().__init__()
        self.self_attn = _Attention(shape)
        self.mlp = _Mlp(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), turns)
        mixed: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return mixed


class _Attention(nn.Module):
    def __init__(self, shape: PlainShape) -> None:
        super().__init__()
        self._heads, self._kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        self._head_dim = shape.hidden_size // shape.num_attention_heads
        kv_size = self._kv_heads * self._head_dim
        self.q_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)

    def forward(self, hidden: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        query = _turned(self._split(self.q_proj(hidden), self._heads), turns)
        key = _turned(self._split(self.k_proj(hidden), self._kv_heads), turns)
        value = self._split(self.v_proj(hidden), self._kv_heads)
        groups = self._heads // self._kv_heads
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: torch.Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _split(self, projected: torch.Tensor, heads: int) -> torch.Tensor:
        split: torch.Tensor = projected.unflatten(-1, (heads, self._head_dim)).transpose(1, 2)
        return split


class _Mlp(nn.Module):
    def __init__(self, shape: PlainShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


def _turned(heads: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cosine, sine = turns
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat([-second, first], dim=-1) * sine


def load_plain_lm(directory: str | Path) -> PlainLM:
    """A Llama checkpoint of one file, ready to be called.

    Raises:
        ConfigError: there is no such checkpoint in ``directory``.
    """
    path = require_checkpoint(directory)
    given = json.loads((path / "config.json").read_text())
    if given.get("model_type") != "llama" or given.get("tie_word_embeddings"):
        raise ConfigError(f"model: {path} is no Llama with an output layer of its own", model=str(path))
    model = PlainLM(_shape_of(given))
    model.load_state_dict(load_file(path / _WEIGHTS))
    return model.eval()


def _shape_of(config: Mapping[str, Any]) -> PlainShape:
    rope = config.get("rope_parameters") or {}
    known = {name: config[name] for name in PlainShape.__dataclass_fields__ if name in config}
    return PlainShape(**known if "rope_theta" not in rope else {**known, "rope_theta": rope["rope_theta"]})


def write_plain_checkpoint(directory: str | Path, shape: PlainShape, *, seed: int) -> int:
    """Write a float32 Llama checkpoint of random weights; returns their bytes. The same arguments, the same weights."""
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    model, dice = PlainLM(shape), torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(value.shape, generator=dice) * 0.1 + name.endswith("norm.weight")
        for name, value in model.state_dict().items()
    }
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **asdict(shape)}
    fixed = {"max_position_embeddings": 2048, "hidden_act": "silu", "tie_word_embeddings": False}
    (path / "config.json").write_text(json.dumps({**config, **fixed}))
    save_file(weights, path / _WEIGHTS, metadata={"format": "pt"})
    return sum(value.nbytes for value in weights.values())
