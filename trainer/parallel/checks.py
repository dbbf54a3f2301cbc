"""The requirements of a layout on a model: the table of questions, and what answers rule out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch.nn.modules.batchnorm import _BatchNorm

from trainer.distributed.ranks import Ranks
from trainer.errors import ConfigError, Problem
from trainer.layout import Layout, Recompute
from trainer.models.names import pattern_of
from trainer.models.own.module import running_norms
from trainer.models.spec import ModelSpec
from trainer.parallel.probes import (
    compiled_blocks,
    computed_again,
    context_parts,
    counted_work,
    expert_bias,
    expert_parts,
    fsdp_units,
    sealed_masks,
    seeded_stages,
    tensor_parts,
)
from trainer.parallel.recompute import tiles
from trainer.parallel.splits import expert_loads
from trainer.probes.answers import Answer, answer
from trainer.probes.findings import Findings, applied
from trainer.probes.inputs import ProbeTask
from trainer.probes.question import ONE_PROCESS, Probed, Question, ask_all
from trainer.probes.questions import (
    block_order,
    can_run,
    forward_state,
    module_loss,
    randomness,
    single_sample,
    stages,
)
from trainer.probes.questions.language import (
    causal,
    isolation,
    output_head,
    own_loss,
    padding,
    unused,
)

OF_MODELS: list[Question] = [
    can_run.QUESTION,
    module_loss.QUESTION,
    randomness.QUESTION,
    block_order.QUESTION,
    causal.QUESTION,
    padding.QUESTION,
    forward_state.QUESTION,
    own_loss.QUESTION,
    unused.QUESTION,
    output_head.PLAIN,
]
"""The questions about a model in any layout, in the order in which they are asked."""
OF_LAYOUTS: list[Question] = [
    isolation.QUESTION,
    sealed_masks.QUESTION,
    single_sample.QUESTION,
    expert_bias.QUESTION,
    stages.QUESTION,
    seeded_stages.QUESTION,
    counted_work.QUESTION,
    context_parts.QUESTION,
    computed_again.TILES,
    computed_again.BLOCKS,
    tensor_parts.QUESTION,
    output_head.WORD_BY_WORD,
    expert_parts.QUESTION,
    fsdp_units.QUESTION,
    compiled_blocks.QUESTION,
]
"""The questions that a layout or an option asks about a model."""
TABLE = (*OF_MODELS, *OF_LAYOUTS)
"""All questions, as docs/models.md prints them."""


def checked(
    spec: ModelSpec, task: ProbeTask, layout: Layout, ranks: Ranks, packed: bool = False
) -> tuple[ModelSpec, tuple[str, ...]]:
    """Probe a tiny copy; return the spec with the findings applied, and notes for the user.

    `packed`: samples are several documents that are kept apart. Collective: the first
    rank probes. Raises ConfigError, with the numbers, for a model that is not what it is taken for,
    or that this layout would train differently from one process.
    """

    def probed() -> Findings:
        about = Probed(spec, task, layout, packed=packed)
        ask_all(OF_MODELS, about)
        about.release()
        _check_requirements(about)
        ask_all(OF_LAYOUTS, about)
        return about.findings

    findings = ranks.on_first(probed)
    notes = (*spec.notes, *findings.notes, *_notes_on_batch_norm(layout, findings))
    notes = (*notes, *_notes_on_balance(spec, layout), *_notes_on_tiles(spec, layout))
    return applied(spec, findings), notes


def answers(about: Probed, moves: Callable[[], None]) -> tuple[Answer, ...]:
    """Ask every question of the table that can be asked of the model, for its layout or another.

    On one rank alone. `moves()` is called before each, as progress.
    """

    def answered(question: Question) -> Answer:
        moves()
        return answer(question, about, _check_requirements)

    return tuple(answered(question) for question in TABLE)


def packing_refusal(
    spec: ModelSpec, task: ProbeTask, layout: Layout, ranks: Ranks, attention: str | None
) -> str:
    """Return why the model or layout can't train on packed documents; else nothing. Collective.

    `attention`: trainer.model.attention.
    """
    if attention == "flash_attention_2":
        return "with flash_attention_2 a model shows only at its first step if it takes them"
    try:
        checked(spec, task, layout, ranks, packed=True)
    except ConfigError as error:
        return error.problems[0].actual
    return ""


def recompute_refusal(spec: ModelSpec, task: ProbeTask, ranks: Ranks, packed: bool = False) -> str:
    """Return why the model's blocks can't be computed again; else nothing. Collective."""
    about = Probed(spec, task, ONE_PROCESS).under(packed, recompute=Recompute("full"))

    def refused() -> str:
        try:
            ask_all([computed_again.BLOCKS], about)
        except ConfigError as error:
            return error.problems[0].actual
        return ""

    return ranks.on_first(refused)


def check_layout(
    spec: ModelSpec, task: ProbeTask, layout: Layout, findings: Findings, packed: bool = False
) -> None:
    """Raise ConfigError for a layout that can't train the model as one process does."""
    about = Probed(spec, task, layout, packed=packed, findings=findings)
    _check_requirements(about)
    ask_all(OF_LAYOUTS, about)


def _check_requirements(about: Probed) -> None:
    """Raise ConfigError for what the findings rule out."""
    layout = about.layout
    findings = about.findings
    spec = about.trained
    several = layout.world_size > 1
    if findings.unproven and several:
        untried = f"no tiny copy of it can be tried ({findings.unproven})"
        actual = f"{untried}, so that nothing shows what ranks would differ in"
        raise _refused(spec, "processes", actual, "one process")
    if findings.moves_buffers and several:
        buffer = f"training changes its buffer {findings.moves_buffers}"
        expected = "one process, or a module without such buffers"
        raise _refused(spec, "processes", f"{buffer}: each rank would have another", expected)
    if findings.draws.skips and several:
        actual = (
            "it leaves out blocks at random (layerdrop), and each process would leave out others"
        )
        expected = "one process, or a layerdrop of 0 in the model's config"
        raise _refused(spec, "processes", actual, expected)
    if layout.sync_batch_norm and findings.normalises:
        _check_norms(spec)
    if about.task.whole_step is not None:
        _check_whole_step(spec, layout, findings)
    check_blocks(spec, layout)


def _check_whole_step(spec: ModelSpec, layout: Layout, findings: Findings) -> None:
    """Raise ConfigError for what does not fit a task that runs each micro-batch twice."""
    twice = "the loss compares all samples of a step, so that each micro-batch runs twice"
    if layout.pipeline > 1:
        actual = f"{twice}: a schedule starts backward passes before the last forward pass"
        raise _refused(spec, "pipeline.stages", actual, "1 stage")
    if moved := findings.normalises or findings.moves_buffers:
        actual = f"{twice}, and {moved} would change twice"
        raise _refused(spec, "trainer.model", actual, "a model without running statistics")


def _check_norms(spec: ModelSpec) -> None:
    norms = running_norms(spec.build()).items()
    if other := [(name, norm) for name, norm in norms if not isinstance(norm, _BatchNorm)]:
        place = f"{other[0][0]} ({type(other[0][1]).__name__})"
        actual = f"it keeps running statistics in {place}, which is no batch norm"
        raise _refused(spec, "trainer.sync_batch_norm", actual, "false, or batch norms alone")


def check_blocks(spec: ModelSpec, layout: Layout) -> None:
    """Raise ConfigError for a layout that needs blocks if none are known."""
    needs = {
        "pipeline.stages": layout.pipeline > 1 and "stages are cut between blocks",
        "zero_optimization.stage": layout.zero_stage == 3
        and "ZeRO-3 gathers parameters block by block",
        "trainer.activation_checkpointing": layout.recompute.mode != "none"
        and "it recomputes block by block",
        "trainer.compile": layout.compile == "blocks" and "it compiles block by block",
        "tensor_parallel.autotp_size": layout.tensor > 1 and "tensor parallelism splits blocks",
    }
    for key, need in needs.items():
        if need and not spec.blocks:
            once = "modules that run once each, in order, from hidden state to hidden state"
            actual = f"{need}, and it has no list of {once}"
            raise _refused(spec, key, actual, "a model of repeated blocks")
    if layout.recompute.tile and not tiles.mlps(spec.build(), spec):
        actual = (
            "no module of its blocks gets one tensor, and has two matrices but no routed experts"
        )
        raise _refused(spec, computed_again.TILED, actual, "a model with such MLPs")


def _notes_on_batch_norm(layout: Layout, findings: Findings) -> tuple[str, ...]:
    """Return a note on the samples that are normalised together, unless they are all of a step."""
    if not findings.normalises or layout.accumulation * layout.data_ranks == 1:
        return ()
    samples = f"{layout.micro_batch} samples at a time"
    own = f"batch norm ({findings.normalises}, ...) takes statistics of {samples}"
    if layout.data_ranks == 1:
        return (f"{own}, a micro-batch",)
    if layout.sync_batch_norm:
        ranks = f"on each of {layout.data_ranks} data ranks together"
        return (f"{own} {ranks} (trainer.sync_batch_norm)",)
    other = "trainer.sync_batch_norm takes those of all data ranks together"
    return (f"{own}, a micro-batch of one data rank ({other})",)


def _notes_on_balance(spec: ModelSpec, layout: Layout) -> Iterator[str]:
    """Yield a note on biases that choose experts, if nothing moves them."""
    biases = expert_loads.biases_of(spec) if not layout.router_bias_rate else {}
    for name in list(biases.values())[:1]:
        bias = f"{pattern_of(name)}, by which experts are chosen"
        yield f"{bias}, stays as it is: set {expert_loads.KEY} to balance experts by their loads"


def _notes_on_tiles(spec: ModelSpec, layout: Layout) -> Iterator[str]:
    """Yield a note on the blocks that have no MLP to compute in tiles, if some have none."""
    mlps = tiles.mlps(spec.build(), spec) if layout.recompute.tile else []
    with_tiles = {name.rpartition(".")[0] for name in mlps}
    if 0 < len(with_tiles) < len(spec.blocks):
        count = f"{len(with_tiles)} of {len(spec.blocks)} blocks"
        yield f"{computed_again.TILED}: {count} have an MLP for it"


def _refused(spec: ModelSpec, key: str, actual: str, expected: str) -> ConfigError:
    return ConfigError(Problem(f"{key}: {spec.name}", actual, expected))
