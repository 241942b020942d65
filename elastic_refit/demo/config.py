"""What the demo may be told: a run's configuration, and the loop on top of it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from elastic_refit.config import Count, RunConfig, Section

__all__ = ["DemoConfig", "LoopConfig"]


class LoopConfig(Section):
    """The reinforcement-learning loop of the demo."""

    steps: Count = 6
    """Training steps; each ends with a refit."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the model, the prompts and the sampling."""
    model: str | None = None
    """A checkpoint directory; null: a tiny model is made for the run."""
    family: Literal["qwen2", "llama"] = "qwen2"
    """Architecture of the tiny model."""
    num_prompts: Count = 8
    """Prompts; every step samples all of them."""
    samples_per_prompt: Count = 8
    """Completions of each prompt in a step."""
    prompt_tokens: Count = 8
    """Tokens per prompt."""
    max_tokens: Count = 16
    """Tokens sampled per prompt."""
    learning_rate: Annotated[float, Field(gt=0)] = 5e-3
    """Step size of Adam."""
    load_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """How long the engines may take to load."""


class DemoConfig(RunConfig):
    """A run plus its loop."""

    demo: LoopConfig = LoopConfig()
