"""Trials of what splits rely on, with a tiny copy of the model on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from trainer.errors import named_line
from trainer.models.names import pattern_of
from trainer.models.spec import ModelSpec
from trainer.parallel.patches import replace_forward
from trainer.trial.draws import DrawWatch
from trainer.trial.setup import row_of, tiny

TOLERANCE = 1e-4
Entries = Callable[[ModelSpec], Sequence[str]]
"""Lists the modules that hidden states enter whole."""


def bypassed(spec: ModelSpec, entries: Entries) -> Iterator[str]:
    """Yield the modules, by pattern, whose input counts in other ways than by their split layers.

    Their gradient is a sum over the ranks, and what comes another way would count on each.
    """
    small, model = tiny(spec)
    leaves: dict[str, torch.Tensor] = {}
    found: dict[str, None] = {}

    def start(name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            given = leaves[name] = _first(args, kwargs).detach().requires_grad_()
            return _with_first(args, kwargs, given)

        return hook

    def end(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            total, leaf = _first(output, {}).sum(), leaves[name]
            if (
                torch.autograd.grad(total, leaf, retain_graph=True, allow_unused=True)[0]
                is not None
            ):
                found[pattern_of(name)] = None

        return hook

    modules = dict(model.named_modules())
    for name in entries(small):
        modules[name].register_forward_pre_hook(start(name), with_kwargs=True)
        modules[name].register_forward_hook(end(name))
    for name in small.language.tensor_plan:
        if name in modules:
            modules[name].register_forward_pre_hook(lambda _, args: (args[0].detach(), *args[1:]))
    model.eval()(input_ids=row_of(small)[None], use_cache=False)
    yield from found


def undivided(spec: ModelSpec, entries: Entries) -> Iterator[str]:
    """Yield in words what in the blocks, outside the modules that hidden states enter whole, can't
    run on a part of a row's tokens.
    """
    small, model = tiny(spec)
    modules, inner, ids = dict(model.named_modules()), entries(small), row_of(small)[None]
    recorded: dict[str, tuple[torch.Tensor, Any]] = {}
    found: dict[str, None] = {}

    def note(_: nn.Module, args: Any, kwargs: Any, output: Any, *, name: str) -> None:
        recorded[name] = _first(args, kwargs), output

    def compare(name: str, ours: torch.Tensor, whole: torch.Tensor) -> None:
        if not torch.allclose(ours, _half(whole), rtol=TOLERANCE, atol=TOLERANCE):
            found[f"{pattern_of(name)} mixes tokens outside its split matrices"] = None

    def repeat(*args: Any, name: str, **kwargs: Any) -> Any:
        given, output = recorded[name]
        compare(name, _first(args, kwargs), given)
        return (_half(output[0]), *output[1:]) if isinstance(output, tuple) else _half(output)

    def halve(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return _with_first(args, kwargs, _half(_first(args, kwargs)))

    def end(_: nn.Module, inputs: Any, output: Any, *, name: str) -> Any:
        compare(name, _first(output, {}), _first(recorded[name][1], {}))
        return recorded[name][1]

    with torch.no_grad(), ExitStack() as hooks:
        for name in (*inner, *small.blocks):
            hook = partial(note, name=name)
            hooks.enter_context(modules[name].register_forward_hook(hook, with_kwargs=True))
        model.eval()(input_ids=ids, use_cache=False)
    for name in inner:
        replace_forward(modules[name], partial(repeat, name=name))
    for name in small.blocks:
        modules[name].register_forward_pre_hook(halve, with_kwargs=True)
        modules[name].register_forward_hook(partial(end, name=name))
    try:
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
    except Exception as error:  # whatever a model's own code raises
        found[f"a block fails on a part of a row: {named_line(error)}"] = None
    yield from found
    yield from _draws(spec)


def _draws(spec: ModelSpec) -> Iterator[str]:
    """Yield blocks that draw random numbers in other ways than by `nn.Dropout`."""
    small, model = tiny(spec)
    places = [""]
    for name, module in model.named_modules():
        if name in small.blocks or isinstance(module, nn.Dropout):
            at = "" if isinstance(module, nn.Dropout) else pattern_of(name)
            module.register_forward_pre_hook(lambda *_, at=at: places.append(at))
            module.register_forward_hook(lambda *_: places.__delitem__(-1))
    with torch.random.fork_rng(devices=[]), torch.no_grad(), DrawWatch(lambda: places[-1]) as watch:
        model.train()(input_ids=row_of(small)[None], use_cache=False)
    for place in sorted(watch.places - {""}):
        yield f"{place} draws random numbers (dropout) by a function, not by a module nn.Dropout"


def _first(args: Any, kwargs: Any) -> torch.Tensor:
    """Return the hidden state: the first argument, or of what a module gives the first tensor."""
    if torch.is_tensor(args):
        return args
    return args[0] if args else next(iter(kwargs.values()))  # type: ignore[no-any-return]


def _half(hidden: torch.Tensor) -> torch.Tensor:
    return hidden[:, : hidden.shape[1] // 2]


def _with_first(args: Any, kwargs: Any, hidden: torch.Tensor) -> Any:
    """Return the arguments with another hidden state."""
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, next(iter(kwargs)): hidden})
