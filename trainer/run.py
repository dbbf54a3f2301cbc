"""A run from its config to its folder: the only place where everything meets."""

from __future__ import annotations

import datetime
import math
import os
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch
import torch.distributed as dist
from rich.console import Console

from trainer import checkpoint, describe, resume
from trainer.config import Config, Facts, resolve
from trainer.data.feed import Feed, StepBatches
from trainer.data.prepare import Data, open_data
from trainer.data.tokenizer import embedded_tokenizer, load_tokenizer
from trainer.engines import Engine, EngineKind, Job, Machine, Metrics, select
from trainer.errors import ConfigError, DataError, MeshloomError, Problem
from trainer.evaluate import continuation, held_out_loss
from trainer.layout import Layout, layout_of
from trainer.loop import Hooks, Plan, train
from trainer.meter import Meter
from trainer.models import huggingface
from trainer.models.spec import ModelSpec, flops_per_token
from trainer.numerics import Skipped
from trainer.optimizers import Update, schedule_of
from trainer.ranks import Ranks
from trainer.resume import Request, Start
from trainer.signals import StopSignals, preempted
from trainer.state import Piece, RunState
from trainer.tasks.causal_lm import CausalLM
from trainer.trackers import Evaluation, SampleLog, Tracker, open_trackers, peak_flops, require

TIMEOUT = datetime.timedelta(minutes=30)
"""Longer than any step or save; a rank that is lost shows at the latest then."""


Saver = Callable[[Sequence[Piece], Callable[[Sequence[Piece], Ranks], None]], None]
"""Has pieces written by what is given, with the ranks to agree with: at once, or beside the training."""


class World(Protocol):
    @property
    def rank(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def local_world_size(self) -> int: ...


class Output(Protocol):
    terminal: TextIO

    def log_to(self, path: Path) -> None: ...


@dataclass(frozen=True)
class Prepared:
    """All that is known before the first byte of the model is allocated."""

    config: Config
    layout: Layout
    engine_name: str
    engine: EngineKind
    spec: ModelSpec
    task: CausalLM
    tokenizer: Any
    data: Data
    steps: int


def run(config: Config, request: Request, world: World, output: Output, signals: StopSignals) -> int:
    """Train, or with `dry_run` show what would be trained; returns the exit code. Collective."""
    console = Console(file=output.terminal, highlight=False, quiet=world.rank != 0)
    log = None
    try:
        machine = _join(config, world)
        _quiet_libraries()
        start = None if request.dry_run else resume.choose(config, request, machine.ranks)
        if start is not None:
            log = start.folder / "logs" / f"rank-{world.rank}.log"
            output.log_to(log)
        prepared = prepare(config, machine)
        for line in describe.plan_lines(prepared, request.dry_run):
            _say(console, line)
        if start is not None:
            _train(prepared, request, machine, start, console, signals)
        if machine.ranks.world_size > 1:
            dist.barrier()
        return 0
    except BaseException as error:  # the last place where it can become an exit code
        with suppress(OSError):  # the disk that holds the log may be full
            traceback.print_exc()
        if not isinstance(error, MeshloomError) and signals.explain_failure(others=world.world_size > 1):
            error = preempted(0)
        signals.release()
        if isinstance(error, MeshloomError):
            if world.rank == 0 or not error.shared:
                _tell(world, output, error.render())
            return error.exit_code
        where = f"; the whole trace is in {log}" if log else f"\n{traceback.format_exc()}"
        _tell(world, output, f"internal error on rank {world.rank}: {type(error).__name__}: {error}{where}")
        return 70


def prepare(config: Config, machine: Machine) -> Prepared:
    """Everything that can be wrong, checked, in the order in which it is cheap to find out. Collective."""
    ranks, section = machine.ranks, config.trainer
    bf16, kind = _has_bf16(machine.device), _kind(machine.device)
    facts = Facts(ranks.world_size, None, None, bf16, kind, machine.local_world_size)
    config = resolve(config, facts)
    layout = layout_of(config, ranks.world_size)
    name, engine = select(section.engine, layout)
    ranks.on_first(lambda: require(section.log.trackers))
    architecture = ranks.on_each(lambda: huggingface.read_config(section.model))[ranks.rank]
    tokenizer = _tokenizer(config, ranks)
    data = open_data(section.data, tokenizer, _cache_folder(), ranks)
    spec = huggingface.spec_of(architecture, section.model)
    ranks.on_first(lambda: engine.check(spec, layout))
    _check_vocabulary(data.largest_token_id, spec)
    _check_length(section.data.sequence_length, architecture)
    steps = section.steps or max(1, math.ceil((section.epochs or 1) * len(data.train) / layout.train_batch))
    config = resolve(config, replace(facts, hidden_size=spec.hidden_size, total_steps=steps))
    task = CausalLM(fused_head=spec.plain_head, padding_id=tokenizer.pad_token_id or 0)
    return Prepared(config, layout, name, engine, spec, task, tokenizer, data, steps)


def _train(
    prepared: Prepared, request: Request, machine: Machine, start: Start, console: Console, signals: StopSignals
) -> None:
    config, spec, ranks = prepared.config, prepared.spec, machine.ranks
    section, position, folder, source = config.trainer, RunState(), start.folder, start.source
    changed = []
    if source is not None and not request.resume_anyway:
        changed = ranks.on_first(lambda: resume.refuse_changed(source, describe.run_description(prepared)))
    for line in [*start.lines, *changed]:
        _say(console, f"resume  {line}")
    # weights, float32 masters and two moments
    ranks.on_first(lambda: checkpoint.ensure_writable(folder / "checkpoints", 16 * spec.parameters))
    ranks.on_first(lambda: describe.write(folder, prepared, request.overrides))
    engine = prepared.engine.build(Job(prepared.layout, spec, prepared.task, config.deepspeed, section.seed, machine))
    for note in engine.notes:
        _say(console, f"note: {note}")
    if source is not None:
        if not request.weights_only:
            engine.restore(ranks.on_first(lambda: checkpoint.read_description(source)["position"]["engine"]))
        position = checkpoint.load(source, engine.pieces(), ranks, request.weights_only)
        _say(console, f"resumed from {source}: step {position.step}, {position.samples:,} samples seen")
    with ExitStack() as stack:
        trackers = open_trackers(section.log.trackers, folder, console) if ranks.first else []
        for tracker in trackers:
            stack.callback(tracker.close)
        feed = stack.enter_context(_feed(prepared, machine, position))
        peak = peak_flops(torch.cuda.get_device_name(machine.device)) if machine.device.type == "cuda" else None
        flops = flops_per_token(spec, section.data.sequence_length)
        meter = Meter(prepared.steps, machine.device, ranks.world_size, flops, peak, feed, position)
        plan = Plan(
            prepared.steps,
            prepared.layout.train_batch,
            section.log.every,
            section.checkpoint.every,
            section.evaluation.every,
        )
        schedule = schedule_of(vars(config.optimizer), _mapping(config.scheduler))
        saver: Saver = lambda pieces, write: write(pieces, ranks)  # noqa: E731
        if section.checkpoint.asynchronous:
            saver = stack.enter_context(checkpoint.Background(ranks.apart())).save
        hooks = _hooks(prepared, machine, folder, engine, meter, trackers, console, saver, signals)
        signals.saving()
        position = train(engine, feed, schedule, plan, hooks, position)
    if position.step < prepared.steps:
        ranks.barrier()  # a launcher ends the others soon after the first has left
        raise preempted(position.step)
    files = partial(_write_model_files, prepared)
    checkpoint.export(folder / "final", engine.pieces(), files, ranks, _stored_dtype(prepared))
    engine.close()
    if ranks.first:
        _finish(prepared, folder, console)


def _feed(prepared: Prepared, machine: Machine, position: RunState) -> Feed:
    layout = prepared.layout
    return Feed(
        prepared.data.train,
        prepared.task.collate,
        seed=prepared.config.trainer.seed,
        micro_batch=layout.micro_batch,
        accumulation=layout.accumulation,
        data_ranks=layout.data_ranks,
        data_rank=layout.data_rank(machine.ranks.rank),
        position=position.samples,
        start_step=position.step,
        end_step=prepared.steps,
        device=machine.device,
    )


def _hooks(
    prepared: Prepared,
    machine: Machine,
    folder: Path,
    engine: Engine,
    meter: Meter,
    trackers: Sequence[Tracker],
    console: Console,
    saver: Saver,
    signals: StopSignals,
) -> Hooks:
    """What the loop calls on every rank; only rank 0 has trackers."""
    section, ranks, layout = prepared.config.trainer, machine.ranks, prepared.layout
    shelf = folder / "checkpoints"
    samples = SampleLog(folder / "logs", ranks.rank) if section.log.sample_ids else None

    skipped = Skipped(ranks, watching=layout.precision != "float16")
    held_out: dict[int, float] = {}

    def log(state: RunState, metrics: Metrics, update: Update) -> None:
        for line in skipped.lines():
            _say(console, line)
        record = meter.record(replace(state, engine=engine.scalars()), metrics, update, skipped.total)
        for tracker in trackers:
            tracker.record(record)

    def evaluate(state: RunState) -> None:
        source, data_rank = prepared.data.evaluation, layout.data_rank(ranks.rank)
        if source is None:
            return
        limit, collate = section.evaluation.samples, prepared.task.collate
        found = held_out_loss(engine, source, collate, layout, limit, data_rank, machine.device)
        if math.isfinite(found[0]):
            held_out[state.step] = found[0]
        for tracker in trackers:
            tracker.evaluation(Evaluation(state.step, *found))

    def save(state: RunState) -> None:
        position = replace(state, engine=engine.scalars())
        description = {**describe.run_description(prepared), "evaluation_loss": held_out.get(state.step)}

        def write(pieces: Sequence[Piece], agreeing: Ranks) -> None:
            files, dtype = partial(_write_model_files, prepared), _stored_dtype(prepared)
            checkpoint.save(shelf, position, pieces, description, files, agreeing, dtype)
            keep = section.checkpoint
            agreeing.on_first(lambda: checkpoint.prune(shelf, keep.keep_last, keep.keep_best))

        saver(engine.pieces(), write)

    def seen(batches: StepBatches, metrics: Metrics) -> None:
        skipped.seen(batches, metrics)
        if samples is not None:
            samples.write(batches.step, [int(i) for part in batches.ids for i in part])

    apart = ranks.apart()
    return Hooks(log, evaluate, save, seen, stop=lambda: apart.any_soon(signals.received))


def _stored_dtype(prepared: Prepared) -> torch.dtype | None:
    name = prepared.config.trainer.checkpoint.dtype
    return getattr(torch, name) if name else None


def _write_model_files(prepared: Prepared, target: Path) -> None:
    prepared.spec.save_config(target, _stored_dtype(prepared))
    prepared.tokenizer.save_pretrained(target)


def _finish(prepared: Prepared, folder: Path, console: Console) -> None:
    wanted = prepared.config.trainer.generate
    if wanted.prompt is not None:
        text = continuation(folder / "final", prepared.tokenizer, wanted.prompt, wanted.tokens, seed=0)
        _say(console, describe.framed_sample(text))
    _say(console, f"done: {folder / 'final'} opens with AutoModelForCausalLM.from_pretrained")


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, soft_wrap=True)


# The machine


def _join(config: Config, world: World) -> Machine:
    """This process's device, and the process group of all."""
    section = config.trainer.device
    cuda = section == "cuda" or (section == "auto" and torch.cuda.is_available())
    if cuda and torch.cuda.device_count() < world.local_world_size:
        raise ConfigError(
            Problem(
                "processes on this machine",
                f"{world.local_world_size} for {torch.cuda.device_count()} GPUs",
                "at most one process per GPU",
                'Start fewer, or set trainer.device="cpu"',
            )
        )
    device = torch.device("cuda", world.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # set for forks after use, which warn otherwise
    os.environ.setdefault("LOCAL_RANK", str(world.local_rank))  # DeepSpeed's PipelineModule looks nowhere else
    if not cuda:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    dist.init_process_group("nccl" if cuda else "gloo", timeout=TIMEOUT, device_id=device if cuda else None)
    return Machine(device, Ranks(world.rank, world.world_size), world.local_world_size)


def _kind(device: torch.device) -> Any:
    return device.type


def _has_bf16(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_bf16_supported()


def _quiet_libraries() -> None:
    """Progress bars and advice that a person can do nothing about."""
    import datasets
    import transformers

    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()


def _tell(world: World, output: Output, text: str) -> None:
    """One message per mistake: rank 0's, or that of a rank which failed alone, once rank 0 has had its time."""
    if world.rank != 0:
        time.sleep(3)
        text = f"rank {world.rank}: {text}"
    print(text, file=output.terminal, flush=True)


# What a run is made of


def _tokenizer(config: Config, ranks: Ranks) -> Any:
    data, model = config.trainer.data, config.trainer.model
    name = data.tokenizer or model.name_or_path
    if name is None:
        load = lambda: embedded_tokenizer(_cache_folder())  # noqa: E731
        ranks.on_first(load)
        return load()
    return ranks.on_each(lambda: load_tokenizer(name, model.trust_remote_code, model.revision))[ranks.rank]


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "meshloom"


def _check_vocabulary(largest: int, spec: ModelSpec) -> None:
    if largest >= spec.vocabulary:
        raise DataError(
            Problem(
                "tokenizer",
                f"the data has token id {largest}",
                f"ids below {spec.vocabulary}, the rows of the embedding of {spec.name}",
                "Use the model's own tokenizer (trainer.data.tokenizer), or a vocab_size that holds all ids",
            )
        )


def _check_length(sequence: int, architecture: Any) -> None:
    longest = getattr(architecture.get_text_config(), "max_position_embeddings", None)
    if longest is not None and sequence > longest:
        raise ConfigError(
            Problem("trainer.data.sequence_length", str(sequence), f"at most the model's {longest} positions")
        )


def _mapping(choice: Any) -> dict[str, Any] | None:
    return None if choice is None else vars(choice)
