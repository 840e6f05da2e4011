"""What an engine whose scheduler runs in this process is asked beside prompts.

Only the process of an offline engine imports this: it reaches for names of vLLM that a serving
engine needs not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm import LLM, SamplingParams
from vllm.renderers import ChatParams
from vllm.v1.request import Request

from tiered_kv.vllm.connector import TieredKVConnector

__all__ = ["bare_request", "chat_tokens", "scheduler_connector"]


def scheduler_connector(llm: LLM) -> TieredKVConnector:
    """The scheduler's half of our connector.

    Raises:
        RuntimeError: the engine has another connector, or its scheduler runs elsewhere.
    """
    connector = _core(llm).scheduler.get_kv_connector()
    if not isinstance(connector, TieredKVConnector):
        raise RuntimeError(f"the engine's connector is {type(connector).__name__}, not ours")
    return connector


def bare_request(llm: LLM, name: str, token_ids: Sequence[int]) -> Request:
    """A request that the engine never hears of, with the hashes that its blocks have.

    Raises:
        RuntimeError: the engine's scheduler runs elsewhere.
    """
    return Request(
        request_id=name,
        prompt_token_ids=list(token_ids),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=_core(llm).request_block_hasher,
    )


def chat_tokens(
    llm: LLM, messages: Any, tools: Any, chat_template_kwargs: Mapping[str, Any]
) -> list[int]:
    """Token ids of a conversation, as vLLM's server makes them of a chat request."""
    renderer = llm.renderer
    said = {"add_generation_prompt": True, "continue_final_message": False, "tools": tools}
    params = ChatParams(
        chat_template=llm.chat_template,
        chat_template_kwargs={"tokenize": False, **said, **chat_template_kwargs},
    )
    # The template says where special tokens go, as for the server.
    tokens = renderer.default_chat_tok_params.with_kwargs(add_special_tokens=False)
    _, [rendered] = renderer.render_chat([messages], params, tokens)
    found: Any = rendered
    return list(found["prompt_token_ids"])


def _core(llm: LLM) -> Any:
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    if core is None:
        raise RuntimeError("the engine's scheduler runs in another process")
    return core
