"""The coordinator: one refit at a time, the newest asked for, from the ledger's view to its end, and its incidents."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

import ray

from elastic_refit import errors
from elastic_refit.actors.ledger_client import LedgerClient
from elastic_refit.actors.refit_shell import RefitShell
from elastic_refit.actors.sabotage import struck_in
from elastic_refit.control.host import ControlHost
from elastic_refit.control.setup import HostSetup
from elastic_refit.core import ledger_queries
from elastic_refit.core.events import Event as LedgerEvent
from elastic_refit.core.ids import Member, TrainerId
from elastic_refit.core.refit_state import Ended, Fleet, Landed, RefitPolicy, RefitRequested, RefitState
from elastic_refit.incident import Incident, IncidentClock, names_of, sentence_of, write_incident
from elastic_refit.processes import exit_when_orphaned
from elastic_refit.stacks import stacks_of
from elastic_refit.turns import Turns

__all__ = ["RefitCoordinator", "RefitReport", "coordinator_options"]

logger = logging.getLogger(__name__)

_CALLERS = 3
"""Of refits: one that runs, one that waits, and one more that takes the place of who waits."""


@dataclass(frozen=True, slots=True)
class RefitReport:
    """A refit that landed. ``size_bytes`` are those of one copy of the weights; ``seconds`` include a recovery."""

    version: int
    world_size: int
    participants: tuple[str, ...]
    seconds: float
    size_bytes: int
    num_buckets: int
    rebuilt: bool
    incident: Incident | None


def coordinator_options() -> dict[str, object]:
    """Options for ``ray.remote(...)``: faults and questions are heard while a refit runs."""
    return {"num_cpus": 0, "max_restarts": 0, "concurrency_groups": {"refit": _CALLERS, "control": 2}}


class RefitCoordinator:
    """Calls members that the driver made and owns: an actor dies with the actor that made it."""

    def __init__(
        self,
        policy: RefitPolicy,
        ledger: ray.actor.ActorHandle,
        channel: HostSetup,
        *,
        widths: tuple[int, ...],
        incident_folder: str,
        fault_log: ray.actor.ActorHandle | None = None,
    ) -> None:
        exit_when_orphaned()
        self._ledger = LedgerClient(ledger, writer="coordinator", ledger_s=policy.deadlines.ledger_s)
        self._channel = ControlHost(channel)
        self._members: dict[Member, ray.actor.ActorHandle] = {}
        self._widths = widths
        self._incident_folder = incident_folder
        self._node = ray.get_runtime_context().get_node_id()
        self._state = RefitState(policy, coordinator=channel.incarnation)
        self._fault_log = fault_log
        self._incidents = 0
        self._turns = Turns()

    @ray.method(concurrency_group="control")
    def enlist(self, members: Mapping[Member, ray.actor.ActorHandle]) -> None:
        """These may be called from the next refit on. Returns once the actor is up."""
        self._members.update(members)

    @ray.method(concurrency_group="refit")
    def refit(self, version: int) -> RefitReport:
        """Push ``version`` from the trainers to every shard that may take part; blocks until it landed.

        While another refit runs this one waits, unless a newer version is asked for.

        Raises:
            Superseded: a newer version is asked for, and this one had not begun.
            ElasticRefitError: the refit ended the run; the type and the sentence say why.
        """
        with self._turns.turn(version):
            return self._refit(version)

    def _refit(self, version: int) -> RefitReport:
        began = time.monotonic()
        shell = RefitShell(
            self._state,
            self._members,
            record=self._record,
            node=self._node,
            channel=self._channel,
            stacks_folder=self._incident_folder,
        )
        outcome = shell.run(RefitRequested(version, self._fleet()))
        self._state = shell.state
        incident = self._incident(shell.clock, outcome, version) if shell.clock.began is not None else None
        if isinstance(outcome, Ended):
            raise _error(outcome, incident)
        manifest = outcome.manifest
        return RefitReport(
            version=version,
            world_size=outcome.membership.world_size,
            participants=tuple(str(member) for member in outcome.membership.members),
            seconds=time.monotonic() - began,
            size_bytes=manifest.total_bytes,
            num_buckets=manifest.num_buckets,
            rebuilt=outcome.rebuilt,
            incident=incident,
        )

    def _fleet(self) -> Fleet:
        trainers = sum(isinstance(member, TrainerId) for member in self._members)
        ledger = self._ledger.state()
        present = frozenset(ledger_queries.joinable(ledger)) & self._members.keys()
        return Fleet(trainers, self._widths, present, frozenset(ledger_queries.suspected(ledger)))

    def _record(self, event: LedgerEvent) -> None:
        for ack in self._ledger.record(event).rejected:
            logger.error("event_rejected", extra={"event": repr(event), "reason": ack.reason})

    def _incident(self, clock: IncidentClock, outcome: Landed | Ended, version: int) -> Incident:
        self._incidents += 1
        struck = struck_in(self._fault_log, version)
        clock.struck = struck[0].at_s if struck else None
        seconds = clock.close()
        incident = Incident(
            id=f"incident-{self._incidents:03d}-v{version}",
            version=version,
            sentence=sentence_of(outcome, version, sum(seconds.values())),
            names=names_of(outcome.findings),
            rules=tuple(sorted({finding.rule for finding in outcome.findings})),
            phase=clock.phase,
            seconds=seconds,
            findings=outcome.findings,
            evidence=outcome.evidence if isinstance(outcome, Ended) else clock.evidence,
            resent_buckets=outcome.resent_buckets if isinstance(outcome, Landed) else 0,
            injected=tuple(str(record.fault) for record in struck),
            error=outcome.error if isinstance(outcome, Ended) else None,
            stacks=stacks_of(self._incident_folder, (finding.member for finding in outcome.findings)),
        )
        return write_incident(incident, self._incident_folder)


def _error(outcome: Ended, incident: Incident | None) -> errors.ElasticRefitError:
    kind = getattr(errors, outcome.error)
    error: errors.ElasticRefitError = kind(outcome.sentence, names=names_of(outcome.findings), incident=incident)
    return error
