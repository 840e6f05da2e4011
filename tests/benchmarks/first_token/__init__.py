"""What tiers are for, end to end: time to first token, throughput and start of a real vLLM.

    python -m tests.benchmarks.first_token --path /mnt/nvme0 --json first_token.json \
        --plot first_token.png

The model is the demo's, SmolLM2-135M in bf16 on the CPU. Three parts, each can be named alone:

- `tokens`: prompts of 6,000 tokens, whose blocks are computed, come from each tier, come from the
  NVMe tier after the engine's process was started anew, and never left the engine's own prefix
  cache, which is the limit. Engines with and without tiers live side by side and take turns.
- `throughput`: a server with tiers beside one without, 1, 4 and 16 clients; half of each prompt is
  one of several shared prefixes, more than the engine's own cache holds.
- `start`: from nothing to the first answer, without tiers, and with host and NVMe tiers of 1 GiB
  and 8 GiB.

It prints the table that the README has. The picture needs matplotlib:

    pip install --no-deps -r tests/benchmarks/lock-plot.txt
"""
