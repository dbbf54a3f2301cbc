"""Meshloom: trains transformer models too large for one device, and your own modules, from a
DeepSpeed JSON.

`train` and `verify` are for scripts; the commands are in `trainer/command/`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.state import VERSION as __version__

if TYPE_CHECKING:
    from torch import Tensor, nn

    from trainer.certify.certificate import Certificate
    from trainer.data.images.transforms import OpenedClassifier
    from trainer.run.run import Result

__all__ = ["__version__", "open_classifier", "train", "verify"]


def train(
    config: str | Path | dict[str, Any],
    *,
    model: Callable[[], nn.Module] | None = None,
    data: Any = None,
    loss: Callable[[Any, Any], tuple[Tensor, int | Tensor]] | None = None,
    evaluation_data: Any = None,
    blocks: str | None = None,
    overrides: Sequence[str] = (),
    processes: int | None = None,
    quiet: bool = False,
    fresh: bool = False,
    resume: str | Path | None = None,
    resume_anyway: bool = False,
    resume_weights_only: bool = False,
) -> Result:
    """Train your own module under any layout, in the same way as `launch/train.py` trains a
    language model.

    `config`: a DeepSpeed JSON, as a path, the name of one that ships ("zero3"), or a dictionary;
    `overrides` as on the command line. `model` builds the module, and is called on the meta device,
    too. `data`: anything with `__len__` and `__getitem__`, whose samples are pairs (input, target)
    that `torch.utils.data.default_collate` stacks; without `evaluation_data`,
    `trainer.data.evaluation_fraction` of it is held out. `loss(output, target)` of a micro-batch
    returns the sum over its targets and their number; the loss of a step is the sum over the global
    batch / the number. `blocks`: a pattern such as "layers.*" of the modules that run once each, in
    order; those of an `nn.Sequential`, and of lists of one class, are found. With `"task":
    "image_classification"` in the config, samples are pairs (image, label), images of Pillow or
    tensors [channels, height, width]; leave out `loss`, and `model` and `data` where the config
    names them.

    The same call again resumes a run that was not finished, and begins a new one if it was: `fresh`
    always begins a new one, `resume="auto"` resumes the newest run of that name, `resume=path`
    resumes from a checkpoint, with a new optimizer if `resume_weights_only`, and `resume_anyway`
    also resumes if the data, the model or its code changed. SIGTERM, SIGINT (a notebook's
    interrupt), SIGUSR1 and SIGHUP save and raise `trainer.errors.Preempted`.

    Call it in a script under any launcher, or with `processes=N` from plain Python or a notebook.
    Returns the losses and the run's folder, on every rank. Raises the errors that the command
    prints (`trainer.errors`).
    """
    from trainer.config import load
    from trainer.supervise.forked import in_processes

    compiled = load(config, overrides)
    going_on = (None if resume is None else str(resume), fresh, resume_anyway, resume_weights_only)

    def trained() -> Result:
        from trainer.run.resume import Request
        from trainer.run.run import train_given
        from trainer.run.subject import Given
        from trainer.tools.planner.memory_check import check_memory

        given = Given(model, data, loss, evaluation_data, blocks)
        request = Request(*going_on, script=True, memory_check=check_memory)
        return train_given(compiled, given, request, quiet)  # type: ignore[no-any-return]

    return in_processes(trained, processes)


def verify(
    config: str | Path | dict[str, Any],
    *,
    model: Callable[[], nn.Module] | None = None,
    data: Any = None,
    loss: Callable[[Any, Any], tuple[Tensor, int | Tensor]] | None = None,
    blocks: str | None = None,
    overrides: Sequence[str] = (),
    processes: int | None = None,
) -> Certificate:
    """Certify that a layout trains your own module as one process does: losses, gradients, updates,
    save and load.

    The arguments are those of `train`; a few steps are made on the first samples, on the CPU, in
    float32. Returns the certificate, with `passed` and a finding for each check. Raises ConfigError
    for a layout that can't run the module.
    """
    from trainer.certify.image_certificate import certify_images
    from trainer.certify.module_certificate import certify_given, met, tiny_run_of
    from trainer.run.subject import Given
    from trainer.supervise.ending import watched_in_script
    from trainer.supervise.forked import in_processes

    small = tiny_run_of(config, overrides, processes)
    certify = (
        certify_images if small.config.trainer.task == "image_classification" else certify_given
    )
    given = Given(model, data, loss, blocks=blocks)

    def certified() -> Certificate:
        with watched_in_script(small.config, met(small)) as machine:
            return certify(small, given, machine)

    return in_processes(certified, small.layout.world_size)


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
