"""Measurements that the ``bench`` command runs: each module has ``measure()``, and its figures are ratios or rates."""
