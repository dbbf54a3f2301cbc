"""Shrink the numbers of an architecture so that they keep their relations to one another.

Head counts shrink by one factor, head sizes by another, and widths by the product: hidden = heads x
head size, expand x hidden = state-space heads x their size, and rotary sizes keep their share of a
head. A number's role is known by its name: the families share names far more than code.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

VOCABULARY = 97
HIDDEN = 32
"""The approximate width of the copy."""
_WINDOW, _EXPERTS, _GROUPS, _HEADS, _HEAD_SIZE, _WIDTH = 8, 4, 2, 4, 8, 8


class Sizes(NamedTuple):
    """The limits of a copy's vocabulary and positions, on which its rows of tokens depend."""

    vocabulary: int = VOCABULARY
    positions: int = 64


SIZES = Sizes()


# the first pattern found in an attribute's name gives the role of its number
_ROLES: tuple[tuple[str, str], ...] = (
    (
        "kept",
        r"nextn|mtp|_id$|_ids$|kernel|conv_L|seed|chunk_size_feed|image|patch|pattern$|original_max|^group_",
    ),
    ("first", r"first_k_dense|dense_layers|max_window_layers|layer_start_index"),
    ("last index", r"layer_end_index"),
    ("last", r"kv_shared_layers"),
    ("every", r"_every$"),
    ("layers", r"(num|n)_(\w+_)?layers?$|^n_layer|coder_layers$|^num_blocks$|layers_per_stack$"),
    ("vocabulary", r"vocab_size"),
    (
        "positions",
        r"max_position|n_positions|n_ctx|max_seq|max_source|max_target|model_max_length|^context_length",
    ),
    (
        "window",
        r"window(_size)?$|attention_chunk_size|^(mamba_)?chunk_size|index_topk$|^local_attention$",
    ),
    ("chosen", r"(experts_per_tok(en)?|moe_top_?k|moe_k|top_k_experts)$"),
    ("chosen groups", r"topk_group$"),
    ("groups", r"n_?groups?$|expert_group$"),
    ("experts", r"experts$|expert_num$"),
    ("head size", r"head_?(dim|size)$|d_head$|dim_head$|^kv_channels$|^rotary_(dim|ndims)$|^d_kv$"),
    ("heads", r"heads?(_per_layer)?$|num_query_groups$"),
    (
        "width",
        r"hidden|intermediate|inner|width|ffn_?dim|_dim$|^dim_|dff$|^d_|_d_|n_embd|rank$|embd?_dim|_size$|_proj",
    ),
)
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
    """The number of tensor parallel ranks: a multiple of it stays one, and a non-multiple stays a
    non-multiple.
    """


KEPT = Scale({}, 1, Fraction(1), 0, 1)
"""The scale under which every number stays as it is, except those that count layers."""


def scale_of(config: Any, split: int, *, head_sizes: bool) -> Scale:
    """Compute the scale of an architecture; `head_sizes` says if the sizes of heads may shrink."""
    text = _text(config)
    numbers = dict(_numbers(text))
    hidden = _first(text, "hidden_size", "d_model", "n_embd", "embedding_dim", "emb_dim") or 1
    heads = (
        _first(
            text, "num_attention_heads", "decoder_attention_heads", "num_heads", "mamba_num_heads"
        )
        or 0
    )
    if not heads:  # no attention
        return Scale({}, 1, Fraction(min(HIDDEN, hidden), hidden), hidden, split)
    kv = _first(text, "num_key_value_heads", "num_kv_heads", "kv_n_heads") or heads
    size = _first(text, "head_dim") or max(1, hidden // heads)
    few = _count(min(kv, _GROUPS if kv < heads else _HEADS), kv, split)
    many = (
        few
        if kv == heads
        else next(
            n for n in range(few, heads + 1, few) if n == heads or _fits(n, few, heads, split)
        )
    )
    divisor = 16 if head_sizes else 1
    sizes = [value for name, value in numbers.items() if _role(name) == "head size"] + [size]
    sizes += [2 * part for part in _rotary(text, size)]
    while divisor > 1 and not (
        size // divisor >= _HEAD_SIZE and all(v % (2 * divisor) == 0 for v in sizes)
    ):
        divisor //= 2
    width = Fraction(hidden * many, heads * divisor)
    if width.denominator != 1 or (
        hidden != heads * size and width % _WIDTH
    ):  # nothing ties the width to the heads
        width = Fraction(_nearest(width, hidden, split))
    return Scale({heads: many, kv: few}, divisor, width / hidden, hidden, split)


def tiny_config(
    config: Any, scale: Scale | None, keep: Sequence[int], layers: int, sizes: Sizes = SIZES
) -> Any:
    """Copy the config with the layers `keep` of `layers`, each number by its role; widths shrink
    only with a `scale`.

    `layers` is 0 if it is unknown which number counts the blocks.
    """
    small = copy.deepcopy(config)
    _make_tiny(small, scale, keep, layers, sizes)
    return small


def _make_tiny(
    config: Any, scale: Scale | None, keep: Sequence[int], layers: int, sizes: Sizes
) -> None:
    overrides = (
        config.to_dict().get("per_layer_config") if "_heterogeneity_spec" in vars(config) else None
    )
    config.__dict__.pop("_heterogeneity_spec", None)
    for name, value in list(vars(config).items()):
        if hasattr(
            value, "to_dict"
        ):  # a part of the config: with heads of its own, it is a model of its own
            own = (
                scale not in (None, KEPT)
                and _first(value, "num_attention_heads")
                and value is not _text(config)
            )
            inner = (
                scale_of(value, scale.split, head_sizes=scale.head_size > 1)
                if own and scale
                else scale
            )
            count = _first(value, "num_hidden_layers") or layers
            _make_tiny(
                value, inner, range(min(2, count)) if own else keep, count if own else layers, sizes
            )
        elif not name.startswith("_"):
            new = _value(name, value, scale, keep, layers, sizes)
            if new != value:
                setattr(config, name, new)
    if overrides is not None:
        config.per_layer_config = {
            keep.index(int(layer)): {
                k: _value(k, v, scale, keep, layers, sizes) for k, v in changes.items()
            }
            for layer, changes in overrides.items()
            if int(layer) in keep
        }


def _value(
    name: str, value: Any, scale: Scale | None, keep: Sequence[int], layers: int, sizes: Sizes
) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if (
        scale is KEPT
        and (isinstance(value, int) or "token_id" in str(name))
        and _role(str(name)) not in _OF_LAYERS
    ):
        return value
    if isinstance(value, int):
        return _number(name, value, scale, keep, layers, sizes)
    if isinstance(value, dict):
        return {k: _value(k, v, scale, keep, layers, sizes) for k, v in value.items()}
    if not isinstance(value, (list, tuple)):
        return value
    if re.search("token_id", name):
        return type(value)(0 for _ in value)
    if scale and scale.head_size > 1 and name in ("short_factor", "long_factor"):
        return value[: max(1, len(value) // scale.head_size)]
    if scale and scale.head_size > 1 and name == "mrope_section":
        parts = [part // scale.head_size for part in value]
        return [sum(value) // scale.head_size - sum(parts[1:]), *parts[1:]]
    if len(value) == layers > 0:
        return type(value)(_value(name, value[index], scale, keep, layers, sizes) for index in keep)
    if _is_spelled_out(value, layers):  # [[["global", "local"], 12]]
        kinds = [kind for pattern, times in value for _ in range(times) for kind in pattern]
        return [[[kinds[index]], 1] for index in keep]
    indices = all(isinstance(v, int) and not isinstance(v, bool) and 0 <= v < layers for v in value)
    if indices and re.search(r"layer|idx|index", name) and sorted(set(value)) == list(value):
        return type(value)(place for place, index in enumerate(keep) if index in value)
    return value


def _number(
    name: str, value: int, scale: Scale | None, keep: Sequence[int], layers: int, sizes: Sizes
) -> int:
    role = _role(name)
    below = sum(index < value for index in keep)
    if re.search("token_id$|^(pad|bos|eos|unk|mask)_index$", name):
        return 0
    if role == "layers":
        return len(keep) if value == layers else min(value, 2 if layers else len(keep))
    if role == "every":  # events every few blocks occur in the copy, too: RWKV divides weights
        return min(value, 1)
    if role in ("first", "last index", "last"):
        end = sum(index <= value for index in keep) - 1
        return {
            "first": below,
            "last index": end,
            "last": sum(index >= layers - value for index in keep),
        }[role]
    limits = {**sizes._asdict(), "window": _WINDOW, "experts": _EXPERTS, "chosen": 2}
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
        exact, tied = value * scale.width, value % scale.hidden == 0 or scale.hidden % value == 0
        return (
            int(exact) if tied and exact.denominator == 1 else _nearest(exact, value, scale.split)
        )
    return value


def _other_heads(value: int, scale: Scale) -> int:
    """Shrink a head count that `scale` does not list: by its factor if that gives whole heads, else
    to a few.
    """
    many, few = (max(scale.heads), min(scale.heads)) if scale.heads else (1, 1)
    exact = Fraction(value * scale.heads.get(many, 1), many)
    if scale.heads and exact.denominator == 1:
        return int(exact)
    group = scale.heads.get(few, 1)
    return (
        -(-exact.numerator // (exact.denominator * group)) * group
        if value > few
        else _count(min(value, 2), value, 1)
    )


def _role(name: str) -> str:
    return next((role for role, pattern in _ROLES if re.search(pattern, name)), "kept")


def _count(least: int, value: int, split: int) -> int:
    """Return the smallest number from `least` on that is, or is not, a multiple of `split` as
    `value` is.
    """
    return next(
        n for n in range(least, value + 1) if n == value or (n % split == 0) == (value % split == 0)
    )


def _fits(n: int, few: int, heads: int, split: int) -> bool:
    return n >= _HEADS and n > few and (n % split == 0) == (heads % split == 0)


def _nearest(exact: Fraction, value: int, split: int) -> int:
    """Return a width near `exact`, of a size that kernels take, and a multiple of `split` if
    `value` is.
    """
    rounded = max(_WIDTH, round(exact / _WIDTH) * _WIDTH)
    if split > 1:
        while (rounded % split == 0) != (value % split == 0):
            rounded += _WIDTH if value % _WIDTH == 0 else 1
    return min(rounded, value)


def _rotary(text: Any, size: int) -> Iterator[int]:
    """Yield the rotated sizes of a head where it is rotated in part, halved, since the axes share
    them.
    """
    rope = [vars(text).get("rope_parameters"), vars(text)]
    rope += (
        [v for v in rope[0].values() if isinstance(v, dict)] if isinstance(rope[0], dict) else []
    )
    for values in rope:
        if isinstance(values, dict):
            for name in ("partial_rotary_factor", "rotary_pct"):
                if isinstance(part := values.get(name), float):
                    yield int(size * part) // 2


def _numbers(config: Any) -> Iterator[tuple[str, int]]:
    for name, value in vars(config).items():
        if isinstance(value, int) and not isinstance(value, bool):
            yield name, value


def _is_spelled_out(value: Sequence[Any], layers: int) -> bool:
    pairs = all(
        isinstance(v, (list, tuple)) and len(v) == 2 and isinstance(v[1], int) for v in value
    )
    return bool(value) and pairs and sum(len(v[0]) * v[1] for v in value) == layers


def _first(config: Any, *names: str) -> int | None:
    """Return the first of these values that the config has, under the name by which it stores
    it.
    """
    for name in names:
        value = vars(config).get(getattr(config, "attribute_map", {}).get(name, name))
        if isinstance(value, int) and value:
            return value
    return None


def _text(config: Any) -> Any:
    """Return the part of a config that describes the decoder."""
    for name in ("text_config", "decoder", "llm_config", "thinker_config"):
        if hasattr(part := vars(config).get(name), "to_dict"):
            return part
    return config
