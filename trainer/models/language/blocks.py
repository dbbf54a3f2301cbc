"""The blocks of a language model: those that its config counts, or that run in order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from torch import nn

from trainer.errors import Raised, attempt
from trainer.models.language.forward import without_cache
from trainer.models.language_model import text_config
from trainer.models.materialise import on_host
from trainer.models.names import outermost
from trainer.models.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LARGEST = 50_000_000
"""The most parameters of a model that is run to find its blocks."""


def stated_blocks(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the members of the one module list, below the head, with `num_hidden_layers` members.

    Empty if there is no such list, or more than one that is inside no other.
    """
    layers = getattr(text_config(model), "num_hidden_layers", 0)
    long = [name for name, module in _lists(model).items() if len(module) == layers]
    below = "" if model.base_model is model else model.base_model_prefix  # a body has no head
    result = outermost([name for name in long if name.startswith(below)])
    return tuple(f"{result[0]}.{i}" for i in range(layers)) if len(result) == 1 else ()


def blocks_like(model: nn.Module, blocks: tuple[str, ...]) -> tuple[str, ...]:
    """Return the model's blocks: the members of the lists that have the tiny copy's `blocks`."""
    lists = dict.fromkeys(block.rpartition(".")[0] for block in blocks)
    sizes = {name: len(list(model.get_submodule(name).children())) for name in lists}
    return tuple(f"{name}.{index}" for name, size in sizes.items() for index in range(size))


def blocks_by_run(spec: ModelSpec) -> tuple[str, ...]:
    """Find the blocks of a tiny model by running it; empty if it is too large or can't be run."""
    if spec.parameters > LARGEST:
        return ()
    ids = torch.arange(1, 17)[None] % spec.language.vocabulary
    result = attempt(lambda: blocks_of(on_host(spec).eval(), ids))
    return () if isinstance(result, Raised) else result


def blocks_of(model: nn.Module, ids: torch.Tensor) -> tuple[str, ...]:
    """Return the members of the module list whose modules run once each, in order; empty if none.

    Each must return a tensor of the shape of its input. Of several such lists, the outermost
    counts; of several outermost ones, that with the most parameters. `ids`: [batch, sequence].
    """
    lists = {name: module for name, module in _lists(model).items() if len(module)}
    calls: dict[str, list[int]] = {name: [] for name in lists}

    def observe(name: str, index: int) -> Callable[..., None]:
        def hook(
            module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object
        ) -> None:
            given = args[0] if args else next(iter(kwargs.values()), None)
            result = output[0] if isinstance(output, tuple) else output
            before = getattr(given, "shape", ())
            after = getattr(result, "shape", ())
            alike = before == after and after[:2] == ids.shape
            calls[name].append(index if alike else -1)

        return hook

    with ExitStack() as hooks:
        for name, members in lists.items():
            for index, member in enumerate(members):
                hook = member.register_forward_hook(observe(name, index), with_kwargs=True)
                hooks.enter_context(hook)
        with torch.no_grad():
            model(input_ids=ids, **without_cache(model))
    result = outermost([name for name in lists if calls[name] == list(range(len(lists[name])))])
    sizes = {name: sum(p.numel() for p in lists[name].parameters()) for name in result}
    best = max(sizes, key=lambda name: sizes[name], default="")
    return tuple(f"{best}.{index}" for index in range(len(lists[best]))) if best else ()


def _lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
