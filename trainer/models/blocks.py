"""The blocks of a model, found by running it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainer.models.materialise import materialise
from trainer.models.spec import ModelSpec

LARGEST = 50_000_000
"""The most parameters of a model that is run to find its blocks."""


def blocks_by_run(spec: ModelSpec) -> tuple[str, ...]:
    """Find the blocks of a tiny model by running it; empty if it is too large or can't be run."""
    if spec.parameters > LARGEST:
        return ()
    try:
        model = spec.build()
        materialise(model, spec, seed=0, device=torch.device("cpu"), dtype=torch.float32)
        return blocks_of(model.eval(), torch.arange(1, 17)[None] % spec.language.vocabulary)
    except Exception:  # whatever a model's own code raises
        return ()


def blocks_of(model: nn.Module, ids: torch.Tensor) -> tuple[str, ...]:
    """Return the names of the blocks: the members of the module list whose modules run once each,
    in order.

    Each must give a tensor of the shape it is given. Of several such lists, the outermost counts;
    of several outermost ones, that with the most parameters. Empty if there is none. `ids`: [batch,
    sequence].
    """
    modules = dict(model.named_modules())
    lists = {
        name: list(module)
        for name, module in modules.items()
        if isinstance(module, nn.ModuleList) and module
    }
    calls: dict[str, list[int]] = {name: [] for name in lists}
    hooks = []

    def watch(name: str, index: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given = args[0] if args else next(iter(kwargs.values()), None)
            result = output[0] if isinstance(output, tuple) else output
            alike = (
                torch.is_tensor(given) and torch.is_tensor(result) and given.shape == result.shape
            )
            calls[name].append(index if alike and result.shape[:2] == ids.shape else -1)

        return hook

    for name, members in lists.items():
        for index, member in enumerate(members):
            hooks.append(member.register_forward_hook(watch(name, index), with_kwargs=True))
    try:
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    found = [name for name, members in lists.items() if calls[name] == list(range(len(members)))]
    outermost = [name for name in found if not any(name.startswith(f"{other}.") for other in found)]
    if not outermost:
        return ()
    best = max(outermost, key=lambda name: sum(p.numel() for p in modules[name].parameters()))
    return tuple(f"{best}.{index}" for index in range(len(lists[best])))
