"""Shrink the numbers of an architecture so that they keep their relations to one another.

Head counts shrink by one factor, head sizes by another, and widths by the product. These relations
still hold: hidden = heads x head size, expand x hidden = state-space heads x their size, and rotary
sizes are the same share of a head. A number's role is known from its name, as families of models
share names far more than code.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

VOCABULARY = 97
HIDDEN = 32
"""The approximate width of the copy."""
_WINDOW = 8
_EXPERTS = 4
_GROUPS = 2
_HEADS = 4
_HEAD_SIZE = 8
_WIDTH = 8


class Sizes(NamedTuple):
    """The limits of a copy's vocabulary and positions, on which its sequences depend."""

    vocabulary: int = VOCABULARY
    positions: int = 64


SIZES = Sizes()


_ROLES = {
    "kept": r"nextn|mtp|_id$|_ids$|kernel|conv_L|seed|chunk_size_feed"
    r"|image|patch|pattern$|original_max|^group_",
    "first": r"first_k_dense|dense_layers|max_window_layers|layer_start_index",
    "last index": r"layer_end_index",
    "last": r"kv_shared_layers",
    "every": r"_every$",
    "layers": r"(num|n)_(\w+_)?layers?$|^n_layer|coder_layers$|^num_blocks$|layers_per_stack$",
    "vocabulary": r"vocab_size",
    "positions": r"max_position|n_positions|n_ctx|max_seq|max_source|max_target"
    r"|model_max_length|^context_length",
    "window": r"window(_size)?$|attention_chunk_size|^(mamba_)?chunk_size|index_topk$"
    r"|^local_attention$",
    "chosen": r"(experts_per_tok(en)?|moe_top_?k|moe_k|top_k_experts)$",
    "chosen groups": r"topk_group$",
    "groups": r"n_?groups?$|expert_group$",
    "experts": r"experts$|expert_num$",
    "head size": r"head_?(dim|size)$|d_head$|dim_head$|^kv_channels$|^rotary_(dim|ndims)$|^d_kv$",
    "heads": r"heads?(_per_layer)?$|num_query_groups$",
    "width": r"hidden|intermediate|inner|width|ffn_?dim|_dim$|^dim_|dff$"
    r"|^d_|_d_|n_embd|rank$|embd?_dim|_size$|_proj",
}
"""The role of a number -> a pattern of its names; the first role whose pattern matches counts."""
_OF_LAYERS = ("first", "last index", "last", "layers")


@dataclass(frozen=True)
class Scale:
    """The factors by which the numbers of a config shrink."""

    heads: dict[int, int]
    """Numbers of query and key-value heads -> those of the copy."""
    head_size: int
    """The divisor of head sizes."""
    width: Fraction
    """The factor of widths."""
    hidden: int
    """The hidden size, of which other widths are multiples or parts."""
    split: int
    """The number of tensor-parallel ranks; a shrunk size keeps its common divisors with it."""


KEPT = Scale({}, 1, Fraction(1), 0, 1)
"""The scale under which every number stays as it is, except those that count layers."""


def scale_of(config: PreTrainedConfig, split: int, *, head_sizes: bool) -> Scale:
    """Compute the scale of an architecture for `split` tensor-parallel ranks.

    `head_sizes`: True if the sizes of heads may shrink.
    """
    text = _text(config)
    hidden = _first(text, "hidden_size", "d_model", "n_embd", "embedding_dim", "emb_dim") or 1
    names = ("num_attention_heads", "decoder_attention_heads", "num_heads", "mamba_num_heads")
    heads = _first(text, *names)
    if not heads:  # no attention
        return Scale({}, 1, Fraction(min(HIDDEN, hidden), hidden), hidden, split)
    kv = _first(text, "num_key_value_heads", "num_kv_heads", "kv_n_heads") or heads
    size = _first(text, "head_dim") or max(1, hidden // heads)
    tiny_kv = _count(min(kv, _GROUPS if kv < heads else _HEADS), kv, split)
    tiny_heads = tiny_kv
    if kv != heads:  # at least two query heads for each key-value head
        start = max(2 * tiny_kv, -(-_HEADS // tiny_kv) * tiny_kv)
        fitting = (n for n in range(start, heads, tiny_kv) if _splits_like(n, heads, split))
        tiny_heads = next(fitting, heads)
    divisor = 16 if head_sizes else 1
    sizes = [size, *(2 * part for part in _rotary(text, size))]
    sizes += [v for name, v in vars(text).items() if _is_int(v) and _role(name) == "head size"]
    while divisor > 1:
        if size // divisor >= _HEAD_SIZE and all(v % (2 * divisor) == 0 for v in sizes):
            break
        divisor //= 2
    width = Fraction(hidden * tiny_heads, heads * divisor)
    is_tied = hidden == heads * size
    if width.denominator != 1 or (width % _WIDTH and not is_tied):
        width = Fraction(_nearest(width, hidden, split))
    return Scale({heads: tiny_heads, kv: tiny_kv}, divisor, width / hidden, hidden, split)


def tiny_config(
    config: PreTrainedConfig,
    scale: Scale | None,
    keep: Sequence[int],
    layers: int,
    sizes: Sizes = SIZES,
) -> object:
    """Copy a config with its layers `keep` alone, and shrink each number by its role.

    Heads and widths shrink only with a `scale`. `layers`: the number of the config's blocks, or 0
    if it is not known.
    """
    small = copy.deepcopy(config)
    _Resize(scale, keep, layers, sizes).apply(small)
    return small


@dataclass(frozen=True)
class _Resize:
    """The change that makes a config, or a part of it, that of a tiny copy."""

    scale: Scale | None
    keep: Sequence[int]
    layers: int
    sizes: Sizes

    def apply(self, config: PreTrainedConfig) -> None:
        """Change a config and its parts, in place."""
        differ = "_heterogeneity_spec" in vars(config)
        overrides = config.to_dict().get("per_layer_config") if differ else None
        config.__dict__.pop("_heterogeneity_spec", None)
        for name, value in list(vars(config).items()):
            if hasattr(value, "to_dict"):
                self._of_part(config, value).apply(value)
            elif not name.startswith("_"):
                new = self.value(name, value)
                if new != value:
                    config.update({name: new})
        if overrides is not None:
            kept = {
                self.keep.index(int(layer)): self.value("", changes)
                for layer, changes in overrides.items()
                if int(layer) in self.keep
            }
            config.update({"per_layer_config": kept})

    def _of_part(self, config: PreTrainedConfig, part: PreTrainedConfig) -> _Resize:
        """Return the change for a part of the config.

        A part with attention heads, other than the decoder, gets a scale of its own.
        """
        scale = self.scale
        is_model = _first(part, "num_attention_heads") and part is not _text(config)
        if not is_model or scale is None or scale is KEPT:
            return self
        count = _first(part, "num_hidden_layers") or self.layers
        own = scale_of(part, scale.split, head_sizes=scale.head_size > 1)
        return _Resize(own, range(min(2, count)), count, self.sizes)

    def value(self, name: Any, value: Any) -> Any:
        """Return the tiny copy's value for the entry `name` of the config."""
        if isinstance(value, bool) or value is None:
            return value
        number = isinstance(value, int)
        kept = self.scale is KEPT and _role(str(name)) not in _OF_LAYERS
        if kept and (number or "token_id" in str(name)):
            return value
        if number:
            return self._number(name, value)
        if isinstance(value, dict):
            return {key: self.value(key, part) for key, part in value.items()}
        return self._list(name, value) if isinstance(value, (list, tuple)) else value

    def _list(self, name: str, value: Any) -> object:
        scale = self.scale
        kind = type(value)
        if re.search("token_id", name):
            return kind(0 for _ in value)
        if scale and scale.head_size > 1 and name in ("short_factor", "long_factor"):
            return value[: max(1, len(value) // scale.head_size)]
        if scale and scale.head_size > 1 and name == "mrope_section":
            parts = [part // scale.head_size for part in value]
            return [sum(value) // scale.head_size - sum(parts[1:]), *parts[1:]]
        if len(value) == self.layers > 0:
            return kind(self.value(name, value[index]) for index in self.keep)
        if _is_spelled_out(value, self.layers):
            kinds = [word for pattern, times in value for _ in range(times) for word in pattern]
            return [[[kinds[index]], 1] for index in self.keep]
        indices = all(_is_int(v) and 0 <= v < self.layers for v in value)
        if indices and re.search(r"layer|idx|index", name) and sorted(set(value)) == list(value):
            return kind(place for place, index in enumerate(self.keep) if index in value)
        return value

    def _number(self, name: str, value: int) -> int:
        scale = self.scale
        layers = self.layers
        role = _role(name)
        if re.search("token_id$|^(pad|bos|eos|unk|mask)_index$", name):
            return 0
        if role == "layers":
            if value == layers:
                return len(self.keep)
            return min(value, 2 if layers else len(self.keep))
        if role == "every":  # what happens every few blocks must happen in the copy, too (RWKV)
            return min(value, 1)
        if role == "first":
            return sum(index < value for index in self.keep)
        if role == "last index":
            return sum(index <= value for index in self.keep) - 1
        if role == "last":
            return sum(index >= layers - value for index in self.keep)
        limits = {**self.sizes._asdict(), "window": _WINDOW, "experts": _EXPERTS, "chosen": 2}
        limits |= {"chosen groups": 1, "groups": _GROUPS}
        if role in limits:
            return min(value, limits[role])
        if scale is None or value <= 1:
            return value
        if role == "heads":
            return scale.heads.get(value) or _other_heads(value, scale)
        if role == "head size":
            return value // scale.head_size if value % scale.head_size == 0 else value
        if role == "width" and value > _WIDTH:
            return _width(value, scale)
        return value


def windows_of(config: PreTrainedConfig) -> set[int]:
    """Return the lengths of attention windows and chunks, in tokens, in a config and its parts."""
    windows = set[int]()
    for name, value in vars(config).items():
        if hasattr(value, "to_dict"):
            windows |= windows_of(value)
        elif _is_int(value) and _role(name) == "window":
            windows.add(value)
    return windows


def _width(value: int, scale: Scale) -> int:
    exact = value * scale.width
    tied = value % scale.hidden == 0 or scale.hidden % value == 0
    if tied and exact.denominator == 1:
        return int(exact)
    return _nearest(exact, value, scale.split)


def _other_heads(value: int, scale: Scale) -> int:
    """Shrink a head count that `scale` does not list.

    It shrinks by the factor of the query heads if the result is whole. Else it becomes at most two,
    or is rounded up to a multiple of the key-value heads.
    """
    most = max(scale.heads, default=1)
    fewest = min(scale.heads, default=1)
    exact = Fraction(value * scale.heads.get(most, 1), most)
    if scale.heads and exact.denominator == 1:
        return int(exact)
    if value <= fewest:
        return _count(min(value, 2), value, 1)
    group = scale.heads.get(fewest, 1)
    return -(-exact.numerator // (exact.denominator * group)) * group


def _role(name: str) -> str:
    roles = (role for role, pattern in _ROLES.items() if re.search(pattern, name))
    return next(roles, "kept")


def _count(least: int, value: int, split: int) -> int:
    """Return the smallest number from `least` on whose gcd with `split` is that of `value`."""
    fitting = (n for n in range(least, value) if _splits_like(n, value, split))
    return next(fitting, value)


def _splits_like(n: int, value: int, split: int) -> bool:
    return gcd(n, split) == gcd(value, split)


def _nearest(exact: Fraction, value: int, split: int) -> int:
    """Return a width near `exact` that kernels take; a multiple of `split` if `value` is one."""
    rounded = max(_WIDTH, round(exact / _WIDTH) * _WIDTH)
    if split > 1:
        while not _splits_like(rounded, value, split):
            rounded += _WIDTH if value % _WIDTH == 0 else 1
    return min(rounded, value)


def _rotary(text: PreTrainedConfig, size: int) -> Iterator[int]:
    """Yield half the rotary size of a head, for each factor by which it is rotated in part."""
    rope = vars(text).get("rope_parameters")
    rope = rope if isinstance(rope, dict) else {}
    for values in (rope, vars(text), *rope.values()):
        for name in ("partial_rotary_factor", "rotary_pct"):
            part = values.get(name) if isinstance(values, dict) else None
            if isinstance(part, float):
                yield int(size * part) // 2


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_spelled_out(value: Sequence[Any], layers: int) -> bool:
    """Return True for lists of layer kinds, each with a count: [[["global", "local"], 12]]."""
    for pair in value:
        is_pair = isinstance(pair, (list, tuple)) and len(pair) == 2
        if not (is_pair and isinstance(pair[0], (list, tuple)) and isinstance(pair[1], int)):
            return False
    return bool(value) and sum(len(kinds) * times for kinds, times in value) == layers


def _first(config: PreTrainedConfig, *names: str) -> int | None:
    """Return the first of these numbers that a config has, by its own names, and that is not 0."""
    for name in names:
        value = vars(config).get(getattr(config, "attribute_map", {}).get(name, name))
        if isinstance(value, int) and value:
            return value
    return None


def _text(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the part of a config that describes the decoder."""
    for name in ("text_config", "decoder", "llm_config", "thinker_config"):
        if hasattr(part := vars(config).get(name), "to_dict"):
            return part
    return config
