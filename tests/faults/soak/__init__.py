"""A soak of the whole: simulated engines live on real stores in which everything goes wrong.

`scenes` says on which tiers and models, `troubles` what goes wrong and when, `watching` sees what
it hit, `lives` runs an engine from its start to its end, `leftovers` looks for what stayed behind.
`python -m tests.faults.soak` runs it at length.
"""
