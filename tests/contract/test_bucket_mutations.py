"""Every manner of damage at every place is caught; ``scripts/bucket_mutations.py`` tries it on every bucket."""

from __future__ import annotations

from itertools import product

import pytest

from elastic_refit.core.events import CommitMode
from tests.bucket_mutations import DIGESTS, KINDS, NUM_BUCKETS, PLACES, Lab, Mutation


@pytest.mark.parametrize("commit", ["streamed", "staged"])
def test_a_bucket_that_is_damaged_in_any_manner_at_any_place_is_caught(commit: CommitMode) -> None:
    lab = Lab(commit)
    try:
        for number, (kind, place) in enumerate(product(KINDS, PLACES)):
            mutation = Mutation(kind, place, number % NUM_BUCKETS, commit, DIGESTS[number // len(PLACES) % 2])
            assert lab.outcome(mutation) is None, str(mutation)
        for digest in DIGESTS:
            assert lab.outcome(None, digest=digest) is None, "a refit without damage"
    finally:
        lab.close()
