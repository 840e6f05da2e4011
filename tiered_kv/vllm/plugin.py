"""Entry point `vllm.general_plugins`: lets users name the connector without a module path."""

from __future__ import annotations

__all__ = ["register"]

CONNECTOR = "TieredKVConnector"


def register() -> None:
    """Register the connector with vLLM. Idempotent; vLLM calls it in every process.

    Imports nothing heavy and never raises: an engine that does not use tiered-kv must not notice
    that it is installed.
    """
    try:
        # In here: an engine that is started without tiered-kv pays nothing at import.
        from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415
            KVConnectorFactory,
        )
    except ImportError:
        return
    try:
        KVConnectorFactory.register_connector(CONNECTOR, "tiered_kv.vllm.connector", CONNECTOR)
    except ValueError:  # already registered in this process
        return
