"""Tests that run a real vLLM, always in child processes, one after another."""
