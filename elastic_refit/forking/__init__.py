"""Ray's workers as forks of one process that has imported what they all import.

A worker of a fleet spends seconds of CPU on two interpreters, torch and Ray (``python -X importtime``). Where fleets
are made all day, as by the matrix, that is most of what they cost. Forked workers are processes
like any others: killed, frozen, watched and listed alike, in the process group that the raylet has made for them.
"""
