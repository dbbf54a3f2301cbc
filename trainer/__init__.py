"""Meshloom: trains transformer models too large for one device, and your own modules, from a
DeepSpeed JSON.

`train` and `verify` are for scripts, which import them from `meshloom`; the commands are in
`trainer/command/`.
"""

from __future__ import annotations

import sys

if sys.platform == "win32":
    raise ImportError("Meshloom runs on Linux and macOS, not on Windows: install it in WSL2")

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from trainer.state import VERSION as __version__
from trainer.supervise.world import NO_GPUS

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from trainer.certify.certificate import Certificate
    from trainer.config import Config
    from trainer.data.images.transforms import OpenedClassifier
    from trainer.run.result import Result
    from trainer.tasks.supervised import Loss
    from trainer.trackers.callbacks import Callback

__all__ = ["__version__", "Callback", "open_classifier", "train", "verify"]


def __getattr__(name: str) -> Any:  # so that a command's help does not wait for libraries
    if name == "Callback":
        from trainer.trackers.callbacks import Callback

        return Callback
    raise AttributeError(f"module 'trainer' has no attribute {name!r}")


Parameters = ParamSpec("Parameters")
Options = TypeVar("Options")
T = TypeVar("T")


def _with_keywords_of(
    kind: Callable[Parameters, Options],
) -> Callable[[Callable[[Options], T]], Callable[Parameters, T]]:
    """Make a function of a `kind` of options one of their fields, which are then its signature."""

    def decorated(function: Callable[[Options], T]) -> Callable[Parameters, T]:
        @wraps(kind, assigned=(), updated=())
        @wraps(function)
        def with_keywords(*args: Parameters.args, **kwargs: Parameters.kwargs) -> T:
            return function(kind(*args, **kwargs))

        return with_keywords

    return decorated


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """The arguments of `verify`, which `train` has, too."""

    config: str | Path | dict[str, Any] = field(kw_only=False)
    model: Callable[[], nn.Module] | None = None
    data: object = None
    loss: Loss | None = None
    blocks: str | None = None
    overrides: Sequence[str] = ()
    processes: int | None = None
    optimizer: Callable[[list[dict[str, Any]]], Optimizer] | None = None


@dataclass(frozen=True, kw_only=True)
class TrainOptions(VerifyOptions):
    """The arguments of `train`, where they are described."""

    evaluation_data: object = None
    callbacks: Sequence[Callback] = ()
    metrics: Mapping[str, Loss] | None = None
    quiet: bool = False
    fresh: bool = False
    resume: str | Path | None = None
    resume_anyway: bool = False
    resume_weights_only: bool = False


@_with_keywords_of(TrainOptions)
def train(options: TrainOptions) -> Result:
    """Train your own module under any layout, as `launch/train.py` trains a language model.

    `config`: a DeepSpeed JSON: a path, the name of one that ships ("zero3"), or a dictionary.
    `overrides`: changes to it, `key.path=value`, as on the command line.
    `model`: builds the module; it is called on the meta device, too.
    `data`: anything with `__len__` and `__getitem__`, whose samples are pairs (input, target) that
    `torch.utils.data.default_collate` stacks.
    `evaluation_data`: the same, held out; without it, `trainer.data.evaluation_fraction` of `data`.
    `loss(output, target)`: returns the sum over the targets of a micro-batch, and their number; the
    loss of a step is the sum over the global batch / the number.
    `blocks`: a pattern such as "layers.*" of the modules that run once each, in order; those of an
    `nn.Sequential`, and of lists of one class, are found.
    `processes`: how many to start, from plain Python or a notebook; leave it out under a launcher.
    `callbacks`: objects of subclasses of `meshloom.Callback`, called on every rank.
    `metrics`: functions like `loss`, by name; an evaluation logs the total sum / the total number.
    `optimizer(groups)`: a `torch.optim.Optimizer` in place of the config's, which sets its rate.
    `quiet`: print nothing.
    `fresh`: begin a new run. Without it, the same call again resumes one that was not finished.
    `resume`: "auto" resumes the newest run of that name, a path resumes from that checkpoint.
    `resume_anyway`: resume also if the data, the model or its code changed.
    `resume_weights_only`: resume with a new optimizer.

    With `"task": "image_classification"` in the config, samples are pairs (image, label), images of
    Pillow or tensors [channels, height, width]; leave out `loss`, and `model` and `data` where the
    config names them. SIGTERM, SIGINT (a notebook's), SIGUSR1, SIGHUP save and raise `Stopped`.

    Returns the losses and the run's folder, on every rank. Raises the errors of `meshloom.errors`.
    """
    from trainer.config import load
    from trainer.plugins import as_override
    from trainer.supervise.forked import in_processes
    from trainer.trackers.callbacks import Callbacks

    Callbacks.check(options.callbacks)
    compiled = load(options.config, [*options.overrides, *as_override(options.optimizer)])
    hidden = NO_GPUS if compiled.trainer.device == "cpu" else {}

    def trained() -> Result:
        return _trained(options, compiled)

    return in_processes(trained, options.processes, **hidden)


def _trained(options: TrainOptions, config: Config) -> Result:
    """Run this rank's share of a script's run."""
    from trainer.recipe import HandedIn
    from trainer.run.run import train_given
    from trainer.run.start.request import Request
    from trainer.tools.hub.repository import open_hub
    from trainer.tools.planner.recompute_choice import PLANNER

    fields = ("model", "data", "loss", "evaluation_data", "blocks", "metrics")
    own = {key: it for key in fields if (it := getattr(options, key)) is not None}
    request = Request(
        resume=None if options.resume is None else str(options.resume),
        fresh=options.fresh,
        resume_anyway=options.resume_anyway,
        weights_only=options.resume_weights_only,
        script=True,
        planner=PLANNER,
        open_hub=open_hub,
        callbacks=options.callbacks,
    )
    return train_given(config, HandedIn(**own) if own else None, request, options.quiet)


@_with_keywords_of(VerifyOptions)
def verify(options: VerifyOptions) -> Certificate:
    """Certify that a layout trains your own module as one process does: losses, gradients, updates,
    save and load.

    The arguments are those of `train`; a few steps are made on the first samples, on the CPU, in
    float32. Returns the certificate, with `passed` and a finding for each check. Raises ConfigError
    for a layout that can't run the module.
    """
    from trainer.certify.certificate import certify
    from trainer.certify.worker import met, tiny_run_of
    from trainer.plugins import as_override
    from trainer.recipe import HandedIn
    from trainer.supervise.ending import watched_in_script
    from trainer.supervise.forked import in_processes

    overrides = [*options.overrides, *as_override(options.optimizer)]
    small = tiny_run_of(options.config, overrides, options.processes)
    given = HandedIn(options.model, options.data, options.loss, blocks=options.blocks)

    def certified() -> Certificate:
        with watched_in_script(small.config, met(small)) as machine:
            return certify(small, machine, given)

    return in_processes(certified, small.layout.world_size, **NO_GPUS)


def open(folder: str | Path, model: Callable[[], nn.Module] | None = None) -> nn.Module:
    """Load the model of `runs/NAME/final` or of a checkpoint as a module in evaluation mode, on the
    CPU.

    `model` builds your own module, as for `train`; a Hugging Face model, an adapter on its base and
    a classifier that torchvision or the config names do not need it. Raises ConfigError if the
    folder holds no model, or another one.
    """
    from trainer.models.opened import opened

    return opened(Path(folder), model)


def open_classifier(folder: str | Path) -> OpenedClassifier:
    """Load a trained image classifier from `runs/NAME/final` or the `model/` of a checkpoint, ready
    to use.

    Its `model` is the plain module (torchvision's own, where it is one), in evaluation mode;
    `transform` turns Pillow's image into its input; `classes` are the names of its scores. Raises
    ConfigError for any other folder.
    """
    from trainer.data.images.transforms import opened

    return opened(Path(folder))
