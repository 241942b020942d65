"""The coordinator: one refit at a time, the newest asked for, from the ledger's view to its end, and its incidents."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import ray

from elastic_refit.actors.ledger_client import LedgerClient
from elastic_refit.actors.node_agent import Fences
from elastic_refit.actors.refit_shell import RefitShell
from elastic_refit.actors.reports import RefitReport, error_of, incident_of, report_of
from elastic_refit.actors.sabotage import struck_in
from elastic_refit.actors.takeover import close_what_is_open
from elastic_refit.control.host import ControlHost
from elastic_refit.control.setup import HostSetup
from elastic_refit.core import ledger_queries
from elastic_refit.core.events import Event as LedgerEvent
from elastic_refit.core.ids import Member, ProcessId, TrainerId
from elastic_refit.core.refit_state import Ended, Fleet, Landed, RefitPolicy, RefitRequested, RefitState
from elastic_refit.errors import ElasticRefitError
from elastic_refit.incident import Incident, write_incident
from elastic_refit.processes import exit_when_orphaned
from elastic_refit.turns import Turns

__all__ = ["RefitCoordinator", "coordinator_options"]

logger = logging.getLogger(__name__)

_CALLERS = 3
"""Of refits: one that runs, one that waits, and one more that takes the place of who waits."""


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
        self._agents: dict[str, ray.actor.ActorHandle] = {}
        self._lost: ElasticRefitError | None = None
        self._state = RefitState(policy, coordinator=channel.incarnation)
        self._fault_log = fault_log
        self._incidents = len(list(Path(incident_folder).glob("incident-*.json")))
        self._turns = Turns()

    @ray.method(concurrency_group="control")
    def enlist(
        self,
        members: Mapping[Member, ray.actor.ActorHandle],
        agents: Mapping[str, ray.actor.ActorHandle],
        *,
        ends: Mapping[str, bytes] | None = None,
    ) -> None:
        """These may be called from the next refit on, instead of who sat in their seats. Returns once the actor is up.

        ``agents`` by node. ``ends``: the public keys of those whom the control channel does not know yet, by name.
        """
        for name, key in (ends or {}).items():
            self._channel.admit(name, key)
        self._agents.update(agents)
        seats = {(type(member), member.index) for member in members}
        kept = {each: handle for each, handle in self._members.items() if (type(each), each.index) not in seats}
        self._members = {**kept, **members}

    @ray.method(concurrency_group="control")
    def alive(self) -> None:
        """Answers at once, whatever a refit waits for."""

    @ray.method(concurrency_group="refit")
    def take_over(self, processes: Mapping[Member, tuple[ProcessId, ...]]) -> None:
        """Follow a coordinator that died; ``processes`` is what each member consists of.

        Raises:
            LedgerLost: there is no ledger to read what was open.
        """
        limit_s = self._state.policy.deadlines.settle_s
        epoch = close_what_is_open(self._ledger, self._channel, self._members, settle_s=limit_s)
        self._state = replace(self._state, epoch=epoch, processes=dict(processes))

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
            fences=Fences(self._agents, self._members, self._incident_folder),
            channel=self._channel,
        )
        outcome = self._run(shell, RefitRequested(version, self._fleet()))
        incident = self._incident(shell, outcome, version) if shell.clock.began is not None else None
        if isinstance(outcome, Ended):
            raise error_of(outcome, incident)
        return report_of(outcome, incident, seconds=time.monotonic() - began)

    def _run(self, shell: RefitShell, request: RefitRequested) -> Landed | Ended:
        """Without its ledger a refit ends where it stands; nobody is left waiting in it, and no other one begins."""
        if self._lost is not None:
            raise self._lost
        try:
            outcome = shell.run(request)
        except ElasticRefitError as error:
            self._lost = error
            self._channel.order_abort(shell.state.epoch, str(error))
            raise
        self._state = shell.state
        return outcome

    def _fleet(self) -> Fleet:
        trainers = sum(isinstance(member, TrainerId) for member in self._members)
        ledger = self._ledger.state()
        present = frozenset(ledger_queries.joinable(ledger)) & self._members.keys()
        return Fleet(trainers, self._widths, present, frozenset(ledger_queries.suspected(ledger)))

    def _record(self, event: LedgerEvent) -> None:
        for ack in self._ledger.record(event).rejected:
            logger.error("event_rejected", extra={"event": repr(event), "reason": ack.reason})

    def _incident(self, shell: RefitShell, outcome: Landed | Ended, version: int) -> Incident:
        self._incidents += 1
        name, folder = f"incident-{self._incidents:03d}-v{version}", self._incident_folder
        struck = struck_in(self._fault_log, version)
        return write_incident(incident_of(shell, outcome, struck, name=name, version=version, folder=folder), folder)
