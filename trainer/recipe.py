"""The protocol of a recipe: all that is particular to one thing that is trained.

Recipes are in `trainer/recipes/`, or come with a plug-in. A run, the planner and the report take
what the protocol says, and nobody else asks which recipe it is. The certificate's part of it is
`meshloom.certify.case.Certified`, as its types are those of a tiny run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import nn

from trainer.config import Config
from trainer.config.sections.trainer import TrainerSection
from trainer.data.cache import NOTHING, Check
from trainer.data.mixture import Source
from trainer.data.order import KEYED, SampleOrder
from trainer.data.progress import QUIET, Progress
from trainer.data.sources.remote import fetched
from trainer.distributed.ranks import ALONE, Ranks
from trainer.engines import Engine, Machine, Metrics
from trainer.errors import ConfigError, MeshloomError, Problem, named_line, raised_at, refused
from trainer.layout import Layout
from trainer.models.finetuning.changed import changed_spec
from trainer.models.spec import ModelSpec
from trainer.plugins import DEFAULT, HANDED_IN, NAMED, RECIPES
from trainer.probes.inputs import ProbeTask
from trainer.storage import Json
from trainer.supervise.process import cache_folder
from trainer.tasks.sample_cost import SampleCost as SampleCost
from trainer.tasks.supervised import Loss
from trainer.tasks.task import Batch, Sample, Task

METHODS = ("subject", "planned")
"""The methods that every recipe has."""


@dataclass(frozen=True)
class HandedIn:
    """Objects of a script, in place of those that the config names."""

    model: Callable[[], nn.Module] | None = None
    data: object = None
    """Anything with `__len__` and `__getitem__`."""
    loss: Loss | None = None
    evaluation_data: object = None
    blocks: str | None = None
    metrics: Mapping[str, Loss] = field(default_factory=dict)

    @staticmethod
    def by_task(section: TrainerSection, handed_in: HandedIn | None) -> HandedIn | None:
        """Return what a plug-in's task names, or else `handed_in`. Raises ConfigError."""
        if (task := NAMED["task"].get(section.task)) is None:
            return handed_in
        expected = "the arguments of meshloom.train for what is trained"
        # whatever the plug-in's own code raises
        with refused("trainer.task", expected, named=True, start=f"{section.task}: "):
            return replace(handed_in or HandedIn(), **task(section))


@dataclass(frozen=True)
class RunContext:
    """The run for which a recipe opens its subject."""

    config: Config
    """The resolved config, whose data is on this machine."""
    handed_in: HandedIn
    layout: Layout
    ranks: Ranks
    progress: Progress = QUIET
    order: int = KEYED
    """The version of the samples' order."""

    @property
    def section(self) -> TrainerSection:
        return self.config.trainer

    @property
    def sample_order(self) -> SampleOrder:
        return SampleOrder(self.section.seed, self.order)

    def first_samples(self, source: Source) -> list[Sample]:
        """Return up to four samples, on which a model is tried."""
        return [source[number] for number in range(min(4, len(source)))]

    def changed(self, spec: ModelSpec) -> ModelSpec:
        """Apply the config's adapter, frozen parameters and groups to a spec. Collective.

        They are applied to the spec of every subject that is opened; a recipe calls this only if it
        needs the changed spec before. Raises ConfigError for changes that do not fit the model.
        """
        return changed_spec(spec, self.section, self.ranks)


class SubjectData(Protocol):
    """The samples of a subject."""

    @property
    def train(self) -> Source: ...

    @property
    def evaluations(self) -> Mapping[str, Source]:
        """Held-out samples by name, the only ones by "", which share none with `train`."""

    @property
    def fingerprint(self) -> str:
        """A digest of the training samples, which a resumed run compares."""

    def describe(self) -> str:
        """Describe the data for the user, on one line."""

    def description(self) -> Json:
        """Return the data's numbers, which a checkpoint keeps beside the fingerprint."""


@dataclass(frozen=True)
class Subject:
    """A model, its task and its data, as a recipe opens them."""

    spec: ModelSpec
    task: Task
    data: SubjectData
    packed: bool = False
    """True if a sample may have several documents that are not to attend to one another."""
    check: Check = NOTHING
    """The comparison of prepared data with what was written."""
    notes: tuple[str, ...] = field(default=(), kw_only=True)
    """Lines for the user on what was computed before the first step."""
    unit: ClassVar[str] = "sample"
    """The short name of what rates count."""
    units: ClassVar[str] = "targets"
    """The plural of what rates count, in a report."""
    counts_tokens: ClassVar[bool] = True
    """True if each target is a token, of a language model."""

    @property
    def probed(self) -> ProbeTask:
        """The task by which a tiny copy is asked what the model and its layouts are."""
        return self.task

    def settled(self, config: Config) -> Config:
        """Return the config with what the data has decided, and with its origin."""
        return config

    def trained(self, spec: ModelSpec, section: TrainerSection) -> Subject:
        """Return the subject with the checked `spec` and the task as it is trained.

        Raises ConfigError for an option that the task does not have.
        """
        task = self.task.regularised(spec, section.label_smoothing, section.neftune_alpha)
        return replace(self, spec=spec, task=task)

    def reading(self, place: Sequence[object]) -> AbstractContextManager[object]:
        """Have a stream of data read from a place (`data.stream.Place`) within the context."""
        return nullcontext()

    def before_training(self, engine: Engine, folder: Path, step: int) -> Subject:
        """Return the subject with what the built engine computes of its samples before the first
        step, such as a frozen reference's scores. Collective.

        It is called at each start, also of a resumed run, whose weights have been trained for
        `step` steps: what is computed once belongs into the run's `folder`.
        """
        return self

    def workers(self, section: TrainerSection, machine: Machine) -> int:
        """Return the processes of each rank that load samples; 0: a thread."""
        return 0

    def lines(self, workers: int) -> Iterator[str]:
        """Yield lines of the plan about the data."""
        yield from ()

    def kernels(self, layout: Layout, device: torch.device) -> Iterator[str]:
        """Set the order of a GPU's attention kernels, and say in lines which ones run."""
        yield from ()

    def amount(self, samples: int, section: TrainerSection) -> str:
        """Return the end of the plan's line about so many samples."""
        return ""

    def flops(self, section: TrainerSection) -> float | None:
        """Return the FLOPs of a training step for each unit; None where they are not known."""
        return None

    def samples(self, numbers: list[int], width: int = 100, in_full: bool = False) -> str:
        """Return samples as text, cut to `width` characters a line unless `in_full`; or nothing."""
        return ""

    def loading_advice(self, workers: int) -> str:
        """Return the end of the note that the device waits for data."""
        return ""

    def is_named(self, section: TrainerSection) -> bool:
        """Return True if the config says all of what is trained: another process can plan it."""
        return None not in (section.model.name_or_path, section.data.path)

    def describe_to(self, planned: Json) -> None:
        """Add what is known since the data was opened to a config that is to be planned."""

    def measures(self, loss: float) -> dict[str, float]:
        """Return further figures of an evaluation, by name."""
        return {}

    def figures(self, measures: Mapping[str, float]) -> dict[str, float]:
        """Return an evaluation's metrics, from its task's measures over the number of targets."""
        return dict(measures)

    def losses_by_source(self, metrics: Metrics, device: torch.device) -> dict[str, float] | None:
        """Return training losses since the last call, by source, if asked for. Collective."""
        return None

    def training_figures(self, metrics: Metrics, device: torch.device) -> dict[str, float]:
        """Return figures of the steps since the last call, by name, over all ranks. Collective."""
        return {}

    def save(self, folder: Path, dtype: torch.dtype | None) -> None:
        """Write the model's files that hold no tensors, beside weights of this dtype.

        Raises DiskError if the folder would open as another model.
        """
        self.spec.files.save_config(folder, dtype)
        self.spec.files.check(folder)

    def example(self, folder: Path, section: TrainerSection) -> str | None:
        """Return an output of the trained model in `folder` as text, if the config asks for it."""
        return None


class PlannedModel(NamedTuple):
    """A model without weights, and samples without meaning, for the planner."""

    spec: ModelSpec
    task: Callable[[ModelSpec], Task]
    """Builds the task of the model, or of it with fewer blocks."""
    batch: Callable[[int], Batch]
    """Makes a micro-batch of that many samples, of the trained length."""
    cost: Callable[[ModelSpec], SampleCost]
    """Gives the cost of a sample, of the model with the config's changes (`trainer.freeze`)."""


class Recipe(Protocol):
    """All that is particular to one thing that is trained.

    A plug-in's recipe has a name with a colon, from `meshloom.plugins.register("recipe", ...)` or
    an entry point of the group `meshloom.recipes`. It may have two attributes more. `keys` lists
    the keys of `trainer.model` and `trainer.data` that it reads ("trainer.data.path"), and those
    of others whose mark in `trainer/config/sections/` has `recipes=`; all others are refused.
    `options` is the pydantic model of its own keys, `trainer.recipe`.

    A recipe may have `precursor(config, folder)`, which returns the config of what is measured
    before its own model is built, in the same layout, and then leaves memory (a teacher); None if
    that has been done. `folder` is that of the run; None: only this is to be done.

    No method applies the config's adapter, frozen parameters and groups: that is done to each spec
    that a recipe returns. Whatever a plug-in's recipe raises becomes a ConfigError with its name.
    """

    def subject(self, context: RunContext) -> Subject:
        """Open the model, the task and the data. Collective.

        Raises ConfigError or DataError for what does not fit together.
        """

    def planned(self, section: TrainerSection, layout: Layout) -> PlannedModel:
        """Describe the model and its samples without weights and data.

        Raises ConfigError where the config does not name what is trained.
        """


def recipe_named(name: str) -> Recipe:
    """Return the recipe of a task's name.

    Raises ConfigError for none of that name, and for one that lacks a method.
    """
    if name in NAMED["task"]:
        return recipe_named(HANDED_IN)
    if (module := RECIPES.get(name)) is not None:
        return import_module(module).RECIPE  # type: ignore[no-any-return]
    if (recipe := NAMED["recipe"].get(name)) is None:
        raise ConfigError(Problem("trainer.task", name, "a recipe's name"))
    lacks = [method for method in METHODS if not callable(getattr(recipe, method, None))]
    if lacks or isinstance(recipe, type):
        actual = f"{name} is a class" if isinstance(recipe, type) else f"{name} has no {lacks[0]}"
        expected = f"an object with the methods {' and '.join(METHODS)}"
        raise ConfigError(Problem("trainer.task", actual, expected))
    return recipe  # type: ignore[no-any-return]


@contextmanager
def of_recipe(name: str) -> Iterator[None]:
    """Turn what the code of a plug-in's recipe raises into a ConfigError with the recipe's name."""
    try:
        yield
    except MeshloomError:
        raise
    except Exception as error:  # whatever the recipe's own code raises
        if name not in NAMED["recipe"]:
            raise
        actual = f"{name}: {named_line(error)} ({raised_at(error)})"
        raise ConfigError(Problem("trainer.task", actual, "a recipe whose code runs")) from error


def recipe_of(section: TrainerSection, handed_in: HandedIn | None) -> Recipe:
    """Return the recipe that a config names; a script's own model and data have one of their own.

    A recipe that the config names by another than the default takes what a script hands in itself.
    """
    if handed_in is not None and section.task == DEFAULT:
        return recipe_named(HANDED_IN)
    return recipe_named(section.task)


def open_subject(
    config: Config,
    handed_in: HandedIn | None,
    layout: Layout,
    ranks: Ranks,
    progress: Progress,
    order: int,
) -> Subject:
    """Open the subject that a config names or a script hands in, its data in the version `order`
    of the samples' order. Collective.

    Raises ConfigError or DataError for what does not fit together.
    """
    data = fetched(config.trainer.data, cache_folder(), ranks, progress)
    config = replace(config, trainer=config.trainer.model_copy(update={"data": data}))
    context = RunContext(config, handed_in or HandedIn(), layout, ranks, progress, order)
    with of_recipe(config.trainer.task):
        subject = recipe_of(config.trainer, handed_in).subject(context)
    return replace(subject, spec=context.changed(subject.spec))


def planned_model(section: TrainerSection, layout: Layout) -> PlannedModel:
    """Describe the model that a config names, with the config's changes, and its samples.

    Raises ConfigError where the config does not name what is trained.
    """
    with of_recipe(section.task):
        planned = recipe_named(section.task).planned(section, layout)
    return planned._replace(spec=changed_spec(planned.spec, section, ALONE))
