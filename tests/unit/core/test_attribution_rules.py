"""Whom each rule names, from beacons as a real chain shows them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from elastic_refit.core.attribution import attribute
from elastic_refit.core.evidence import MemberEvidence
from elastic_refit.core.ids import Member, ShardId, TrainerId
from elastic_refit.core.verdict import (
    ContextLost,
    CoordinatorIsolated,
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

# -- rule 1


def test_a_shard_that_died_is_named_though_its_victims_reported_first() -> None:
    evidence = but(large_buckets(None), 2, died="SIGKILL", answered_ping=None)
    evidence = but(but(but(evidence, 1, testimony=lost(2)), 3, testimony=lost(2)), 4, testimony=lost(3))
    verdict = judge(evidence)
    assert named(verdict) == {"shard[0]": 1}
    assert verdict.sentence == "shard[0] died at rank 2: SIGKILL (rule 1)"


def test_the_silence_of_the_dead_is_rule_1_only() -> None:
    verdict = judge(but(large_buckets(None), 2, died="SIGKILL", answered_ping=False, answered_abort=False))
    assert named(verdict) == {"shard[0]": 1}
    assert verdict.rules == (1,)


def test_a_shard_that_raised_its_own_error_is_named() -> None:
    verdict = judge(but(large_buckets(through(1, "aborted")), 2, fault="ValueError: no such tensor"))
    assert named(verdict) == {"shard[0]": 1}
    assert "ValueError: no such tensor" in verdict.sentence


def test_a_shard_that_lost_its_device_context_is_named() -> None:
    verdict = judge(but(large_buckets(applying(2, 0.0)), 2, context_lost="3 kernels are orphaned"))
    assert named(verdict) == {"shard[0]": 1}
    assert "3 kernels are orphaned" in verdict.sentence


def test_two_shards_that_died_at_once_are_both_named() -> None:
    evidence = but(but(large_buckets(None), 2, died="SIGKILL"), 4, died="SIGSEGV")
    assert named(judge(evidence)) == {"shard[0]": 1, "shard[2]": 1}


def test_a_death_and_a_silence_are_one_verdict_of_two_culprits() -> None:
    evidence = but(but(large_buckets(None), 4, died="SIGKILL"), 2, answered_ping=False)
    verdict = judge(evidence)
    assert named(verdict) == {"shard[0]": 2, "shard[2]": 1}
    assert verdict.rules == (1, 2)


def test_a_trainer_that_died_ends_the_run_by_name() -> None:
    verdict = judge(but(large_buckets(applying(2, 0.0)), 1, died="SIGKILL"))
    assert isinstance(verdict, TrainerFault)
    assert verdict.trainers == (TrainerId(1),)
    assert verdict.sentence == "the run cannot go on: trainer[1] died at rank 1: SIGKILL (rule 1)"


def test_a_shard_that_died_with_a_trainer_is_in_the_trainers_verdict() -> None:
    verdict = judge(but(but(large_buckets(None), 1, died="SIGKILL"), 2, died="SIGSEGV"))
    assert isinstance(verdict, TrainerFault)
    assert (verdict.trainers, verdict.shards) == ((TrainerId(1),), (ShardId(0),))


# -- rule 2


def test_a_frozen_shard_is_named_by_its_silence() -> None:
    verdict = judge(but(large_buckets(None), 2, answered_ping=False))
    assert named(verdict) == {"shard[0]": 2}
    assert "did not answer a ping within 2 s and 4 of 5 ranks were heard" in verdict.sentence


def test_two_frozen_shards_are_both_named() -> None:
    evidence = but(but(large_buckets(None), 2, answered_ping=False), 4, answered_ping=False, beacon=None)
    assert named(judge(evidence)) == {"shard[0]": 2, "shard[2]": 2}


def test_a_frozen_trainer_ends_the_run() -> None:
    verdict = judge(but(large_buckets(applying(2, 0.0)), 1, answered_ping=False, beacon=None))
    assert isinstance(verdict, TrainerFault)
    assert verdict.rules == (2,)


def test_one_frozen_rank_names_its_whole_shard() -> None:
    evidence = but(large_buckets(sending(2, 3)), 3, member=ShardId(0), answered_ping=False, beacon=None)
    verdict = judge(evidence)
    assert named(verdict) == {"shard[0]": 2}
    assert "rank 3" in verdict.sentence


def test_a_shard_that_does_not_answer_the_abort_order_is_named_by_rule_2() -> None:
    evidence = but({r: replace(e, answered_abort=True) for r, e in stalled_link().items()}, 3, answered_abort=False)
    verdict = judge(evidence)
    assert named(verdict) == {"shard[1]": 2}
    assert "did not answer the abort order at rank 3 within 12 s and 4 of 5 ranks did" in verdict.sentence


# -- rule 3


@pytest.mark.parametrize("around", [small_buckets, large_buckets])
def test_a_shard_wedged_while_applying_is_named_and_ranks_past_it_are_not(around: Callable[..., Chain]) -> None:
    verdict = judge(around(applying(2, 12.5)))
    assert named(verdict) == {"shard[0]": 3}
    assert "no progress in applying for 12.5 s, 1.5 s over its limit" in verdict.sentence
    assert "holds up bucket 3" in verdict.sentence


def test_the_last_rank_of_the_chain_wedged_while_applying_is_named() -> None:
    assert named(judge(chain(done(), done(), sending(4, 3), sending(4, 4), applying(2, 99.0)))) == {"shard[2]": 3}


def test_a_shard_whose_two_buffers_are_both_busy_is_named_when_its_engine_is_wedged() -> None:
    full = through(3, "applying", 30.0, applied=1, waiting_on="buffer")
    verdict = judge(chain(done(), sending(5, 2), full, receiving(4, 2), receiving(4, 3)))
    assert named(verdict) == {"shard[0]": 3}


def test_a_shard_that_was_told_to_start_and_does_not_is_named_after_stall_s() -> None:
    waits = through(-1, "in_collective", 3.0)
    assert named(judge(chain(sending(0, 1), sending(0, 2), waits, receiving(0, 2), receiving(0, 3)))) == {"shard[0]": 3}


def test_a_shard_that_does_not_join_is_named_while_the_others_wait_for_it() -> None:
    joining = through(-1, "joining", 9.0, completed=-2)
    late = replace(joining, entered=-2)
    assert named(judge(chain(joining, joining, late, joining, joining))) == {"shard[0]": 3}


def test_a_shard_that_does_not_finalize_is_named_once_all_bytes_are_in() -> None:
    last = NUM_BUCKETS - 1
    committed = through(last, "done", applied=NUM_BUCKETS)
    evidence = chain(done(), done(), committed, through(last, "finalizing", 15.0), committed)
    assert named(judge(evidence)) == {"shard[1]": 3}


def test_a_shard_that_alone_holds_up_the_commit_is_named_without_anybody_past_it() -> None:
    last = NUM_BUCKETS - 1
    slow = through(last, "applying", 11.0, applied=last - 1)
    waiting = through(last, "done")
    assert named(judge(chain(waiting, waiting, waiting, slow, waiting))) == {"shard[1]": 3}


def test_two_shards_wedged_at_the_same_bucket_are_both_named() -> None:
    evidence = chain(done(), sending(5, 2), applying(2, 20.0), receiving(3, 2), applying(2, 20.0))
    assert named(judge(evidence)) == {"shard[0]": 3, "shard[2]": 3}


def test_a_trainer_wedged_while_packing_a_bucket_that_all_wait_for_ends_the_run() -> None:
    packing = through(2, "packing", 10.0)
    verdict = judge(chain(packing, receiving(3, 0), receiving(3, 1), receiving(3, 2), receiving(3, 3)))
    assert isinstance(verdict, TrainerFault)
    assert (verdict.trainers, verdict.rules) == ((TrainerId(0),), (3,))


def test_a_trainer_wedged_in_its_first_bucket_is_named_while_all_others_are_ready() -> None:
    ready = through(-1, "done")
    verdict = judge(chain(through(-1, "packing", 10.0), ready, ready, ready, ready), view(num_buckets=None))
    assert isinstance(verdict, TrainerFault)
    assert verdict.trainers == (TrainerId(0),)


def test_a_lone_trainer_that_waits_for_its_own_source_is_named() -> None:
    gathering = through(2, "packing", 10.0, waiting_on="source")
    evidence = but(chain(gathering, receiving(3, 0), receiving(3, 1)), 1, member=ShardId(7))
    assert isinstance(judge(evidence, view(chain=(0, 1, 2))), TrainerFault)


@pytest.mark.parametrize(
    ("phase", "limit_s"),
    [
        ("preparing", LIMITS.prepare_s),
        ("pausing", LIMITS.pause_s),
        ("packing", LIMITS.pack_s),
        ("applying", LIMITS.apply_s),
        ("finalizing", LIMITS.finalize_s),
        ("aborted", LIMITS.finalize_s),
        ("joining", LIMITS.stall_s),
        ("in_collective", LIMITS.stall_s),
    ],
)
def test_each_phase_has_its_own_limit_and_is_named_exactly_at_it(phase: str, limit_s: float) -> None:
    assert named(judge(small_buckets(through(2, phase, limit_s)))) == {"shard[0]": 3}
    early = judge(small_buckets(through(2, phase, limit_s - 0.5)))
    assert isinstance(early, Unattributed)
    assert early.decidable_in_s == 0.5


# -- rule 4


@pytest.mark.parametrize("suspect", [0, 1])
def test_the_only_suspect_at_the_stalled_link_is_named(suspect: int) -> None:
    verdict = judge(stalled_link(), view(suspects=frozenset({ShardId(suspect)})))
    assert named(verdict) == {f"shard[{suspect}]": 4}
    assert "from rank 2 to rank 3" in verdict.sentence


def wide(*members: Member) -> Chain:
    """Two trainers, then shards of two ranks each; the link between the first two of them is stalled at bucket 2."""
    beacons = (done(), sending(5, 2), sending(2, 4), receiving(2, 3), receiving(2, 5))
    ranks = (0, 1, 2, 4, 6)
    return {
        rank: MemberEvidence(member, rank, answered_ping=True, beacon=beacon, width=2 if rank > 1 else 1)
        for rank, member, beacon in zip(ranks, members, beacons, strict=True)
    }


def test_the_stalled_link_is_found_between_members_that_speak_for_several_ranks() -> None:
    evidence, seen = wide(*MEMBERS), view(chain=tuple(range(8)))
    verdict = judge(evidence, seen)
    assert isinstance(verdict, LinkFault)
    assert verdict.members == (ShardId(0), ShardId(1))
    broken = judge(but(but(evidence, 4, testimony=lost(7)), 6, testimony=lost(5)), seen)
    assert isinstance(broken, LinkFault)
    assert broken.members == (ShardId(1), ShardId(2))
    frozen = judge(but(evidence, 4, answered_ping=False, beacon=None), seen)
    assert "6 of 8 ranks were heard" in frozen.sentence


def test_without_known_links_the_only_suspect_that_has_not_completed_the_bucket_is_named() -> None:
    nccl = view(chain=None, suspects=frozenset({ShardId(2)}))
    assert named(judge(stalled_link(), nccl)) == {"shard[2]": 4}


# -- nobody


def test_a_stalled_link_without_a_suspect_is_named_instead_of_a_shard() -> None:
    verdict = judge(stalled_link())
    assert isinstance(verdict, LinkFault)
    assert (verdict.edge, verdict.members, verdict.bucket) == ((2, 3), (ShardId(0), ShardId(1)), 2)
    assert (verdict.findings, verdict.rules) == ((), (5,))
    assert "from rank 2 (shard[0]) to rank 3 (shard[1]) stalled at bucket 2" in verdict.sentence
    assert verdict.sentence.startswith("nobody is condemned")


def test_a_link_that_stalls_while_joining_says_so() -> None:
    broken = {rank: replace(each, beacon=None) for rank, each in stalled_link().items()}
    verdict = judge(but(but(broken, 2, testimony=lost(3)), 3, testimony=lost(2)))
    assert isinstance(verdict, LinkFault)
    assert "stalled while joining" in verdict.sentence


def test_when_nobody_answers_it_is_the_coordinator_that_is_cut_off() -> None:
    verdict = judge({rank: replace(each, answered_ping=False, beacon=None) for rank, each in stalled_link().items()})
    assert isinstance(verdict, CoordinatorIsolated)
    assert verdict.silent == MEMBERS
    assert "trainer[0], trainer[1], shard[0], shard[1], shard[2]" in verdict.sentence


def test_a_group_in_which_all_wait_and_no_link_shows_is_unattributed() -> None:
    verdict = judge(chain(*(receiving(2, None) for _ in MEMBERS)), view(chain=None))
    assert isinstance(verdict, Unattributed)
    assert verdict.decidable_in_s is None
    assert "5 of 5 ranks were heard" in verdict.sentence


def test_two_links_that_stalled_at_once_are_both_in_the_sentence() -> None:
    evidence = chain(done(), sending(2, 2), receiving(2, 1), sending(2, 4), receiving(2, 3))
    verdict = judge(evidence, view(suspects=frozenset({ShardId(0)})))
    assert isinstance(verdict, Unattributed)
    assert "1-2, 3-4" in verdict.sentence


# -- what ends the run


def refused(*ranks: int, base: Chain, fault: str = "ValueError: shape") -> Chain:
    for rank in ranks:
        base = but(base, rank, fault=fault, beacon=through(0, "aborted"))
    return base


def test_the_same_error_on_every_shard_is_the_weights_and_not_the_shards() -> None:
    verdict = judge(refused(2, 3, 4, base=large_buckets(None)))
    assert isinstance(verdict, RefitRejected)
    assert (verdict.bucket, verdict.error) == (1, "ValueError: shape")
    assert verdict.shards == (ShardId(0), ShardId(1), ShardId(2))
    assert "no shard is at fault: all 3 shards that applied bucket 1" in verdict.sentence


def test_the_same_error_on_every_shard_that_reached_the_bucket_is_the_weights() -> None:
    behind = but(large_buckets(None), 4, beacon=receiving(1, 3), testimony=lost(3))
    assert isinstance(judge(refused(2, 3, base=behind)), RefitRejected)


@pytest.mark.parametrize("silence", [{"died": "SIGKILL"}, {"answered_ping": False}])
def test_a_shard_that_cannot_say_does_not_save_the_weights(silence: dict[str, object]) -> None:
    evidence = but(large_buckets(None), 4, beacon=None, **silence)
    assert isinstance(judge(refused(2, 3, base=evidence)), RefitRejected)


def test_signatures_and_not_words_tell_equal_errors() -> None:
    base = refused(2, 3, 4, base=large_buckets(None))
    for rank in (2, 3, 4):
        base = but(base, rank, fault=f"ValueError: at {rank}", fault_signature="ValueError/1")
    assert isinstance(judge(base), RefitRejected)


def test_work_orphaned_on_a_trainers_device_is_a_verdict_of_its_own() -> None:
    evidence = but(but(large_buckets(None), 2, died="SIGKILL"), 0, context_lost="2 kernels are orphaned")
    verdict = judge(evidence)
    assert isinstance(verdict, ContextLost)
    assert verdict.member == TrainerId(0)
    assert verdict.shards == (ShardId(0),)
    assert verdict.sentence == (
        "trainer[0] lost its device context and cannot go on: 2 kernels are orphaned, "
        "after shard[0] died at rank 2: SIGKILL (rule 1)"
    )


def test_lost_context_comes_before_the_fault_of_the_same_trainer() -> None:
    evidence = but(large_buckets(applying(2, 0.0)), 0, context_lost="orphaned", fault="RuntimeError: x")
    assert isinstance(judge(evidence), ContextLost)


def test_evidence_of_one_member_alone_is_judged_too() -> None:
    verdict = attribute([MemberEvidence(ShardId(0), 0, died="SIGKILL")], view())
    assert named(verdict) == {"shard[0]": 1}
