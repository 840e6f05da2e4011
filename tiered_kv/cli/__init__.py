"""The command line. Importing it is quick: a command imports what it needs when it runs."""

from tiered_kv.cli.app import main

__all__ = ["main"]
