"""Damage one bucket of a refit in every manner, at every place, and see that the digests catch it every time.

    python scripts/bucket_mutations.py

Corrupts, drops, duplicates or exchanges each bucket in turn, in the sender, on each link and in each shard alone, with
both commits and both digests. Exits 1 and names what was not caught; also if a refit without damage is refused.
"""

from __future__ import annotations

import itertools
import logging
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from tests.bucket_mutations import Lab, mutations  # noqa: E402 - found by the path above


def main() -> int:
    logging.disable(logging.CRITICAL)  # each refit that is broken off says so
    began_s, missed, number = time.monotonic(), [], 0
    for (commit, digest), group in itertools.groupby(mutations(), key=lambda each: (each.commit, each.digest)):
        lab = Lab(commit)
        if (problem := lab.outcome(None, digest=digest)) is not None:
            missed.append(f"no damage, {commit}, {digest}: {problem}")
        for mutation in group:
            number += 1
            if (problem := lab.outcome(mutation)) is not None:
                missed.append(f"{mutation}: {problem}")
        lab.close()
    for line in missed:
        sys.stdout.write(f"missed: {line}\n")
    took_s = time.monotonic() - began_s
    sys.stdout.write(f"{number - len(missed)} of {number} mutations were caught, in {took_s:.0f} s\n")
    return 1 if missed or not number else 0


if __name__ == "__main__":
    sys.exit(main())
