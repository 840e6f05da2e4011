"""Kills processes while they store, load and evict, round after round, and looks at what is left.

`python -m tests.faults.torture --help`
"""
