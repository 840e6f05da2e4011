"""An engine's identity without an engine: every part of vLLM's settings that it reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tiered_kv.config import NamespaceSettings
from tiered_kv.values import Fingerprint
from tiered_kv.vllm import identity

__all__ = ["Engine"]


@dataclass
class Engine:
    """What vLLM tells of an engine, as far as its identity reads it."""

    folder: Path
    config: Any = field(init=False)
    caches: Any = field(init=False)
    offloading: Any = field(init=False)
    namespace: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.write("model.safetensors", b"weights")
        self.write("config.json", b"{}")
        draft = self.folder / "draft"
        draft.mkdir(exist_ok=True)
        (draft / "model.safetensors").write_bytes(b"draft")
        self.config = SimpleNamespace(
            model_config=SimpleNamespace(
                model=str(self.folder),
                revision=None,
                hf_config_path=None,
                architectures=["LlamaForCausalLM"],
                quantization=None,
                hf_overrides={},
                hf_text_config=SimpleNamespace(rope_parameters={"rope_type": "longrope"}),
                max_model_len=4096,
                dtype="torch.bfloat16",
            ),
            cache_config=SimpleNamespace(
                calculate_kv_scales=False, prefix_caching_hash_algo="sha256_cbor"
            ),
            speculative_config=None,
        )
        self.caches = SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(kv_cache_spec="FullAttentionSpec(heads=8)")]
        )
        group = SimpleNamespace(
            tokens_per_block=16, layer_names=("layers.0", "layers.1"), group_id=0
        )
        self.offloading = SimpleNamespace(
            parallel=SimpleNamespace(world_size=2, tp_size=2, pp_size=1, pcp_size=1, dcp_size=1),
            groups=(group,),
            model=SimpleNamespace(dtype="bfloat16"),
            kv_cache_layout="LBHNC",
            worker_kv_bytes_per_block=65_536,
            cache=SimpleNamespace(blocks_per_chunk=4, tokens_per_hash=16),
        )

    def write(self, name: str, content: bytes) -> None:
        (self.folder / name).write_bytes(content)

    def set(self, path: str, value: object) -> None:
        """Set an attribute, named by its path."""
        *way, last = path.split(".")
        part: Any = self
        for name in way:
            part = part[int(name)] if name.isdecimal() else getattr(part, name)
        setattr(part, last, value)

    def fingerprint(self) -> Fingerprint:
        return identity.engine_fingerprint(
            self.config,
            self.caches,
            self.offloading,
            NamespaceSettings.model_validate(self.namespace),
        )
