"""What a refit needs of a generation engine, and what a shard needs of it.

Two small protocols. :class:`WeightReceiver` lives in the process that holds the weights (one per engine rank) and is
the only way by which a refit touches them. :class:`ShardEngine` is the shard actor's view: generate, pause, resume,
reach the receiver.

What must never happen here: a tensor that the engine may keep is a view into memory that somebody reuses; a request is
scheduled while an update is open; an engine that was rolled back calls its weights old.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    import torch

    from elastic_refit.core.manifest import Manifest

__all__ = [
    "NO_VERSION",
    "Hosting",
    "PauseMode",
    "Sample",
    "SamplingSpec",
    "ShardEngine",
    "WeightReceiver",
    "request_seed",
]

T = TypeVar("T")

PauseMode = Literal["wait", "abort", "keep"]

NO_VERSION = -1
"""What weights are called that are no whole version: some tensors of an update came, and the update did not finish."""


@dataclass(frozen=True, slots=True)
class Hosting:
    """Where an engine lives: how many ranks it has, in whose process, and what a pause does to running requests.

    ``process``: ``inline`` (that of the caller; one rank), ``own`` (processes of the engine's own), or None: what suits
    its kind.
    """

    width: int = 1
    process: Literal["inline", "own"] | None = None
    pause: PauseMode = "wait"


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """How to sample: ``max_tokens`` new tokens per prompt at ``temperature``; ``seed`` makes it repeatable.

    Prompt number ``i`` of a call draws from a stream of its own, made from ``seed`` and ``i``: equal prompts get
    different completions, and the same call gives the same ones.

    ``temperature`` 0 is greedy. Sampling is from the full distribution (no top-k, no top-p), so that the returned
    log-probabilities are those of the policy that was sampled.
    """

    max_tokens: int
    temperature: float = 1.0
    seed: int | None = None
    ignore_eos: bool = True

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or self.temperature < 0:
            raise ValueError(f"max_tokens must be at least 1 and temperature at least 0: {self}")


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion.

    ``logprobs[i]`` is the natural-log probability of ``token_ids[i]`` under the full distribution, float32, at
    temperature 1. ``weight_version`` is the version of the weights that made every token of it, or ``NO_VERSION``.
    ``token_versions`` has each token's: in a sample that went on across a refit they differ.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    weight_version: int
    token_versions: tuple[int, ...]


def request_seed(seed: int | None, index: int) -> int | None:
    """The seed of prompt ``index`` of a call; None stays None."""
    return None if seed is None else (seed * 1_000_003 + index) % 2**63


class WeightReceiver(ABC):
    """The four calls by which a refit enters an engine process. One thread calls them, in order.

    ``begin · feed* · finish`` is a whole update; ``rollback`` ends an open one. A recovery may go on feeding the update
    that is still open: what was fed once is not fed again.
    """

    rank: int = 0
    """Which of its engine's ranks this is. Every rank is fed whole tensors and takes its own part of them."""

    @abstractmethod
    def begin(self, manifest: Manifest) -> None:
        """Open an update. The engine is paused already, and stays so until ``finish`` or ``rollback``.

        Raises:
            PlanMismatch: an update is open, or the manifest does not describe this model.
        """

    @abstractmethod
    def feed(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Take whole tensors, by their checkpoint names, each exactly once per update.

        The caller gives the memory away: it never writes to these tensors again. From the first tensor until
        ``finish`` the weights are ``NO_VERSION``.

        Raises:
            PlanMismatch: no update is open, or a tensor was fed before or is not in the manifest; nothing was taken.
        """

    @abstractmethod
    def finish(self, version: int) -> None:
        """Close the update: every tensor of the manifest was fed. From here samples are labelled ``version``.

        Raises:
            TransportError: tensors are missing; the update stays open and nothing is labelled.
        """

    @abstractmethod
    def rollback(self) -> None:
        """Make the engine runnable again after an update that will not be finished; a no-op if none is open.

        Runnable, not old: parts that were complete before the abort may keep the new weights, so the shard must not
        serve until a whole update has finished; samples are labelled ``NO_VERSION`` until then. If nothing was fed,
        the weights and their label are the old ones.
        """


class ShardEngine(ABC):
    """One engine replica as its shard actor holds it. Constructing it loads the model and may take minutes."""

    width: int = 1
    """How many ranks hold its weights."""
    has_workers: bool = False
    """Each rank is in a process of its own; else the only rank is in the calling process."""

    @abstractmethod
    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingSpec) -> list[Sample]:
        """Complete ``prompts`` (token ids), in their order. Blocks, also while the engine is paused.

        It refuses nobody: whether this shard may serve is the shard's decision.

        Raises:
            ValueError: a prompt cannot be completed (empty, too long); the caller's fault, not the shard's.
            ShardError: the engine was closed, or cannot say which weights made a sample.
        """

    @abstractmethod
    def pause(self) -> None:
        """Return when nothing is scheduled any more and nothing will be until ``resume``. Idempotent."""

    @abstractmethod
    def resume(self) -> None:
        """Let requests run again; drops cached prefixes of older weights. Idempotent.

        Raises:
            ShardError: a weight update is open, or the cached prefixes could not be dropped; it stays paused.
        """

    @abstractmethod
    def in_workers(self, function: Callable[[WeightReceiver], T]) -> list[T]:
        """Run ``function`` with the receiver of each rank, where its weights are; the results by rank.

        Blocks until all have returned; then the first rank's error, if any, arrives here. Where the engine has workers
        the function and its result travel by pickle. Calls from several threads pass one at a time. What touches
        weights is never called while a generation runs: pause first.
        """

    def in_worker(self, function: Callable[[WeightReceiver], T]) -> T:
        """As :meth:`in_workers`; the first rank's result."""
        return self.in_workers(function)[0]

    def when_dead(self, callback: Callable[[str], None]) -> None:  # noqa: B027 - an engine in this process calls nobody
        """Have ``callback`` called, with a sentence, on another thread, when a process of the engine's own has died."""

    @abstractmethod
    def pids(self) -> tuple[int, ...]:
        """Every process this engine consists of, the calling one included."""

    @abstractmethod
    def close(self) -> None:
        """Free the engine and end its child processes; a generation that waits raises ShardError. Idempotent."""
