"""What the tiers do to a real vLLM server: nothing bad.

    python -m tests.benchmarks.serving throttled --path /mnt/nvme0

Each subject runs a server without tiers and one with them, side by side, and compares the same
requests on both. They take minutes, and mean something on a machine that does nothing else.
"""
