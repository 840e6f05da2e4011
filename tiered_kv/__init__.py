"""Keeps the KV-cache blocks of LLM inference alive beyond GPU memory."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("tiered-kv")
except PackageNotFoundError:  # a bare checkout that was never installed
    __version__ = "0+unknown"

__all__ = ["__version__"]
