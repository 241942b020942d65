"""The ledger's benchmark runs; what it measures is for the ``bench`` command to say."""

from __future__ import annotations

from elastic_refit.bench.ledger import measure


def test_the_benchmark_of_the_ledger_gives_a_figure_for_everything_it_names() -> None:
    figures = measure(num_shards=8, num_events=400)
    assert figures.pop("num_shards") == 8
    assert len(figures) == 9
    assert all(figure > 0 for figure in figures.values())
