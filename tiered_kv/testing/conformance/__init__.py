"""The contracts as tests, for whoever writes a store or a handler; ours are tested by the same.

`stores` holds the suite of `BlockStore`, `handlers` that of `TransferHandler`; both run under
pytest and need it (`pip install 'tiered-kv[testing]'`). `blocks` holds the values that they use,
`children` what runs in child processes, `contract` the sentences that a failure quotes, `runs` a
way to run an instance in a prepared child process. Of these only `stores` and `handlers` import
pytest, and only `handlers` torch.
"""
