"""Whom no rule may name. Each guard from the beacons that would otherwise mislead."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_refit.core.evidence import Beacon
from elastic_refit.core.ids import ShardId, TrainerId
from elastic_refit.core.verdict import (
    CoordinatorIsolated,
    Culprits,
    LinkFault,
    RefitRejected,
    TrainerFault,
    Unattributed,
)
from tests.chains import (
    LIMITS,
    MEMBERS,
    NUM_BUCKETS,
    Chain,
    aborted,
    applying,
    but,
    chain,
    done,
    judge,
    large_buckets,
    lost,
    named,
    receiving,
    sending,
    small_buckets,
    stalled_link,
    through,
    view,
)

ALL_SUSPECT = frozenset({ShardId(0), ShardId(1), ShardId(2)})

# -- victims report first


def test_nobody_is_named_for_having_lost_a_peer_or_having_been_aborted() -> None:
    evidence = but(but(stalled_link(), 2, testimony=lost(3)), 3, testimony=lost(2))
    evidence = but(but(but(evidence, 4, testimony=lost(3)), 1, testimony=lost(2)), 0, testimony=aborted())
    assert isinstance(judge(evidence), LinkFault)


def test_a_rank_accused_by_its_neighbour_that_itself_lost_a_peer_is_a_victim_of_the_cascade() -> None:
    evidence = but(but(stalled_link(), 3, testimony=lost(2)), 4, testimony=lost(3))
    verdict = judge(evidence, view(suspects=frozenset({ShardId(1), ShardId(2)})))
    assert named(verdict) == {"shard[1]": 4}


@pytest.mark.parametrize("testimony", [aborted(), lost(None)])
def test_a_rank_accused_by_its_neighbour_that_was_aborted_is_a_victim_of_the_cascade(testimony: object) -> None:
    evidence = but(but(chain(*[None] * 5), 3, testimony=lost(4)), 4, testimony=testimony)
    assert isinstance(judge(evidence, view(suspects=ALL_SUSPECT)), Unattributed)


def test_a_victim_that_left_its_call_is_not_behind_however_old_its_last_tick_is() -> None:
    evidence = but(small_buckets(applying(2, 99.0)), 2, testimony=lost(1))
    assert judge(evidence).findings == ()


def test_testimony_about_a_rank_outside_the_group_shows_no_link() -> None:
    evidence = but(stalled_link(), 3, testimony=lost(9))
    verdict = judge(evidence)
    assert isinstance(verdict, LinkFault)
    assert "waits to receive" in verdict.shown_by


def test_a_rank_that_lost_itself_says_nothing_about_a_link() -> None:
    evidence = but(chain(*[None] * 5), 3, testimony=lost(3))
    assert isinstance(judge(evidence), Unattributed)


def test_a_broken_connection_shows_the_link_better_than_who_waits_for_whom() -> None:
    verdict = judge(but(but(stalled_link(), 4, testimony=lost(3)), 3, testimony=lost(4)))
    assert isinstance(verdict, LinkFault)
    assert verdict.edge == (3, 4)
    assert "lost rank" in verdict.shown_by


def test_a_broken_link_runs_the_way_the_bytes_do() -> None:
    broken = but(stalled_link(), 1, testimony=lost(4))
    verdict = judge(broken, view(chain=(0, 4, 3, 2, 1)))
    assert isinstance(verdict, LinkFault)
    assert verdict.edge == (4, 1)


# -- silence and who listened


def test_silence_does_not_count_when_the_observer_itself_was_late() -> None:
    evidence = but(large_buckets(None), 2, answered_ping=False)
    verdict = judge(evidence, view(observer_late_s=0.6, suspects=ALL_SUSPECT))
    assert isinstance(verdict, Unattributed)
    assert verdict.decidable_in_s == 0.0
    assert "1 of 5 ranks looked silent, but the observer itself was 0.6 s late" in verdict.sentence


def test_an_observer_that_was_late_by_a_quarter_of_the_ping_was_still_on_time() -> None:
    evidence = but(large_buckets(None), 2, answered_ping=False)
    assert named(judge(evidence, view(observer_late_s=LIMITS.ping_s / 4))) == {"shard[0]": 2}


def test_a_late_observer_does_not_call_the_abort_order_unanswered() -> None:
    evidence = but(stalled_link(), 2, answered_abort=True)
    evidence = but(evidence, 3, answered_abort=False)
    assert isinstance(judge(evidence, view(observer_late_s=9.0)), LinkFault)


def test_a_late_observer_to_whom_everybody_seemed_silent_asks_again() -> None:
    silent = {rank: replace(each, answered_ping=False) for rank, each in stalled_link().items()}
    verdict = judge(silent, view(observer_late_s=9.0))
    assert isinstance(verdict, Unattributed)
    assert verdict.decidable_in_s == 0.0


def test_a_late_observer_that_heard_everybody_still_sees_the_stalled_link() -> None:
    assert isinstance(judge(stalled_link(), view(observer_late_s=9.0)), LinkFault)


def test_a_late_observer_still_believes_a_death_and_an_overdue_rank() -> None:
    late = view(observer_late_s=9.0)
    assert named(judge(but(large_buckets(None), 2, died="SIGKILL"), late)) == {"shard[0]": 1}
    assert named(judge(large_buckets(applying(2, 12.0)), late)) == {"shard[0]": 3}


def test_everybody_silent_condemns_nobody_even_if_old_beacons_look_overdue() -> None:
    silent = {rank: replace(each, answered_ping=False) for rank, each in small_buckets(applying(2, 99.0)).items()}
    assert isinstance(judge(silent, view(suspects=ALL_SUSPECT)), CoordinatorIsolated)


def test_silence_counts_once_anybody_at_all_was_heard() -> None:
    silent = {rank: replace(each, answered_ping=False, beacon=None) for rank, each in stalled_link().items()}
    assert isinstance(judge(but(silent, 0, answered_ping=True)), Culprits | TrainerFault)


def test_the_dead_are_not_who_was_heard() -> None:
    silent = {rank: replace(each, answered_ping=False, beacon=None) for rank, each in stalled_link().items()}
    verdict = judge(but(silent, 4, died="SIGKILL", answered_ping=True, testimony=lost(3)))
    assert named(verdict) == {"shard[2]": 1}


def test_one_who_testified_and_then_went_silent_is_not_who_was_heard() -> None:
    silent = {rank: replace(each, answered_ping=False, beacon=None) for rank, each in stalled_link().items()}
    assert isinstance(judge(but(silent, 4, testimony=lost(3))), CoordinatorIsolated)


@pytest.mark.parametrize("sign", [{"testimony": aborted()}, {"beacon_age_s": 2.0}, {"answered_abort": True}])
def test_any_sign_of_life_of_another_rank_makes_a_silence_count(sign: dict[str, object]) -> None:
    nobody_asked = {rank: replace(each, answered_ping=None, beacon=None) for rank, each in stalled_link().items()}
    evidence = but(nobody_asked, 2, answered_ping=False)
    assert judge(evidence).findings == ()
    assert named(judge(but(evidence, 3, **sign))) == {"shard[0]": 2}


def test_an_error_of_its_own_is_a_sign_of_life_too() -> None:
    nobody_asked = {rank: replace(each, answered_ping=None, beacon=None) for rank, each in stalled_link().items()}
    evidence = but(but(nobody_asked, 2, answered_ping=False), 3, fault="ValueError: x")
    assert named(judge(evidence)) == {"shard[0]": 2, "shard[1]": 1}


def test_who_was_not_asked_is_not_silent() -> None:
    evidence = but(but(stalled_link(), 2, answered_ping=None, beacon=None), 3, answered_ping=None, beacon=None)
    assert isinstance(judge(evidence), Unattributed)


def test_not_everybody_is_silent_while_one_was_not_asked() -> None:
    silent = {rank: replace(each, answered_ping=False, beacon=None) for rank, each in stalled_link().items()}
    assert isinstance(judge(but(silent, 0, answered_ping=None)), Unattributed)


def test_a_beacon_that_still_comes_is_an_answer() -> None:
    evidence = but(stalled_link(), 3, answered_ping=False, beacon_age_s=2.0)
    assert isinstance(judge(evidence), LinkFault)
    assert named(judge(but(evidence, 3, beacon_age_s=2.5))) == {"shard[1]": 2}


def test_an_answer_to_the_abort_order_takes_back_an_unanswered_ping() -> None:
    evidence = but(but(stalled_link(), 3, answered_ping=False, answered_abort=True), 2, answered_abort=True)
    assert isinstance(judge(evidence), LinkFault)


def test_an_abort_order_that_nobody_answered_speaks_against_nobody() -> None:
    evidence = {rank: replace(each, answered_abort=False) for rank, each in stalled_link().items()}
    assert isinstance(judge(evidence), LinkFault)


def test_all_dead_is_not_a_coordinator_cut_off() -> None:
    evidence = chain(None, None, None, None, None, died="SIGKILL", answered_ping=False)
    assert isinstance(judge(evidence), TrainerFault)
    assert isinstance(judge({}), Unattributed)


# -- the frontier


def test_a_rank_inside_the_collective_is_never_behind() -> None:
    stuck = Beacon(through(0, "").epoch, 3, 2, 2, "none", None, "in_collective", 999.0)
    assert judge(large_buckets(stuck), view(suspects=frozenset())).findings == ()


def test_a_rank_that_waits_for_a_peer_is_never_behind() -> None:
    for waiting_on in ("recv", "send"):
        evidence = small_buckets(through(2, "in_collective", 999.0, waiting_on=waiting_on))
        assert judge(evidence).findings == ()


def test_a_rank_past_the_frontier_is_not_named_however_long_it_works() -> None:
    evidence = chain(done(), applying(5, 999.0), applying(2, 12.0), receiving(3, 2), receiving(3, 3))
    evidence = but(evidence, 1, member=ShardId(9))
    assert named(judge(evidence)) == {"shard[0]": 3}


def test_a_trainer_that_ran_ahead_and_gathers_with_the_others_is_not_named() -> None:
    gathering = through(2, "packing", 999.0, waiting_on="source")
    evidence = chain(gathering, receiving(3, 0), receiving(3, 1), receiving(3, 2), receiving(3, 3))
    assert isinstance(judge(evidence), Unattributed)


def test_a_rank_that_works_within_its_limit_is_waited_for_and_not_guessed_about() -> None:
    verdict = judge(large_buckets(applying(2, 4.0)), view(suspects=ALL_SUSPECT))
    assert isinstance(verdict, Unattributed)
    assert verdict.decidable_in_s == 7.0
    assert "rank 2 (shard[0]) is in applying and within its limit for another 7 s" in verdict.sentence


def test_of_two_that_work_the_one_that_is_due_first_says_when_to_ask_again() -> None:
    evidence = chain(done(), sending(5, 2), applying(2, 4.0), receiving(3, 2), applying(2, 6.0))
    verdict = judge(evidence)
    assert isinstance(verdict, Unattributed)
    assert verdict.decidable_in_s == 5.0


def test_nobody_is_waited_for_once_a_connection_is_broken() -> None:
    evidence = but(but(large_buckets(applying(2, 4.0)), 3, testimony=lost(4)), 4, testimony=lost(3))
    verdict = judge(evidence)
    assert isinstance(verdict, LinkFault)
    assert verdict.edge == (3, 4)


def test_a_rank_that_nobody_waits_for_yet_is_not_named() -> None:
    busy = applying(2, 999.0)
    evidence = chain(*[replace(busy, applied=2)] * 5)
    assert isinstance(judge(evidence), Unattributed)
    assert judge(evidence).findings == ()


def test_done_before_the_first_bucket_waits_but_done_in_the_middle_does_not() -> None:
    idle = through(1, "done")
    assert judge(chain(idle, idle, applying(1, 999.0), idle, idle)).findings == ()
    first = through(0, "done", completed=-1, entered=-1)
    pausing = replace(first, phase="pausing", tick_age_s=999.0)
    assert named(judge(chain(first, first, pausing, first, first))) == {"shard[0]": 3}


def test_a_barrier_at_the_commit_is_none_while_the_number_of_buckets_is_unknown() -> None:
    pausing = through(-1, "pausing", 999.0)
    assert judge(chain(*[pausing] * 5), view(num_buckets=None)).findings == ()


def test_shards_that_have_committed_and_trainers_owe_nothing_at_the_commit() -> None:
    last = NUM_BUCKETS - 1
    committed = through(last, "finalizing", 999.0, applied=NUM_BUCKETS)
    sent = through(last, "packing", 999.0, applied=-1)
    assert judge(chain(sent, sent, committed, committed, committed)).findings == ()


def test_a_shard_that_received_everything_and_waits_for_the_commit_is_not_named() -> None:
    last = NUM_BUCKETS - 1
    waits = through(last, "done", 999.0)
    verdict = judge(chain(waits, waits, waits, through(last, "applying", 4.0, applied=last - 1), waits))
    assert isinstance(verdict, Unattributed)


def test_a_beacon_of_another_epoch_says_nothing() -> None:
    stale = replace(applying(2, 999.0), epoch=6)
    assert judge(small_buckets(stale)).findings == ()


def test_the_dead_and_the_silent_are_not_also_behind() -> None:
    dead = judge(but(small_buckets(applying(2, 999.0)), 2, died="SIGKILL"))
    assert dead.rules == (1,)
    silent = but(small_buckets(applying(2, 999.0)), 2, answered_ping=False)
    assert isinstance(judge(silent, view(observer_late_s=9.0)), Unattributed)


def test_a_rank_that_finished_is_past_everything_whatever_its_last_beacon_said() -> None:
    evidence = but(but(stalled_link(), 0, finished=True, beacon=applying(0, 999.0)), 4, finished=True, beacon=None)
    verdict = judge(evidence)
    assert isinstance(verdict, LinkFault)
    assert verdict.bucket == 2


def test_a_shard_that_finished_still_owes_its_commit() -> None:
    last = NUM_BUCKETS - 1
    evidence = {r: replace(e, finished=True) for r, e in chain(*[through(last, "done")] * 5).items()}
    evidence = but(evidence, 3, beacon=through(last, "finalizing", 15.0))
    assert named(judge(evidence)) == {"shard[1]": 3}
    committing = but(evidence, 3, beacon=through(last, "finalizing", 1.0))
    assert judge(committing).findings == ()


def test_a_shard_that_finished_and_left_no_beacon_is_not_named_at_the_commit() -> None:
    evidence = {r: replace(e, finished=True, beacon=None) for r, e in chain(*[done()] * 5).items()}
    assert isinstance(judge(evidence), Unattributed)


def test_a_shard_that_finished_is_not_said_to_have_committed() -> None:
    """Two shards cannot commit and the third was not heard of since it received everything."""
    evidence = {r: replace(e, finished=True, beacon=None) for r, e in chain(*[done()] * 5).items()}
    for rank in (2, 3):
        evidence = but(evidence, rank, fault="OSError: disk", beacon=through(NUM_BUCKETS - 1, "aborted"))
    assert isinstance(judge(evidence), RefitRejected)


# -- sole suspect


def test_two_suspects_at_the_stalled_link_are_one_too_many() -> None:
    assert isinstance(judge(stalled_link(), view(suspects=frozenset({ShardId(0), ShardId(1)}))), LinkFault)


def test_a_suspect_away_from_the_stalled_link_is_not_condemned() -> None:
    assert isinstance(judge(stalled_link(), view(suspects=frozenset({ShardId(2)}))), LinkFault)


def test_a_suspect_that_is_another_incarnation_is_somebody_else() -> None:
    assert isinstance(judge(stalled_link(), view(suspects=frozenset({ShardId(0, 1)}))), LinkFault)


def test_a_suspect_that_finished_whole_is_not_condemned() -> None:
    suspects = view(suspects=frozenset({ShardId(0)}))
    evidence = but(stalled_link(), 2, finished=True)
    assert isinstance(judge(evidence, suspects), LinkFault)


def test_a_suspect_of_two_ranks_finished_whole_only_if_both_did() -> None:
    suspects = view(suspects=frozenset({ShardId(0)}))
    evidence = but(but(stalled_link(), 2, finished=True), 1, member=ShardId(0))
    assert named(judge(evidence, suspects)) == {"shard[0]": 4}


def test_a_suspect_is_not_condemned_when_anybody_else_is_named() -> None:
    evidence = but(stalled_link(), 4, died="SIGKILL")
    assert named(judge(evidence, view(suspects=frozenset({ShardId(0)})))) == {"shard[2]": 1}


def test_without_known_links_a_suspect_that_completed_the_bucket_is_not_condemned() -> None:
    evidence = but(stalled_link(), 2, beacon=sending(3, None))
    suspects = view(chain=None, suspects=frozenset({ShardId(0)}))
    assert isinstance(judge(evidence, suspects), Unattributed)
    assert named(judge(stalled_link(), suspects)) == {"shard[0]": 4}


def test_with_known_links_but_none_stalled_a_suspect_is_not_condemned() -> None:
    evidence = chain(*(receiving(2, None) for _ in MEMBERS))
    assert isinstance(judge(evidence, view(suspects=frozenset({ShardId(0)}))), Unattributed)


# -- the stalled link


def waiting_chain(sender: Beacon | None, receiver: Beacon | None) -> Chain:
    """Ranks 2 and 3 are the link in question; everybody else waits in a way that shows nothing."""
    return chain(sending(2, 1), sending(2, 2), sender, receiver, receiving(2, 3))


@pytest.mark.parametrize("sender", [sending(2, 3), sending(2, None), receiving(3, 1), done()])
@pytest.mark.parametrize("receiver", [receiving(2, 2), receiving(2, None)])
def test_a_link_is_stalled_when_the_receiver_waits_for_what_the_sender_has(sender: Beacon, receiver: Beacon) -> None:
    verdict = judge(waiting_chain(sender, receiver))
    assert isinstance(verdict, LinkFault)
    assert verdict.edge == (2, 3)


@pytest.mark.parametrize(
    ("sender", "receiver"),
    [
        (receiving(2, 1), receiving(2, 2)),  # the sender has nothing to send
        (sending(2, 4), receiving(2, 2)),  # it sends to somebody else
        (sending(2, 3), sending(2, 4)),  # the receiver waits for somebody else to take
        (sending(2, 3), receiving(2, 4)),  # it receives from somebody else
        (None, receiving(2, 2)),
        (sending(2, 3), None),
    ],
)
def test_other_pairs_that_wait_are_no_stalled_link(sender: Beacon | None, receiver: Beacon | None) -> None:
    evidence = but(waiting_chain(sender, receiver), 1, beacon=receiving(2, 0))
    evidence = but(but(evidence, 0, beacon=receiving(2, None)), 4, beacon=None)
    assert isinstance(judge(evidence), Unattributed)


def test_a_rank_that_waits_for_a_later_bucket_is_not_at_the_stalled_link() -> None:
    evidence = chain(sending(5, 1), receiving(5, 0), sending(2, 3), receiving(2, 2), receiving(2, 3))
    verdict = judge(evidence)
    assert isinstance(verdict, LinkFault)
    assert verdict.edge == (2, 3)


# -- the weights or the shard


def untaken() -> Chain:
    """No shard has got as far as bucket 1 in its engine."""
    return chain(done(), sending(5, 2), receiving(1, 1), receiving(1, 2), receiving(1, 3))


def refusal(rank: int, base: Chain, *, bucket: int = 1, fault: str = "ValueError: shape") -> Chain:
    return but(base, rank, fault=fault, beacon=through(bucket - 1, "aborted"))


def test_one_shard_that_raises_alone_is_named_and_not_the_weights() -> None:
    assert named(judge(refusal(2, untaken()))) == {"shard[0]": 1}


def test_different_errors_are_not_the_weights() -> None:
    evidence = refusal(3, refusal(2, untaken()), fault="RuntimeError: out of memory")
    assert named(judge(evidence)) == {"shard[0]": 1, "shard[1]": 1}


def test_the_same_error_at_different_buckets_is_not_the_weights() -> None:
    evidence = refusal(3, refusal(2, untaken()), bucket=2)
    assert named(judge(evidence)) == {"shard[0]": 1, "shard[1]": 1}


@pytest.mark.parametrize("beacon", [receiving(2, 3), applying(2, 1.0), None])
def test_a_shard_that_took_the_bucket_or_might_have_saves_the_weights(beacon: Beacon | None) -> None:
    evidence = but(refusal(3, refusal(2, untaken())), 4, beacon=beacon)
    assert named(judge(evidence)) == {"shard[0]": 1, "shard[1]": 1}


def test_a_trainer_with_the_same_error_ends_the_run_as_a_trainer() -> None:
    evidence = refusal(1, refusal(3, refusal(2, untaken())))
    verdict = judge(evidence)
    assert isinstance(verdict, TrainerFault)
    assert verdict.trainers == (TrainerId(1),)


def test_two_ranks_of_one_shard_are_one_shard_that_raised() -> None:
    evidence = but(refusal(3, refusal(2, untaken())), 3, member=ShardId(0))
    assert named(judge(evidence)) == {"shard[0]": 1}


def test_a_trainer_that_refuses_nothing_says_nothing_about_the_weights() -> None:
    assert isinstance(judge(refusal(4, refusal(3, refusal(2, untaken())))), RefitRejected)
