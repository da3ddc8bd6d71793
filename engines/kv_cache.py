"""How many tokens a vLLM keeps in so many bytes: its own arithmetic, for each kind of attention.

Source: vLLM 0.32, `vllm/v1/kv_cache_interface.py` and `vllm/v1/core/kv_cache_utils.py`. A block holds
`block` tokens of one group of layers; all groups draw from one pool. A model whose layers are alike has one
group. One that mixes sliding windows with full attention has several of equal size, filled up with empty
layers, so that a block is worth the same to each; a layer with a window keeps its window and what is being
computed, whatever the length of the request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

BLOCK = 16
"""Tokens a block on GPUs, unless `--block-size` says otherwise."""
_NEARLY = 1.5
_RECURRENT = (
    "mamba",
    "ssm",
    "linear_num_value_heads",
    "linear_attn_config",
    "layers_block_type",
    "hybrid_override_pattern",
    "full_attention_interval",
    "rwkv",
    "conv_L_cache",
)
_KINDS = {"full_attention", "sliding_attention"}
MOST = 1 << 32
MOST_LAYERS = 10_000


class UnknownCacheError(Exception):
    """A kind of attention whose cache only the engine knows; the message says which."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's cache: `elements` are stored for each token, of the last `window` tokens (None: of all)."""

    elements: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share their blocks."""

    layers: int
    window: int | None

    def blocks(self, tokens: int, block: int, in_flight: int) -> int:
        """Blocks that a request of so many tokens holds at most."""
        if self.window is None:
            return ceil(tokens / block)
        return ceil(min(self.window - 1 + in_flight, tokens) / block) + 1


@dataclass(frozen=True, slots=True)
class Cache:
    """A model's keys and values. Raises UnknownCacheError where layers of unlike size and window mix."""

    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        kinds = set(self.layers)
        if len({layer.window for layer in kinds}) > 1 and len({layer.elements for layer in kinds}) > 1:
            raise UnknownCacheError("layers with and without a window, of unlike size")

    def token_bytes(self, element: int = 2) -> int:
        """Bytes of one token over all layers, while it is within every window."""
        return element * sum(layer.elements for layer in self.layers)

    @property
    def groups(self) -> tuple[Group, ...]:
        counts = Counter(layer.window for layer in self.layers)
        if len(counts) == 1:
            return (Group(len(self.layers), self.layers[0].window),)
        least, most = min(counts.values()), max(counts.values())
        size = most if most < _NEARLY * least else least
        parts = {window: ceil(count / size) for window, count in counts.items()}
        return tuple(Group(size, window) for window, many in parts.items() for _ in range(many))

    def block_bytes(self, block: int = BLOCK, element: int = 2) -> int:
        """Bytes of one block of the pool."""
        if len({layer.window for layer in self.layers}) == 1:
            return block * self.token_bytes(element)
        return block * element * self.groups[0].layers * self.layers[0].elements

    def request_blocks(self, tokens: int, block: int, in_flight: int) -> int:
        return sum(group.blocks(tokens, block, in_flight) for group in self.groups)


@dataclass(frozen=True, slots=True)
class Pool:
    """The blocks that an engine has. `in_flight`: tokens computed at a time, in all running batches."""

    cache: Cache
    blocks: int
    block: int
    in_flight: int

    def requests(self, tokens: int) -> float:
        """How many requests of this length fit, each as long as it gets: vLLM's "maximum concurrency"."""
        return self.blocks / self.cache.request_blocks(tokens, self.block, self.in_flight)

    def tokens(self, context: int) -> int:
        """What vLLM logs as "KV cache size" where requests may be `context` long."""
        return int(self.requests(context) * context)

    def longest(self, limit: int) -> int:
        """The longest single request, in tokens, up to `limit`. vLLM keeps one block for itself."""
        fits, fails = 0, limit + 1
        while fails - fits > 1:
            middle = (fits + fails) // 2
            if self.cache.request_blocks(middle, self.block, self.in_flight) <= self.blocks - 1:
                fits = middle
            else:
                fails = middle
        return fits


def pool(cache: Cache, size: int, *, block: int = BLOCK, element: int = 2, in_flight: int) -> Pool:
    """The pool in `size` bytes of memory."""
    return Pool(cache, max(0, size // cache.block_bytes(block, element)), block, in_flight)


def of_config(config: Mapping[str, Any]) -> Cache:
    """The cache of a model by its (text) configuration, as transformers names the keys.

    Raises UnknownCacheError; KeyError and TypeError where dimensions are missing or are no numbers.
    """
    recurrent = [key for key in config if key.startswith(_RECURRENT) and config[key]]
    if recurrent:
        raise UnknownCacheError(f"recurrent layers (`{recurrent[0]}`)")
    if config.get("is_encoder_decoder"):
        raise UnknownCacheError("an encoder and a decoder")
    model = str(config.get("model_type", ""))
    if model.startswith(("gemma3n", "gemma4", "deepseek_v4", "llama4")) or "index_topk" in config:
        raise UnknownCacheError(f"the attention of `{model}`")
    layers = count(config, "num_hidden_layers", "n_layer", "num_layers", most=MOST_LAYERS)
    if config.get("kv_lora_rank"):
        latent = count(config, "kv_lora_rank") + count(config, "qk_rope_head_dim")
        return Cache((Layer(latent),) * layers)
    elements = 2 * _kv_heads(config) * _head_dim(config)
    return Cache(tuple(Layer(elements, window) for window in _windows(config, model, layers)))


def count(config: Mapping[str, Any], *names: str, most: int = MOST) -> int:
    """The first of these keys that is there, a whole number above zero."""
    for name in names:
        value = config.get(name)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise TypeError(f"`{name}` must be a whole number above 0, not {value!r}")
            if value > most:
                raise TypeError(f"`{name}` is {value:,}, more than any model has")
            return value
    raise KeyError(names[0])


def _kv_heads(config: Mapping[str, Any]) -> int:
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    return count(config, "num_key_value_heads", "num_kv_heads", "num_attention_heads", "n_head")


def _head_dim(config: Mapping[str, Any]) -> int:
    if config.get("head_dim") is not None:
        return count(config, "head_dim")
    hidden = count(config, "hidden_size", "n_embd", "d_model")
    heads = count(config, "num_attention_heads", "n_head")
    if hidden < heads:
        raise TypeError(f"a width of {hidden:,} is too small for {heads:,} attention heads")
    return hidden // heads


def _windows(config: Mapping[str, Any], model: str, layers: int) -> tuple[int | None, ...]:
    """Each layer's window. `sliding_window` alone counts for every layer, as in Mistral's first models."""
    window = count(config, "sliding_window") if config.get("sliding_window") else None
    kinds = config.get("layer_types")
    if kinds:
        strange = set(kinds) - _KINDS
        if strange:
            raise UnknownCacheError(f"layers of the kind `{min(strange)}`")
        if len(kinds) != layers:
            raise TypeError(f"`layer_types` has {len(kinds)} entries for {layers} layers")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if window is None or config.get("use_sliding_window") is False:
        return (None,) * layers
    pattern = 2 if model == "gemma2" else config.get("sliding_window_pattern")
    pattern = pattern or (6 if model.startswith("gemma3") else None)
    if isinstance(pattern, int):
        return tuple(window if (at + 1) % pattern else None for at in range(layers))
    if model.startswith("qwen2"):
        first = count(config, "max_window_layers")
        return tuple(window if at >= first else None for at in range(layers))
    return (window,) * layers
