"""The requirements of a layout on a model, checked on a tiny copy before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.distributed.ranks import Ranks
from trainer.errors import ConfigError, Problem, refused
from trainer.layout import Layout, Recompute
from trainer.models.cut import check_cut, cut, of_tokens
from trainer.models.names import pattern_of
from trainer.models.own.module import running_norms
from trainer.models.spec import ModelSpec
from trainer.parallel.forward_backward import Dropout
from trainer.parallel.recompute import activation_checkpointing, tiles
from trainer.parallel.splits import expert_loads, rows
from trainer.trial.findings import Findings, applied
from trainer.trial.isolation import check_isolation, packed_batch
from trainer.trial.language import check_model
from trainer.trial.own_module import check_module
from trainer.trial.setup import TrialTask, batches, differing_gradient, tiny

TOLERANCE = 1e-5
TILED = "trainer.tiled_mlp"


def checked(
    spec: ModelSpec, task: TrialTask, layout: Layout, ranks: Ranks, packed: bool = False
) -> tuple[ModelSpec, tuple[str, ...]]:
    """Try a tiny copy; return the spec with the findings applied, and notes for the user.

    `packed`: samples are several documents that are kept apart. Collective: the first
    rank tries. Raises ConfigError, with the numbers, for a model that is not what it is taken for,
    or that this layout would train differently from one process.
    """

    def tried() -> Findings:
        findings = check_model(spec, task) if spec.tiny.input is None else check_module(spec, task)  # type: ignore[arg-type]
        if packed:
            check_isolation(spec, task)
        check_layout(applied(spec, findings), task, layout, findings, packed)
        return findings

    findings = ranks.on_first(tried)
    notes = (*spec.notes, *findings.notes, *_notes_on_batch_norm(layout, findings))
    notes = (*notes, *_notes_on_balance(spec, layout), *_notes_on_tiles(spec, layout))
    return applied(spec, findings), notes


def packing_refusal(
    spec: ModelSpec, task: TrialTask, layout: Layout, ranks: Ranks, attention: str | None
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


def check_layout(
    spec: ModelSpec, task: TrialTask, layout: Layout, findings: Findings, packed: bool = False
) -> None:
    """Raise ConfigError for a layout that can't train the model as one process does."""
    if findings.unproven and layout.world_size > 1:
        untried = f"no tiny copy of it can be tried ({findings.unproven})"
        seen = f"{untried}, so that nothing shows what ranks would differ in"
        raise _refused(spec, "processes", seen, "one process")
    if findings.moves_buffers and layout.world_size > 1:
        seen = f"training changes its buffer {findings.moves_buffers}: each rank would have another"
        raise _refused(spec, "processes", seen, "one process, or a module without such buffers")
    if layout.sync_batch_norm and findings.normalises:
        norms = running_norms(spec.build()).items()
        if other := [(name, norm) for name, norm in norms if not isinstance(norm, _BatchNorm)]:
            place = f"{other[0][0]} ({type(other[0][1]).__name__})"
            seen = f"it keeps running statistics in {place}, which is no batch norm"
            raise _refused(spec, "trainer.sync_batch_norm", seen, "false, or batch norms alone")
    if findings.normalises and layout.micro_batch == 1:
        key = "train_micro_batch_size_per_gpu"
        with _trying(key, spec):
            _check_single(spec, task, findings.normalises)
    check_blocks(spec, layout)
    if layout.world_size > 1 and findings.draws.skips:
        seen = "it leaves out blocks at random (layerdrop), and each process would leave out others"
        expected = "one process, or a layerdrop of 0 in the model's config"
        raise _refused(spec, "processes", seen, expected)
    if layout.router_bias_rate:
        with _trying(expert_loads.KEY, spec):
            expert_loads.check(spec)
    if layout.pipeline > 1:
        _check_pipeline(spec, findings)
    if layout.context > 1:
        with _trying("sequence_parallel_size", spec):
            rows.check(spec, task, layout, packed)
    again = tiles.tried(layout.recompute)
    if again.tile:
        once = Recompute(tile=again.tile)
        with _trying(TILED, spec):
            _check_recompute(spec, task, once, TILED, packed)
    if again.mode != "none":
        key = "trainer.activation_checkpointing"
        with _trying(key, spec):
            _check_recompute(spec, task, again, key, packed)


def _check_pipeline(spec: ModelSpec, findings: Findings) -> None:
    key = "pipeline.stages"
    if spec.language.own_loss:
        product = "a product of means over all layers: no sum over stages"
        seen = f"the router's loss (output_router_logits) is {product}"
        raise _refused(spec, key, seen, "1 stage, or output_router_logits false")
    if findings.draws.between:
        draws = "it draws random numbers between its blocks"
        seen = f"{draws}, which a stage could only repeat by running those before"
        raise _refused(spec, key, seen, "1 stage, or a model config without that dropout")
    if findings.draws.any:
        with _trying(key, spec):
            _check_stages(spec)


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
            seen = f"{need}, and it has no list of {once}"
            raise _refused(spec, key, seen, "a model of repeated blocks")
    if layout.recompute.tile and not tiles.mlps(spec.build(), spec):
        seen = "no module of its blocks gets one tensor, and has two matrices but no routed experts"
        raise _refused(spec, TILED, seen, "a model with such MLPs")


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
    found = tiles.mlps(spec.build(), spec) if layout.recompute.tile else []
    with_tiles = {name.rpartition(".")[0] for name in found}
    if 0 < len(with_tiles) < len(spec.blocks):
        yield f"{TILED}: {len(with_tiles)} of {len(spec.blocks)} blocks have an MLP for it"


def _check_single(spec: ModelSpec, task: TrialTask, name: str) -> None:
    """Raise ConfigError for batch norm on one sample without several positions to average over."""
    small, model = tiny(spec)
    assert small.tiny.input is not None
    try:
        task.loss_sum(model.train(), small.tiny.input.batches[1])
    except ValueError as error:
        single = "a micro-batch of 1 sample, of which batch norm"
        seen = f"{single} ({name}, ...) can take no statistics: {error}"
        key = "train_micro_batch_size_per_gpu"
        raise _refused(spec, key, seen, "at least 2 samples") from error


def _trying(key: str, spec: ModelSpec) -> AbstractContextManager[None]:
    """Refuse what a model's own code raises, for a layout that needs it to run."""
    start = "a tiny copy of the model fails so: "
    return refused(f"{key}: {spec.name}", "a model that runs", named=True, start=start)


def _check_stages(spec: ModelSpec) -> None:
    """Check that stages of one block, each seeded by its place, draw what the whole model draws."""
    small, whole = tiny(spec)
    boundary, trial = check_cut(small, 1), small.tiny.input or of_tokens(small)
    dropout = Dropout(whole, small)
    dropout.start(1, 0)
    hidden = torch.empty(0)
    with torch.no_grad():
        output = trial.output(whole.train())
        for index in range(len(small.blocks)):
            stage = tiny(spec)[1].train()
            dropout = Dropout(stage, small)
            stage_input = cut(stage, small, boundary, range(index, index + 1))
            stage_input.put(hidden)
            dropout.start(1, 0)
            hidden = trial.hidden(stage) if index + 1 < len(small.blocks) else trial.output(stage)
    error = float((hidden - output).abs().max() / output.abs().max())
    if not error <= TOLERANCE:  # nor NaN
        stages = "stages that start from their own seeds"
        seen = f"{stages} give other logits than the whole model, by {error:.1e}"
        expected = "1 stage, or a model config without what is random in it"
        raise _refused(spec, "pipeline.stages", seen, expected)


def _check_recompute(
    spec: ModelSpec, task: TrialTask, recompute: Recompute, key: str, packed: bool
) -> None:
    """Check that it gives the gradients of a model that computes all at once, and keeps it."""
    models = []
    for again in (False, True):
        small, model = tiny(spec)
        model = task.prepare(model).train()
        if again:
            activation_checkpointing.apply(model, small, recompute)
        dropout = Dropout(model, small)
        dropout.start(1, 0)
        language = packed_batch if packed else lambda spec, task: next(batches(spec, task))
        task.loss_sum(
            model, small.tiny.input.batches[0] if small.tiny.input else language(small, task)
        ).backward()
        models.append(model)
    if difference := differing_gradient(models[1], models[0], TOLERANCE):
        name, distance = difference
        part, alone = "its block is", '"none"'
        if key == TILED:
            part = "a part of its tokens is"
            alone = "none, or MLPs that treat each token alone and draw nothing (dropout)"
        seen = f"the gradient of {name} is another when {part} computed again, by {distance:.1e}"
        raise _refused(spec, key, seen, alone)


def _refused(spec: ModelSpec, key: str, actual: str, expected: str) -> ConfigError:
    return ConfigError(Problem(f"{key}: {spec.name}", actual, expected))
