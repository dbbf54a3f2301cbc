"""Any Hugging Face causal language model as a `ModelSpec`."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import guard_torch_init_functions
from transformers.utils import ModelOutput

from trainer.errors import ConfigError, Problem
from trainer.models.shrink import shrink_model
from trainer.models.spec import ModelSpec, NoWeights, Weights
from trainer.models.weights import open_weights

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
"""What is trained when no model is named: 5.4 million parameters, for the embedded tokenizer."""

NOT_ARCHITECTURE = ("_name_or_path", "architectures", "dtype", "transformers_version", "use_cache")
"""What may differ in a model's config and leave the model the same."""


def read_config(options: Any) -> PreTrainedConfig:
    """The architecture that `trainer.model` asks for, checked, nothing built. Raises ConfigError."""
    if options.name_or_path is not None:
        return _pretrained_config(options)
    values = EMBEDDED if options.config is None else options.config
    place = "trainer.model.config"
    if isinstance(values, str):
        place, values = f"trainer.model.config: {values}", _read_json(Path(values))
    if "model_type" not in values:
        raise ConfigError(Problem(place, "no model_type", 'an architecture, such as "model_type": "llama"'))
    try:
        return AutoConfig.for_model(**values)
    except Exception as error:  # transformers raises many kinds for a bad value
        raise ConfigError(Problem(place, _first_line(error), "a config that transformers accepts")) from error


def spec_of(config: PreTrainedConfig, options: Any) -> ModelSpec:
    """The spec of an architecture, with its weights where `trainer.model.name_or_path` names some."""
    name, build = options.name_or_path or config.model_type, _builder(config, options)
    try:
        model = build()
    except (ValueError, ImportError) as error:
        raise ConfigError(
            Problem(f"trainer.model: {name}", _first_line(error), "an architecture with a causal language model head")
        ) from error
    weights = _weights(model, options) if options.name_or_path else NoWeights()

    def shrunk() -> ModelSpec:
        build = _builder(shrink_model(config, layers=3), options)
        return describe(build(), name, build, NoWeights())

    return describe(model, name, build, weights, shrunk)


def _builder(config: PreTrainedConfig, options: Any) -> Callable[[], nn.Module]:
    attention = {"attn_implementation": options.attention} if options.attention else {}

    def build() -> nn.Module:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                config, trust_remote_code=options.trust_remote_code, dtype=torch.float32, **attention
            )

    return build


def describe(
    model: nn.Module,
    name: str,
    build: Callable[[], nn.Module],
    weights: Weights,
    shrunk: Callable[[], ModelSpec] | None = None,
) -> ModelSpec:
    """Read a model on the meta device: its blocks, head, ties and sizes."""
    assert isinstance(model, PreTrainedModel)
    text = model.config.get_text_config()
    named = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in named.items()}
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    heads = getattr(text, "num_attention_heads", 0) or 0
    head_size = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else 0)
    aliases = {
        alias: names[id(parameter)]
        for alias, parameter in model.named_parameters(remove_duplicate=False)
        if alias not in named
    }
    blocks = _blocks(model, getattr(text, "num_hidden_layers", 0))
    is_tied = head is not None and table is not None and head.weight is table.weight
    return ModelSpec(
        name=name,
        build=build,
        initialise=_initialise,
        blocks=blocks,
        parameters=sum(parameter.numel() for parameter in named.values()),
        head_parameters=head.weight.numel() if head is not None else 0,
        embedding_parameters=0 if is_tied or table is None else table.weight.numel(),
        vocabulary=table.weight.shape[0] if table is not None else 0,
        hidden_size=text.hidden_size,
        layers=getattr(text, "num_hidden_layers", 0),
        attention_width=heads * head_size,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        tensor_plan=_tensor_plan(model, blocks),
        tied=aliases,
        dropout=_drops(model),
        plain_head=_has_plain_head(model),
        weights=weights,
        shrunk=shrunk,
        config=_architecture(model),
        save_config=lambda folder, dtype: _save_config(model, folder, dtype),
    )


def _blocks(model: PreTrainedModel, layers: int) -> tuple[str, ...]:
    """The one module list under the base model that is as long as the config says there are layers."""
    lists = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == layers and name.startswith(model.base_model_prefix)
    ]
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    return tuple(f"{outermost[0]}.{i}" for i in range(layers)) if len(outermost) == 1 else ()


def _tensor_plan(model: PreTrainedModel, blocks: tuple[str, ...]) -> dict[str, str]:
    """The rules of the model's plan, layer numbers filled in; those for what is no part of a block are left out."""
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    inside = [name for name in names if any(name.startswith(f"{block}.") for block in blocks)]
    plan = {name: model.tp_plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name)) for name in inside}
    return {name: style for name, style in plan.items() if style is not None}


def _drops(model: PreTrainedModel) -> bool:
    modules = any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
    values = model.config.get_text_config().to_dict().items()
    return modules or any("drop" in key and isinstance(value, float) and value > 0 for key, value in values)


@dataclass
class _BelowHead(ModelOutput):
    """What base models return, in the union of the names that the families use."""

    last_hidden_state: torch.Tensor | None = None
    past_key_values: Any = None
    hidden_states: Any = None
    attentions: Any = None
    cross_attentions: Any = None
    router_logits: Any = None


def _has_plain_head(model: PreTrainedModel) -> bool:
    """Whether the logits are the head's product with the last hidden state, untouched.

    Runs the model's own forward on the meta device with a stand-in for everything below the head, and
    looks whether the head sees that very storage and whether its output comes out as the logits.
    Soft caps, logit scales and upcasts all show.
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
    same_input = "input" in seen and seen["input"].untyped_storage()._cdata == hidden.untyped_storage()._cdata
    return same_input and logits is seen["output"]


def _initialise(root: nn.Module, name: str) -> None:
    """Initial values of one module by transformers' own rule: that of the nearest model around it."""
    owner, module = root, root
    for part in name.split(".") if name else ():
        module = getattr(module, part)
        owner = module if isinstance(module, PreTrainedModel) else owner
    with guard_torch_init_functions():
        owner._init_weights(module)  # type: ignore[operator]


def _weights(model: nn.Module, options: Any) -> Weights:
    folder = Path(options.name_or_path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(
            snapshot_download(
                options.name_or_path, revision=options.revision, allow_patterns=["*.json", "*.safetensors", "*.model"]
            )
        )

    def load_whole() -> dict[str, torch.Tensor]:
        whole = AutoModelForCausalLM.from_pretrained(
            options.name_or_path, revision=options.revision, trust_remote_code=options.trust_remote_code, dtype="auto"
        )
        return whole.state_dict()

    return open_weights(folder, {name for name, _ in model.named_parameters()}, load_whole)


def _pretrained_config(options: Any) -> PreTrainedConfig:
    place = f"trainer.model.name_or_path: {options.name_or_path}"
    folder = Path(options.name_or_path)
    looks_local = options.name_or_path.startswith(("/", ".", "~")) or options.name_or_path.count("/") > 1
    if not folder.is_dir() and looks_local:
        raise ConfigError(Problem(place, "no such folder", "a folder that save_pretrained wrote, or a hub id"))
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ConfigError(Problem(place, "no config.json in it", "a folder that save_pretrained wrote"))
    try:
        return AutoConfig.from_pretrained(
            options.name_or_path, revision=options.revision, trust_remote_code=options.trust_remote_code
        )
    except Exception as error:  # network, JSON and value errors alike
        raise ConfigError(Problem(place, _first_line(error), "a folder or hub id that transformers opens")) from error


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(Problem(f"trainer.model.config: {path}", _first_line(error), "a JSON file")) from error
    if not isinstance(values, dict):
        raise ConfigError(Problem(f"trainer.model.config: {path}", type(values).__name__, "a JSON object"))
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


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
