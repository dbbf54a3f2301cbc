"""Options that change the numbers of a step, each shown to be on in the run.

A step is computed once more without the option. What the run computed is then compared with both:
its share of the option's effect, <run - without, with - without> / |with - without|^2 over all
gradients, or all changes of weights, is 1 if the option is on, and 0 if it is not. A share of a
whole step's numbers shows effects far smaller than the rounding of one number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from trainer.certify.one_process.expected import Expected
from trainer.certify.recording import Recording, State
from trainer.certify.reference import Reference
from trainer.certify.tiny_run import CLIPPED_STEPS, Tiny
from trainer.state import MASTER, WEIGHT

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Amend = Callable[[object], None]
"""Changes a model's config, in place."""
LEAST_EFFECT = 1e-6
"""The largest relative effect that arithmetic in another order may have."""
LARGE = 5e-3
"""The share of a tensor's norm above which an effect on the tensor is examined by itself."""
LACKING = 1e-2
LACKING_OF_ONE = 2e-2
"""The share of an effect that a run may lack: over all tensors, and in one."""
LACKING_OF_ROUTERS = 0.6
LACKING_OF_ROUNDING = 0.7
"""The same share for routers' biases, whose changes follow the rounding of low precision; and for
the effect of low precision itself."""
NOISE = 5.0
"""The factor by which a run's rounding may exceed what repetitions of one process have."""
MOST_NOISE = 0.5
"""The largest share of an effect that may be rounding, if a run is to show the effect."""
ROUTED = "router_bias_update_rate"


@dataclass(frozen=True)
class Option:
    """An option that is on, and the run without it."""

    name: str
    without: Tiny
    amend: Amend | None = None
    """The change of the model's config that turns it off."""
    of_changes: bool = False
    """True if it shows in the change of weights, not in gradients."""
    each: bool = False
    """True if it must show in each tensor on which its effect is large."""


@dataclass(frozen=True)
class ShownEffect:
    """The share of an option's effect that a run has, and how far from 1 it may be."""

    share: float
    allowed: float
    tensor: str = ""


def options_of(small: Tiny, architecture: PreTrainedConfig = None) -> list[Option]:
    """List the options that are on, in the config and in the model's own config."""
    section = small.config.trainer
    settings = small.config.settings
    layout = small.layout
    options: list[Option] = []

    def add(name: str, off: Mapping[str, object], **more: Any) -> None:
        changed = section.model_copy(update=off)
        options.append(
            Option(name, replace(small, config=replace(small.config, trainer=changed)), **more)
        )

    if layout.float8 != "none":
        plain = replace(layout, float8="none", float8_head=False)
        options.append(Option("float8", replace(small, layout=plain), each=True))
    if layout.float8_head:
        in_blocks = replace(layout, float8_head=False)
        options.append(Option("float8_head", replace(small, layout=in_blocks), each=True))
    if section.label_smoothing:
        add("label_smoothing", {"label_smoothing": 0.0})
    if section.neftune_alpha:
        add("neftune_alpha", {"neftune_alpha": 0.0})
    if section.freeze:
        add("freeze", {"freeze": []})
    if section.parameter_groups:
        add("parameter_groups", {"parameter_groups": []}, of_changes=True)
    if section.weight_decay_excludes != "nothing" and _decays(small):
        add("weight_decay_excludes", {"weight_decay_excludes": "nothing"}, of_changes=True)
    if (adapter := section.adapter) is not None:
        add("adapter", {"adapter": None})
        for key, off in (("dropout", 0.0), ("rslora", False), ("dora", False)):
            if getattr(adapter, key) and not adapter.path:
                add(f"adapter.{key}", {"adapter": adapter.model_copy(update={key: off})})
    if layout.sync_batch_norm:
        apart = replace(layout, sync_batch_norm=False)
        options.append(Option("sync_batch_norm", replace(small, layout=apart)))
    if layout.router_bias_rate:
        still = replace(layout, router_bias_rate=0.0)
        options.append(Option(ROUTED, replace(small, layout=still), of_changes=True))
    if float(settings.get("gradient_clipping") or 0):
        without = replace(small.config, settings={**settings, "gradient_clipping": 0.0})
        name = "gradient_clipping"
        options.append(Option(name, replace(small, config=without), of_changes=True))
    if _decays(small):
        params = {**small.config.optimizer.params, "weight_decay": 0.0}
        optimizer = {**settings["optimizer"], "params": params}
        without = replace(small.config, settings={**settings, "optimizer": optimizer})
        options.append(Option("weight_decay", replace(small, config=without), of_changes=True))
    return [*options, *_of_model(small, architecture)]


def _decays(small: Tiny) -> bool:
    return bool(small.config.optimizer.params.get("weight_decay"))


def _of_model(small: Tiny, architecture: PreTrainedConfig) -> Iterator[Option]:
    """Yield the options of a model's own config that are on: dropout, and losses of routers."""
    if architecture is None:
        return
    if rates_of(architecture):
        yield Option("dropout", small, without_rates)
    parts = [architecture, *_parts(architecture)]
    if any(getattr(part, "output_router_logits", False) for part in parts):
        yield Option("output_router_logits", small, _without_router_loss)


def _parts(config: PreTrainedConfig) -> list[object]:
    return [value for value in vars(config).values() if hasattr(value, "to_dict")]


def rates_of(config: PreTrainedConfig) -> list[tuple[Any, str]]:
    """List the dropout rates above 0 of a model's config, each as a part of it and a key."""
    rates = [one for part in _parts(config) for one in rates_of(part)]
    keys = [key for key, value in vars(config).items() if isinstance(value, float) and value]
    return rates + [(config, key) for key in keys if "drop" in key]


def without_rates(config: PreTrainedConfig) -> None:
    """Set every dropout rate of a model's config to 0, in place."""
    for part, key in rates_of(config):
        part.update({key: 0.0})


def _without_router_loss(config: PreTrainedConfig) -> None:
    for part in (config, *_parts(config)):
        if getattr(part, "output_router_logits", False):
            part.update({"output_router_logits": False})


def amended(architecture: PreTrainedConfig, amend: Amend | None) -> Any:
    """Return a changed copy of a model's config."""
    changed = deepcopy(architecture)
    if amend is not None:
        amend(changed)
    return changed


def share_of(
    option: Option, run: Recording, expected: Sequence[Expected], without: Reference
) -> ShownEffect | None:
    """Return the share of the option's effect on the first steps that the run has.

    If the option must show in each tensor, it is the share of all tensors together or of one,
    whichever is furthest from 1 relative to what is allowed. None if the effect is not larger than
    rounding. `without` is one process without the option.
    """
    effects = defaultdict[str, Effect](Effect)
    for step, one in enumerate(expected[:CLIPPED_STEPS]):
        off = without.step(step, run.states[step], run.gradients[step], run.norms[step], False)
        for name, ours, on, other, again in _compared(option, run, step, one, off):
            effects[name].add(ours, on, other, again)
    whole = Effect()
    for one_of in effects.values():
        whole.include(one_of)
    if whole.square <= LEAST_EFFECT**2 * whole.of_all or whole.noise > MOST_NOISE:
        return None
    routed = without.small.low_precision and option.name == ROUTED
    shares = [
        ShownEffect(1 + whole.off, max(LACKING_OF_ROUTERS if routed else LACKING, whole.noise))
    ]
    for name, effect in effects.items() if option.each else ():
        if effect.square > LARGE**2 * effect.of_all and effect.noise <= MOST_NOISE:
            shares.append(ShownEffect(1 + effect.off, max(LACKING_OF_ONE, effect.noise), name))
    return max(shares, key=lambda shown: abs(shown.share - 1) / shown.allowed)


def share_of_precision(run: Recording, expected: Sequence[Expected]) -> ShownEffect:
    """Return the share of the rounding of one process in low precision that the run has.

    Its weights are rounded as those of one process, but its sums only in part.
    """
    rounded = Effect()
    for step, one in enumerate(expected[:CLIPPED_STEPS]):
        low = one.rounding.runs[0]
        for name, exact in one.gradients.items():
            ours, on = (_like(of.get(name), exact) for of in (run.gradients[step], low))
            rounded.add(ours, on, exact.double(), [on])
    return ShownEffect(1 + rounded.off, LACKING_OF_ROUNDING)


class Effect:
    """An option's effect on a tensor over some steps: sums of products with it."""

    def __init__(self) -> None:
        self.square = self.of_all = self.product = 0.0
        self.repeated = dict[int, float]()
        """For each repetition of one process, the product of its rounding and the effect."""

    def add(self, ours: object, on: Any, without: object, again: Sequence[Any]) -> None:
        """Add a step: the run's tensor, and one process's with the option and without it.

        `again` has the tensor of one process with the run's rounding, several times.
        """
        effect = on - without
        first = again[0]
        self.square += float(effect.square().sum())
        self.of_all += float(on.square().sum())
        self.product += float((effect * (ours - first)).sum())
        for index, other in enumerate(again[1:]):
            apart = float((effect * (other - first)).sum())
            self.repeated[index] = self.repeated.get(index, 0.0) + apart

    def include(self, other: Effect) -> None:
        self.square = self.square + other.square
        self.of_all = self.of_all + other.of_all
        self.product += other.product
        for index, apart in other.repeated.items():
            self.repeated[index] = self.repeated.get(index, 0.0) + apart

    @property
    def off(self) -> float:
        """The share of the effect that the run has in excess; if it is below 0, that it lacks."""
        return self.product / self.square

    @property
    def noise(self) -> float:
        """The share of the effect that may be rounding: NOISE times that of one process."""
        squares = [(apart / self.square) ** 2 for apart in self.repeated.values()]
        return NOISE * (sum(squares) / max(1, len(squares))) ** 0.5


def _compared(
    option: Option, run: Recording, step: int, one: Expected, off: Expected
) -> Iterator[tuple[str, Any, Any, Any, list[Any]]]:
    """Yield each tensor's name and values: of the run, of one process with the option and without
    it, and of repetitions of one process with the run's rounding."""
    if not option.of_changes:
        again = one.rounding.runs
        if not one.rounding.is_low:
            again = one.gradients, *again
        every = run.gradients[step], one.gradients, off.gradients, *again
        shapes = {name: value for of in every for name, value in of.items()}
        for name, like in shapes.items():
            each = [_like(of.get(name), like) for of in every]
            yield name, each[0], each[1], each[2], each[3:]
        return
    before = run.states[step]
    after = run.states[step + 1]
    for name, value in (one.weights | one.biases).items():
        start, end = (_exact(state, name, value) for state in (before, after))
        on = value.double() - start
        other = torch.zeros_like(start)
        if (moved := (off.weights | off.biases).get(name)) is not None:
            other = moved.double() - start
        yield name, end - start, on, other, [on]


def _like(value: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Return the value in float64 and in the shape of `like`; zeros if there is none."""
    if value is None:
        return torch.zeros_like(like, dtype=torch.float64)
    return value.reshape(like.shape).double()


def _exact(state: State, name: str, like: torch.Tensor) -> torch.Tensor:
    return _like(state.get((name, MASTER), state.get((name, WEIGHT))), like)
