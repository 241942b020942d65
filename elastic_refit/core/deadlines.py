"""How long everything may take, and why no budget can run out before what runs inside it.

One algebra: what a user sets is checked against it, what the size of a transfer demands is derived from it, and the
budgets of the coordinator and the driver are sums of the parts. What must never happen here: a limit that somebody
inside another limit may legally exceed, because then a healthy rank is aborted, or condemned, for being on time.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from itertools import accumulate
from math import isclose

from elastic_refit.errors import ConfigError

__all__ = ["MAX_ASKS", "BandwidthEstimate", "Deadlines", "check", "derive_deadlines"]

MAX_ASKS = 3
"""How often in a row the same may be asked while the answers decide nothing, but may do so later."""

_LEDGER_CALLS_PER_ATTEMPT = 4
"""The coordinator asks who is absent, opens the epoch, opens the refit, and records how it ended."""

_REACTION = ("evidence_s", "fence_s", "order_s")
_COVERS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("evidence_s", ("ping_s",), "the evidence round waits for the answers to its pings"),
    ("abort_s", ("stall_s", *_REACTION), "a rank must not abort by itself before the culprit of a stall is fenced"),
    *(
        ("abort_s", (phase, *_REACTION), "a rank that overstays its phase must be named before the others abort")
        for phase in ("pack_s", "apply_s", "finalize_s")
    ),
    ("settle_s", ("order_s", "apply_s"), "a survivor finishes the bucket it is applying before it answers an abort"),
    ("settle_s", ("order_s", "pack_s"), "a trainer finishes the bucket it is packing before it answers an abort"),
    ("hard_s", ("abort_s",), "a stall is explained only if the limit of the whole transfer comes later"),
)
"""Each limit, what it must cover, and why."""


_EARLIEST_LOOK = 0.25
"""Share of ``stall_s`` before which nobody is asked, however long a ping may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Every limit of one refit, in seconds.

    The phase limits ``pack_s apply_s finalize_s`` bound the time between two signs of progress inside that phase.
    ``pause_s`` bounds pausing as a whole: nobody is in the collective yet, so nothing waits for an abort.
    """

    ping_s: float
    """A ping's answer; a beacon that is younger counts as an answer."""
    stall_s: float
    """Time without progress in the whole group that is a stall."""
    evidence_s: float
    """The evidence round, from the first testimony to the verdict."""
    fence_s: float
    """From a verdict to the proof that every process of a culprit is gone."""
    order_s: float
    """From the abort order to its arrival at every survivor."""
    abort_s: float
    """Time without a tick after which a rank aborts by itself, without any order."""
    abort_grace_s: float
    """Time that an aborted rank has to leave the blocked call before its process is ended."""
    prepare_s: float
    """``prepare_join``: bind a listener and say who one is."""
    join_s: float
    """Connecting the group."""
    pause_s: float
    """Pausing the engine."""
    pack_s: float
    """Packing one bucket on a trainer."""
    apply_s: float
    """Applying one bucket on a shard."""
    finalize_s: float
    """The commit of a shard after its last bucket."""
    hard_s: float
    """The whole transfer: every bucket moved and applied."""
    settle_s: float
    """From the abort order to the answer of every survivor, who first finishes the bucket that it is applying."""
    ledger_s: float
    """One call to the ledger, its retries included."""
    coordinator_restart_s: float
    """A coordinator that died is back and has read the journal."""

    @property
    def look_s(self) -> float:
        """Time without progress after which everybody is pinged: who is silent is so for ``ping_s`` when it is a stall.

        Never at once, so that one slow bucket has nobody asked.
        """
        return max(self.stall_s - self.ping_s, _EARLIEST_LOOK * self.stall_s)

    @property
    def reaction_s(self) -> float:
        """From a stall that was seen to the abort order at every survivor."""
        return self.evidence_s + self.fence_s + self.order_s

    @property
    def rung_s(self) -> float:
        """Time without a tick after which the process is ended by its native timer."""
        return self.abort_s + self.abort_grace_s

    @property
    def attempt_s(self) -> float:
        """One attempt, from ``prepare_join`` to the last commit; each of its rounds begins with an order."""
        rounds = (self.prepare_s, self.join_s, self.pause_s + self.pack_s, self.hard_s, self.finalize_s)
        return sum(rounds) + len(rounds) * self.order_s

    @property
    def incident_s(self) -> float:
        """From a failed attempt to survivors that are ready for the next; who does not settle is fenced as well.

        Everybody may be asked ``MAX_ASKS`` times; for evidence, after a pause of at most ``evidence_s`` each time.
        """
        repeats_s = 2 * (MAX_ASKS - 1) * self.evidence_s
        return self.reaction_s + repeats_s + self.abort_grace_s + MAX_ASKS * self.settle_s + self.fence_s

    def coordinator_s(self, max_recoveries: int) -> float:
        """One refit with all the recoveries that it may make, after the probe of everybody."""
        one = self.attempt_s + self.incident_s + _LEDGER_CALLS_PER_ATTEMPT * self.ledger_s
        return MAX_ASKS * self.ping_s + self.fence_s + (1 + max_recoveries) * one

    def driver_s(self, max_recoveries: int) -> float:
        """The driver's wait for one refit: the coordinator may die once and come back."""
        return self.coordinator_s(max_recoveries) + self.coordinator_restart_s


def check(deadlines: Deadlines) -> None:
    """Reject limits that contradict each other.

    Raises:
        ConfigError: naming both sides of the widest contradiction, with their numbers, and why the one must cover the
            other. ``fields``: ``name``, ``value_s``, ``needs``, ``needs_s``.
    """
    short = [
        (needs_s - value_s, name, value_s, " + ".join(parts), needs_s, why)
        for name, parts, why in _COVERS
        for value_s, needs_s in [(getattr(deadlines, name), sum(getattr(deadlines, part) for part in parts))]
        if value_s < needs_s and not isclose(value_s, needs_s)
    ]
    if short:
        _, name, value_s, needs, needs_s, why = max(short)
        raise ConfigError(
            f"{name} ({value_s:g} s) must be at least {needs} ({needs_s:g} s): {why}",
            name=name,
            value_s=value_s,
            needs=needs,
            needs_s=needs_s,
        )


def derive_deadlines(
    base: Deadlines,
    *,
    total_bytes: int,
    bucket_bytes: int,
    bandwidth_bytes_per_s: float,
    slack: float = 4.0,
    hard_cap_s: float = 1800.0,
) -> Deadlines:
    """Stretch ``base`` for a transfer of ``total_bytes`` in buckets of at most ``bucket_bytes``.

    ``base`` is the floor of every limit. A bucket may take ``slack`` times its expected time before it counts as
    stalled, and so may the transfer, up to ``hard_cap_s``; both caps yield to the algebra, so a checked ``base`` gives
    limits that pass :func:`check`.
    """
    bucket_s = slack * bucket_bytes / bandwidth_bytes_per_s
    transfer_s = slack * total_bytes / bandwidth_bytes_per_s
    stall_s = max(base.stall_s, min(bucket_s, hard_cap_s))
    abort_s = max(base.abort_s, stall_s + base.reaction_s)
    hard_s = max(base.hard_s, abort_s, min(transfer_s + base.apply_s, hard_cap_s))
    return replace(base, stall_s=stall_s, abort_s=abort_s, hard_s=hard_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthEstimate:
    """A decaying low percentile of measured refit bandwidths: what a transfer may be expected to reach.

    Low, because a limit that is derived from a good day condemns on a bad one; decaying, because a fleet that grew or
    moved is another fleet. Before the first observation it is the floor, so the first refit is protected too.
    """

    floor_bytes_per_s: float
    cap_bytes_per_s: float
    percentile: float = 0.1
    decay: float = 0.9
    """Weight of an observation relative to the one after it."""
    max_observations: int = 64
    rates: tuple[float, ...] = ()
    """Observed bytes per second, oldest first."""

    def observe(self, size_bytes: int, seconds: float) -> BandwidthEstimate:
        """The estimate after one more transfer; one that took no measurable time says nothing."""
        if seconds <= 0 or size_bytes <= 0:
            return self
        kept = (*self.rates, size_bytes / seconds)[-self.max_observations :]
        return replace(self, rates=kept)

    @property
    def bytes_per_s(self) -> float:
        """The estimate, between floor and cap."""
        if not self.rates:
            return self.floor_bytes_per_s
        newest = len(self.rates) - 1
        weighted = sorted((rate, self.decay ** (newest - age)) for age, rate in enumerate(self.rates))
        reached = list(accumulate(weight for _, weight in weighted))
        rate, _ = weighted[bisect_left(reached, self.percentile * reached[-1])]
        return min(max(rate, self.floor_bytes_per_s), self.cap_bytes_per_s)
