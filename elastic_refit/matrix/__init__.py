"""The fault matrix: cells of what the ledger thought, what happened and when, run on real actors and judged."""
