"""Flips single bits in the files of a store, and looks at what is served then.

`python -m tests.faults.flips --help`
"""
