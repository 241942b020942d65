"""What every participant actor is given when it is made, and how it hosts its part in refits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import ray
from ray.actor import ActorHandle

from elastic_refit.actors.sabotage import keep_in
from elastic_refit.chaos import Saboteur
from elastic_refit.participant import RefitParticipant
from elastic_refit.participant_setup import Keep, RankSetup

__all__ = ["ParticipantSetup"]


@dataclass(frozen=True, slots=True)
class ParticipantSetup(RankSetup):
    """``fault_log`` is there in a run whose members may be struck on purpose."""

    fault_log: ActorHandle | None = None

    @property
    def node(self) -> str:
        """That of the calling process."""
        node: str = ray.get_runtime_context().get_node_id()
        return node

    @property
    def keep(self) -> Keep | None:
        return None if self.fault_log is None else partial(keep_in, self.fault_log)

    def hosted(self, *, pids: Sequence[int] = ()) -> tuple[RefitParticipant, Saboteur | None]:
        """The participant of this process; ``pids`` are the member's other processes. And who may strike it."""
        return self.participant(self.node, pids=pids, keep=self.keep)
