"""Any Hugging Face causal language model as a `ModelSpec`."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import guard_torch_init_functions
from transformers.utils import ModelOutput

from trainer.errors import ConfigError, Problem, first_line
from trainer.models.blocks import blocks_by_run
from trainer.models.experts import idle_parameters
from trainer.models.kernels import check_kernels
from trainer.models.materialise import built_tensor
from trainer.models.names import aliases_of, in_short, pattern_of
from trainer.models.spec import LanguageModel, ModelFiles, ModelSpec, NoWeights, TinyCopies, Weights
from trainer.models.tiny import tiny
from trainer.models.tiny_config import KEPT, SIZES, Sizes, tiny_config
from trainer.models.weights import SafetensorsFolder, names_in, open_weights
from trainer.storage import parse_json, read_file

EMBEDDED: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
"""The config used when no model is named: 5.4 million parameters, for the embedded tokenizer."""

NOT_ARCHITECTURE = ("_name_or_path", "architectures", "dtype", "transformers_version", "use_cache")
"""Config keys that may differ while the architecture is the same."""


def read_config(options: Any) -> PreTrainedConfig:
    """Read and check the architecture that `trainer.model` names, building nothing. Raises
    ConfigError.
    """
    if options.name_or_path is not None:
        return _pretrained_config(options)
    values = EMBEDDED if options.config is None else options.config
    place = "trainer.model.config"
    if isinstance(values, str):
        place, values = f"trainer.model.config: {values}", _read_json(Path(values))
    if "model_type" not in values:
        raise ConfigError(
            Problem(place, "no model_type", 'an architecture, such as "model_type": "llama"')
        )
    try:
        config = AutoConfig.for_model(**values)
    except Exception as error:  # transformers raises many kinds for a bad value
        raise ConfigError(
            Problem(place, first_line(error), "a config that transformers accepts")
        ) from error
    check_kernels(config, place)
    return config


def spec_of(config: PreTrainedConfig, options: Any, *, weights: bool = True) -> ModelSpec:
    """Build the spec of an architecture, with its weights where `trainer.model.name_or_path` names
    some.

    Without `weights`, none are looked for or downloaded. Raises ConfigError for an architecture
    that can't be built.
    """
    name, build = options.name_or_path or config.model_type, _builder(config, options)
    if getattr(
        config, "is_encoder_decoder", False
    ):  # checked before the model is built, which changes the config
        seen = (
            f"{type(config).__name__} is an encoder with a decoder, of which the decoder alone "
            "would be trained"
        )
        mend = 'Set "is_encoder_decoder": false in its config if that is what you want.'
        raise ConfigError(Problem(f"trainer.model: {name}", seen, "a decoder", mend))
    stated = list(getattr(config, "architectures", None) or ())
    try:
        model = build()
    except Exception as error:  # whatever the family's own code raises for the config
        seen, expected = first_line(error), "an architecture with a causal language model head"
        if not isinstance(error, ValueError | ImportError):
            seen, expected = (
                f"{type(error).__name__}: {error}",
                "a config that the family's own code builds a model of",
            )
        raise ConfigError(Problem(f"trainer.model: {name}", seen[:200], expected)) from error
    given, dropped = (
        weights_of(model, options) if options.name_or_path and weights else (NoWeights(), "")
    )
    kind = type(model).__name__
    notes = [dropped] if dropped else []
    if options.name_or_path and stated and kind not in stated:
        notes.insert(0, f"{name} says that it is a {stated[0]}; a {kind} is trained and saved")
    elif type(model.config) is not type(config):
        notes.insert(
            0, f"of {config.model_type} the text model alone is trained and saved, a {kind}"
        )

    @cache
    def tiny_copy(layers: int = 3, split: int = 1, sizes: Sizes = SIZES) -> ModelSpec:
        return _tiny_copy(config, options, name, layers, split, sizes)

    spec = describe(model, name, build, given, tiny_copy)

    def first_blocks(layers: int) -> ModelSpec:
        few = _builder(tiny_config(config, KEPT, range(layers), len(spec.blocks)), options)
        return describe(few(), name, few, NoWeights())

    return replace(
        spec,
        tiny=replace(spec.tiny, first_blocks=first_blocks),
        files=replace(spec.files, revision=options.revision),
        notes=tuple(notes),
    )


def _tiny_copy(
    config: PreTrainedConfig, options: Any, name: str, layers: int, split: int, sizes: Sizes
) -> ModelSpec:
    def spec_of_tiny(small: Any) -> ModelSpec:
        build = _builder(small, options, on_cpu=True)
        return describe(build(), name, build, NoWeights())

    try:
        full = _builder(config, options)()
        blocks = _blocks(full) or _alike(
            full, tiny(config, spec_of_tiny, full, (), layers, split, sizes)[0].blocks
        )
        small, lacks = tiny(config, spec_of_tiny, full, blocks, layers, split, sizes)
    except ConfigError:
        raise
    except Exception as error:  # whatever the family's own code raises
        seen = f"no tiny copy of it runs: {type(error).__name__}: {first_line(error)}"
        raise ConfigError(
            Problem(f"trainer.model: {name}", seen, "an architecture that can be tried out")
        ) from error
    return replace(small, tiny=replace(small.tiny, lacks=lacks))


def _builder(
    config: PreTrainedConfig, options: Any, on_cpu: bool = False
) -> Callable[[], nn.Module]:
    runs = options.attention in ("eager", "sdpa") or not on_cpu
    attention = {"attn_implementation": options.attention} if options.attention and runs else {}

    def build() -> nn.Module:
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(
                config,
                trust_remote_code=options.trust_remote_code,
                dtype=torch.float32,
                **attention,
            )
        bodies = [
            name for name, child in model.named_children() if isinstance(child, PreTrainedModel)
        ]
        if (
            model.base_model is model and len(bodies) == 1
        ):  # Llama-4's text model states another prefix than it has
            model.base_model_prefix = bodies[0]  # type: ignore[assignment]
        if getattr(config, "rescale_every", 0):
            # RWKV would divide weights in place when it evaluates, for float16, and what is saved
            # then would be wrong
            unscaled = copy.deepcopy(model.base_model.config)  # type: ignore[union-attr]
            unscaled.rescale_every = 0  # type: ignore[union-attr]
            model.base_model.config = unscaled  # type: ignore[union-attr]
        return model

    return build


def describe(
    model: nn.Module,
    name: str,
    build: Callable[[], nn.Module],
    weights: Weights,
    tiny_copy: Callable[..., ModelSpec] | None = None,
) -> ModelSpec:
    """Read a model's blocks, head, ties and sizes on the meta device."""
    assert isinstance(model, PreTrainedModel)
    text, named = _text_config(model), dict(model.named_parameters())
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    hidden = getattr(text, "hidden_size", None)
    heads, kv_heads, width = _heads(text, hidden or 0)
    blocks = _blocks(model)
    if not blocks and tiny_copy:
        with suppress(ConfigError):  # without a tiny copy, no blocks are known
            blocks = _alike(model, tiny_copy().blocks)
    is_tied = head is not None and table is not None and head.weight is table.weight
    spec = ModelSpec(
        name=name,
        build=build,
        initialise=_initialise,
        blocks=blocks,
        parameters=sum(parameter.numel() for parameter in named.values()),
        language=LanguageModel(
            head_parameters=head.weight.numel() if head is not None else 0,
            embedding_parameters=0 if is_tied or table is None else table.weight.numel(),
            idle_parameters=idle_parameters(model, text),
            # target ids must be in the table, too
            vocabulary=min(
                (len(module.weight) for module in (table, head) if module is not None), default=0
            ),
            positions=_positions(model, text),
            hidden_size=hidden,
            layers=getattr(text, "num_hidden_layers", 0),
            attention_width=width,
            heads=heads,
            kv_heads=kv_heads,
            tensor_plan=_tensor_plan(model, blocks),
            plain_head=_has_plain_head(model),
            own_loss=bool(getattr(text, "output_router_logits", False)),
        ),
        tied=aliases_of(model),
        weights=weights,
        constructed=partial(built_tensor, build),
        tiny=TinyCopies(copy=tiny_copy),
        config=_architecture(model),
        files=ModelFiles(
            opens="AutoModelForCausalLM.from_pretrained",
            save_config=lambda folder, dtype: _save_config(model, folder, dtype),
        ),
    )
    return spec if blocks or tiny_copy else replace(spec, blocks=blocks_by_run(spec))


def _text_config(model: Any) -> Any:
    try:
        return model.config.get_text_config()
    except ValueError as error:
        raise ConfigError(
            Problem(f"trainer.model: {model.config.model_type}", first_line(error), "one decoder")
        ) from error


def _heads(text: Any, hidden: int) -> tuple[int, int, int]:
    """Return query heads, key-value heads and heads x head size: greatest common divisors and mean
    over layers.
    """
    layers = list(text.per_layer_config) if getattr(text, "is_heterogeneous", False) else [text]
    heads = [getattr(layer, "num_attention_heads", 0) or 0 for layer in layers]
    kv_heads = [
        getattr(layer, "num_key_value_heads", None) or many
        for layer, many in zip(layers, heads, strict=True)
    ]
    sizes = [
        getattr(layer, "head_dim", None) or (hidden // many if many else 0)
        for layer, many in zip(layers, heads, strict=True)
    ]
    width = sum(many * size for many, size in zip(heads, sizes, strict=True)) // len(layers)
    return math.gcd(*heads), math.gcd(*kv_heads), width


def _alike(model: nn.Module, blocks: tuple[str, ...]) -> tuple[str, ...]:
    """Return the model's blocks: the members of the lists that hold the blocks of its tiny copy."""
    lists = {block.rpartition(".")[0] for block in blocks}
    return tuple(
        f"{name}.{index}"
        for name in lists
        for index in range(len(list(model.get_submodule(name).children())))
    )


def _blocks(model: Any) -> tuple[str, ...]:
    """Return the members of the one module list under the base model that has as many as the config
    has layers.
    """
    layers = getattr(_text_config(model), "num_hidden_layers", 0)
    lists = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == layers
        and name.startswith(model.base_model_prefix)
    ]
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    return tuple(f"{outermost[0]}.{i}" for i in range(layers)) if len(outermost) == 1 else ()


def _positions(model: nn.Module, text: Any) -> int | None:
    """Return the most tokens of a row; RoBERTa's kin number them from behind the padding's."""
    tables = (
        m for name, m in model.named_modules() if "position" in name and isinstance(m, nn.Embedding)
    )
    before = max(
        (table.padding_idx + 1 for table in tables if table.padding_idx is not None), default=0
    )
    stated = getattr(text, "max_position_embeddings", None)
    return stated and stated - before


def _tensor_plan(model: PreTrainedModel, blocks: tuple[str, ...]) -> dict[str, str]:
    """Return the rules of the model's tensor plan within the blocks, layer numbers filled in."""
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    inside = [name for name in names if any(name.startswith(f"{block}.") for block in blocks)]
    plan = {name: model.tp_plan.get(pattern_of(name)) for name in inside}
    return {name: style for name, style in plan.items() if style is not None}


@dataclass
class _BelowHead(ModelOutput):
    """The output of a base model, with every field that the families use."""

    last_hidden_state: torch.Tensor | None = None
    past_key_values: Any = None
    hidden_states: Any = None
    attentions: Any = None
    cross_attentions: Any = None
    router_logits: Any = None


def _has_plain_head(model: PreTrainedModel) -> bool:
    """Return True if the logits are the head's product with the last hidden state, untouched.

    Runs the model's own forward on the meta device with a stand-in for everything below the head,
    and checks that the head sees that very storage and that its output is returned as the logits.
    This detects soft caps, logit scales and upcasts.
    """
    head, base = model.get_output_embeddings(), model.base_model
    if type(head) is not nn.Linear or base is model:
        return False
    hidden = torch.empty(1, 2, head.in_features, device="meta", dtype=head.weight.dtype)
    seen: dict[str, torch.Tensor] = {}

    def watch(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        seen.update(input=inputs[0], output=output)

    hook = head.register_forward_hook(watch)
    base.forward = lambda *args, **kwargs: _BelowHead(last_hidden_state=hidden)  # type: ignore[assignment]
    try:
        logits = model(input_ids=torch.zeros(1, 2, dtype=torch.long, device="meta")).logits
    except Exception:  # a forward that needs more than this has no plain head
        return False
    finally:
        hook.remove()
        del base.forward
    same_input = (
        "input" in seen
        and seen["input"].untyped_storage()._cdata == hidden.untyped_storage()._cdata
    )
    return same_input and logits is seen["output"]


def _initialise(root: nn.Module, name: str) -> None:
    """Initialise one module by the rule of the nearest transformers model around it."""
    owner, module = root, root
    for part in name.split(".") if name else ():
        module = getattr(module, part)
        owner = module if isinstance(module, PreTrainedModel) else owner
    with guard_torch_init_functions():
        owner._init_weights(module)  # type: ignore[operator]


def weights_of(model: nn.Module, options: Any) -> tuple[Weights, str]:
    """Open the weights of the folder or hub id; also return a line on tensors that the model has no
    place for.
    """
    folder = Path(options.name_or_path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(
            snapshot_download(
                options.name_or_path,
                revision=options.revision,
                allow_patterns=["*.json", "*.safetensors", "*.model"],
            )
        )
    parameters, state = {name for name, _ in model.named_parameters()}, model.state_dict().keys()
    unread: set[str] = set()

    def load_whole() -> dict[str, torch.Tensor]:
        whole, info = AutoModelForCausalLM.from_pretrained(
            options.name_or_path,
            revision=options.revision,
            trust_remote_code=options.trust_remote_code,
            dtype="auto",
            output_loading_info=True,
        )
        place, expected = f"{options.name_or_path}: {{}}", "every parameter of the model"
        if absent := sorted(
            parameters & set(info["missing_keys"])
        ):  # transformers fills these with initial values
            raise ConfigError(
                *(
                    Problem(place.format(name), "absent from the weights", expected)
                    for name in absent
                )
            )
        unread.update(info["unexpected_keys"])
        silent = [re.compile(pattern) for pattern in whole._keys_to_ignore_on_load_unexpected or ()]
        unread.update(
            name for name in names_in(folder) if any(pattern.search(name) for pattern in silent)
        )
        return whole.state_dict()  # type: ignore[no-any-return]

    weights = open_weights(folder, parameters, load_whole)
    if isinstance(weights, SafetensorsFolder):
        unread.update(weights.names() - state)
    if not unread:
        return weights, ""
    said = (
        f"{len(unread)} tensors of {options.name_or_path} have no place in a "
        f"{type(model).__name__} and are left out"
    )
    return weights, f"{said}: {in_short(sorted(unread), state)}"


def _pretrained_config(options: Any) -> PreTrainedConfig:
    place = f"trainer.model.name_or_path: {options.name_or_path}"
    folder = Path(options.name_or_path)
    looks_local = (
        options.name_or_path.startswith(("/", ".", "~")) or options.name_or_path.count("/") > 1
    )
    if not folder.is_dir() and looks_local:
        raise ConfigError(
            Problem(place, "no such folder", "a folder that save_pretrained wrote, or a hub id")
        )
    if folder.is_dir() and not (folder / "config.json").is_file():
        seen, mend = "no config.json in it", ""
        if (folder / "adapter_config.json").is_file():
            seen = "an adapter, which is no model by itself"
            mend = "Name its base, or the model that it was merged into (trainer.adapter.merge)."
        raise ConfigError(Problem(place, seen, "a folder that save_pretrained wrote", mend))
    try:
        config = AutoConfig.from_pretrained(
            options.name_or_path,
            revision=options.revision,
            trust_remote_code=options.trust_remote_code,
        )
    except Exception as error:  # network, JSON and value errors alike
        raise ConfigError(
            Problem(place, first_line(error), "a folder or hub id that transformers opens")
        ) from error
    check_kernels(config, place)
    return config


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        values = parse_json(read_file(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            Problem(f"trainer.model.config: {path}", first_line(error), "a JSON file")
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(
            Problem(f"trainer.model.config: {path}", type(values).__name__, "a JSON object")
        )
    return values


def _architecture(model: Any) -> dict[str, Any]:
    config = json.loads(model.config.to_json_string(use_diff=False))
    return {key: value for key, value in config.items() if key not in NOT_ARCHITECTURE}


def _save_config(model: PreTrainedModel, folder: Path, dtype: torch.dtype | None) -> None:
    config = copy.deepcopy(model.config)
    config.dtype = dtype or config.dtype
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
