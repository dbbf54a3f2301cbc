"""One small training run in two ways: by an engine of ours on several ranks, and by plain PyTorch
in one process.

Dropout, ragged samples, very unequal target counts, accumulation and clipping are on: what these
two agree on is what the engine is right about.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

STEPS, TRAIN_BATCH, VOCABULARY = 3, 8, 61

LLAMA: dict[str, Any] = dict(
    model_type="llama",
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    attention_dropout=0.1,
    tie_word_embeddings=True,
)
DEEPSPEED_ONLY = (
    "adam_w_mode",
    "torch_adam",
    "fp32_optimizer_states",
    "bias_correction",
    "set_grad_none",
    "ns_method",
)
"""Optimizer parameters that PyTorch's classes lack."""
GPT2: dict[str, Any] = dict(
    model_type="gpt2",
    vocab_size=VOCABULARY,
    n_embd=32,
    n_layer=3,
    n_head=4,
    n_positions=64,
    bos_token_id=0,
    eos_token_id=0,
)
"""Has dropout in embeddings, attention and MLP, learned positions and biases."""


@dataclass(frozen=True)
class Case:
    """A layout, and what it trains."""

    engine: str = "deepspeed"
    world_size: int = 2
    pipeline: int = 1
    replicate: int = 1
    """Replicas among the data ranks; without ZeRO all of them."""
    tensor: int = 1
    context: int = 1
    expert: int = 1
    zero_stage: int = 2
    micro_batch: int = 2
    precision: str = "float32"
    schedule: str = "1F1B"
    float8: str = "none"
    float8_head: bool = False
    recompute: str = "none"
    every: int = 1
    tile: int = 0
    compile: str = "none"
    compiler: str = "aot_eager"
    """The backend of `torch.compile`: this one does all but make kernels, and is quicker."""
    offload_optimizer: str = "none"
    offload_param: str = "none"
    more: dict[str, dict[str, Any]] = field(default_factory=dict)
    """More of the JSON, by section."""
    model: dict[str, Any] = field(default_factory=lambda: LLAMA)
    clip: float = 0.3
    # a large eps: at 1e-8 Adam's first steps turn rounding noise of tiny gradients into differences
    # of 1e-4
    optimizer: dict[str, Any] = field(
        default_factory=lambda: {
            "type": "AdamW",
            "params": {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-3, "weight_decay": 0.1},
        }
    )

    weight_decay_excludes: str = "norms_and_biases"
    adapter: dict[str, Any] | None = None
    """`trainer.adapter`, around a base of made-up values."""
    freeze: tuple[str, ...] = ()
    """Patterns of parameters that stay as they are."""
    label_smoothing: float = 0.0
    neftune_alpha: float = 0.0
    router_bias_rate: float = 0.0
    groups: tuple[dict[str, Any], ...] = ()
    """`trainer.parameter_groups`."""
    top: dict[str, Any] = field(default_factory=dict)
    """More of the JSON's top level."""

    @property
    def data_ranks(self) -> int:
        return self.world_size // (self.pipeline * self.tensor * self.context)

    @property
    def accumulation(self) -> int:
        return TRAIN_BATCH // (self.micro_batch * self.data_ranks)

    def deepspeed(self) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.zero_stage}
        for key in ("offload_optimizer", "offload_param"):
            if getattr(self, key) != "none":
                zero[key] = {"device": getattr(self, key), "pin_memory": False}
        if self.zero_stage == 3:
            # the defaults keep all of a tiny model whole, as they do nothing of a large one
            zero |= {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
            zero["stage3_prefetch_bucket_size"] = 300
        precision = {
            "float16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
            "bfloat16": {"bf16": {"enabled": True}},
        }
        whole = {
            "train_batch_size": TRAIN_BATCH,
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "optimizer": self.optimizer,
            "zero_optimization": zero,
            **({"tensor_parallel": {"autotp_size": self.tensor}} if self.tensor > 1 else {}),
            **({"sequence_parallel_size": self.context} if self.context > 1 else {}),
            **(
                {"expert_parallel": {"enabled": True, "autoep_size": self.expert}}
                if self.expert > 1
                else {}
            ),
            **precision.get(self.precision, {}),
            **self.top,
        }
        return whole | {
            name: {**whole.get(name, {}), **section} for name, section in self.more.items()
        }


@dataclass
class Outcome:
    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, torch.Tensor]]
    weights: dict[str, torch.Tensor]
    evaluation: float = 0.0
    right: int = 0
    """The number of evaluated targets that have the highest logit."""


def samples(step: int) -> list[dict[str, np.ndarray]]:
    """Return a step's global batch: ragged, with some samples of a single target."""
    rng = np.random.default_rng(step)
    results = []
    for index in range(TRAIN_BATCH):
        length = int(rng.integers(3, 14))
        ids = rng.integers(0, VOCABULARY, length + 1)
        targets = ids[1:].astype(np.int64)
        targets[: length - 1 if index % 3 == 0 else int(rng.integers(0, 2))] = -100
        results.append({"input_ids": ids[:-1].astype(np.int32), "targets": targets})
    return results


def spec_of(model: dict[str, Any], path: str | None = None) -> Any:
    from trainer.config.sections.model_and_data import ModelSection
    from trainer.models import huggingface
    from trainer.models.language import model_config

    options = ModelSection(name_or_path=path, config=None if path else model)
    return huggingface.spec_of(model_config.read_config(options), options)


def spec_in(case: Case, path: str | None = None) -> Any:
    """Return the spec of the case's model, with its changes."""
    from trainer.config.sections.adapter import AdapterSection
    from trainer.config.sections.model_and_data import ParameterGroup
    from trainer.models.finetuning.frozen import frozen
    from trainer.models.finetuning.lora import adapted
    from trainer.models.finetuning.lora_weights import made_up
    from trainer.models.finetuning.tuned import tuned

    spec = spec_of(case.model, path)
    if case.adapter is not None:
        base = spec if path else spec.with_weights(made_up(spec))
        spec = adapted(base, AdapterSection(**case.adapter))
    return tuned(frozen(spec, case.freeze), [ParameterGroup(**group) for group in case.groups])


def task_of(spec: Any, case: Case | None = None) -> Any:
    from trainer.recipes.causal_lm.task import CausalLM

    task = CausalLM.of(spec)
    return task.regularised(spec, case.label_smoothing, case.neftune_alpha) if case else task


def shares(case: Case, step: int, data_rank: int) -> list[list[dict[str, np.ndarray]]]:
    """Return a data rank's micro-batches of [accumulation, data ranks, micro-batch]."""
    batch = samples(step)
    starts = [
        (m * case.data_ranks + data_rank) * case.micro_batch for m in range(case.accumulation)
    ]
    return [batch[start : start + case.micro_batch] for start in starts]


def data_rank_of(case: Case, rank: int) -> int:
    return rank // case.tensor % (case.data_ranks * case.context) // case.context


def device_here() -> torch.device:
    """Return this process's GPU under NCCL, otherwise the CPU."""
    import torch.distributed as dist

    return (
        torch.device("cuda", dist.get_rank())
        if dist.get_backend() == "nccl"
        else torch.device("cpu")
    )


def layout_of(case: Case) -> Any:
    from trainer.layout import PIPELINE_SCHEDULES, Layout, Recompute

    averaging = case.data_ranks * case.context
    replicate = case.replicate if case.zero_stage else averaging
    layout = Layout(
        pipeline=case.pipeline,
        replicate=replicate,
        shard=averaging // replicate,
        tensor=case.tensor,
        context=case.context,
        expert=case.expert,
        micro_batch=case.micro_batch,
        accumulation=case.accumulation,
        zero_stage=case.zero_stage,
        offload_optimizer=case.offload_optimizer,
        offload_param=case.offload_param,
        precision=case.precision,
        recompute=Recompute(case.recompute, case.every, case.tile),
        schedule=PIPELINE_SCHEDULES[case.schedule],
        compile=case.compile,
        float8=case.float8,
        float8_head=case.float8_head,
        sequence_parallel=case.more.get("tensor_parallel", {}).get("sequence_parallel", False),
        updated="bfloat16" if case.more.get("bf16", {}).get("bf16_optimizer_states") else "float32",
        router_bias_rate=case.router_bias_rate,
        secondary_shard=case.more.get("zero_optimization", {}).get("zero_hpz_partition_size", 1),
    )
    layout.check(case.world_size, TRAIN_BATCH)
    return layout


def build(
    case: Case,
    rank: int,
    path: str | None = None,
    values_seed: int = 5,
    device: torch.device | None = None,
    change: Callable[[Any], Any] = lambda spec: spec,
    packs: bool = False,
) -> Any:
    """Build the engine of a case; `change` alters its spec; `packs`: its samples are packed."""
    from trainer.distributed.ranks import Ranks
    from trainer.engines import ENGINES, Job, Machine
    from trainer.optim.decay import spared
    from trainer.parallel import compilation

    spec, layout = change(spec_in(case, path)), layout_of(case)
    kind = ENGINES[case.engine]
    assert kind.refusal(layout) is None
    if case.compile != "none":
        torch.compiler.reset()
        compilation.BACKEND = case.compiler
    machine = Machine(device or device_here(), Ranks(rank, case.world_size))
    undecayed = spared(case.weight_decay_excludes, spec)
    task = task_of(spec, case)
    task = task.packing() if packs else task
    return kind.build(Job(layout, spec, task, case.deepspeed(), 5, machine, undecayed, values_seed))


def collated(task: Any, samples: list[dict[str, np.ndarray]]) -> dict[str, torch.Tensor]:
    return {name: value.to(device_here()) for name, value in task.collate(samples).items()}


def train_by_engine(case: Case, path: str | None = None) -> Outcome:
    """Train the case by its engine. Runs on each rank of a pool."""
    import torch.distributed as dist

    from trainer.optim.lr_schedules import Update

    allow_float16(case)
    rank = dist.get_rank()
    engine = build(case, rank, path)
    task = task_of(spec_in(case, path), case)
    outcome = Outcome([], [], [], {})
    for step in range(STEPS):
        gradients: dict[str, torch.Tensor] = {}
        batches = [collated(task, share) for share in shares(case, step, data_rank_of(case, rank))]
        metrics = engine.step(
            step,
            batches,
            Update(1e-2),
            lambda name, g, into=gradients: into.update({name: g.clone().cpu()}),
        )
        outcome.losses.append(float(metrics.loss()))
        outcome.norms.append(float(metrics.gradient_norm))
        outcome.gradients.append(gradients)
    (loss_sum, right), targets = engine.evaluate(
        [collated(task, s) for s in shares(case, 99, data_rank_of(case, rank))]
    )
    outcome.evaluation, outcome.right = float(loss_sum / targets), int(right)
    outcome.weights = whole_weights(engine, case)
    engine.close()
    return outcome


def resume_by_engine(
    before: Case, after: Case, folder: Path
) -> tuple[list[list[float]], list[dict[str, torch.Tensor]]]:
    """Two steps, a checkpoint, a new engine, two more steps; and beside it the same four without a
    pause.

    Returns the losses of the last two steps of [resumed, uninterrupted], and the final weights of
    both. Runs on each rank of a pool. `after` is the layout that resumes, in both.
    """
    import torch.distributed as dist

    from trainer import checkpoint
    from trainer.distributed.ranks import Ranks
    from trainer.optim.lr_schedules import Update
    from trainer.state import RunState

    rank = dist.get_rank()
    ranks = Ranks(rank, before.world_size)
    allow_float16(before)
    task = task_of(spec_in(before), before)

    def steps(engine: Any, case: Case, first: int) -> list[float]:
        batches = [
            [collated(task, share) for share in shares(case, step, data_rank_of(case, rank))]
            for step in (first, first + 1)
        ]
        metrics = [engine.step(first + i, batch, Update(1e-2)) for i, batch in enumerate(batches)]
        return [float(m.loss()) for m in metrics]

    engine = build(before, rank)
    steps(engine, before, 0)
    state = RunState(step=2, samples=2 * TRAIN_BATCH, engine=engine.scalars())
    path = checkpoint.save(
        folder, state, engine.state_tensors(), {}, checkpoint.ModelFolder(), ranks
    )
    whole = steps(engine, before, 2)
    whole_end = whole_weights(engine, before)
    engine.close()

    engine = build(
        after, rank, values_seed=77
    )  # other initial values: all that counts comes from the checkpoint
    engine.restore(checkpoint.read_description(path)["position"]["engine"])
    assert checkpoint.load(path, engine.state_tensors(), ranks) == state
    resumed = steps(engine, after, 2)
    resumed_end = whole_weights(engine, after)
    engine.close()
    return [resumed, whole], [resumed_end, whole_end]


def allow_float16(case: Case) -> None:
    if case.precision == "float16":
        from deepspeed.accelerator import get_accelerator

        # DeepSpeed allows float16 only on processors that are fast at it; PyTorch computes it on
        # all
        type(get_accelerator()).is_fp16_supported = lambda self: True


def whole_weights(engine: Any, case: Case) -> dict[str, torch.Tensor]:
    """Return every weight, on every rank."""
    import torch.distributed as dist

    from trainer.distributed.ranks import Ranks

    ranks = Ranks(dist.get_rank(), case.world_size) if case.world_size > 1 else Ranks()
    wanted = "master" if case.precision != "float32" and case.engine == "deepspeed" else "weight"
    entries = [entry for entry in engine.state_tensors() if entry.key == wanted]
    return {entry.name: entry.read(ranks).float() for entry in entries}


def train_plainly(case: Case, path: str | None = None, seed: int = 5) -> Outcome:
    """Train with Hugging Face's forward, PyTorch's loss and AdamW, and our order of seeds."""
    from trainer.certify.one_process.optimizers import matrices_of
    from trainer.distributed.seeding import step_seed
    from trainer.models.materialise import materialise
    from trainer.parallel.forward_backward import Dropout

    spec = spec_in(case, path)
    model = spec.build()
    materialise(model, spec, seed=seed)
    dropout = Dropout(model, spec)
    optimizer = plain_optimizer(case, model, matrices_of(model, spec.blocks))
    outcome = Outcome([], [], [], {})
    task = task_of(spec)
    lengths: list[int] = []

    def noisy(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        """NEFTune, as algorithm 1 of arXiv 2310.05914 has it, row by row."""
        if not module.training:
            return output
        draws = torch.empty(output.shape).uniform_(-1, 1)
        rows = zip(output, draws, lengths, strict=True)
        return torch.stack(
            [row + case.neftune_alpha / (n * row.shape[-1]) ** 0.5 * draw for row, draw, n in rows]
        )

    if case.neftune_alpha:
        model.get_input_embeddings().register_forward_hook(noisy)
    balance = balancing(model, case.router_bias_rate, lengths)

    def summed(step: int, train: bool) -> tuple[torch.Tensor, int, int]:
        counted = sum(int((s["targets"] != -100).sum()) for s in samples(step))
        total, right = torch.zeros(()), 0
        for data_rank in range(case.data_ranks):
            parts = shares(case, step, data_rank)
            batches = [task.collate(share) for share in parts]
            # what dropout draws depends on the width; and a pipeline gives all one shape
            if (train and spec.training.draws) or case.pipeline > 1:
                batches = task.padded(batches)
            for index, batch in enumerate(batches):
                dropout.start(step_seed(seed, step, data_rank), index)
                targets, lengths[:] = (
                    batch["targets"],
                    [len(sample["input_ids"]) for sample in parts[index]],
                )
                if (
                    spec.language.own_loss
                ):  # a micro-batch's share: its own loss times its number of targets
                    own = model(input_ids=batch["input_ids"], labels=targets, shift_labels=targets)
                    logits = own.logits
                    loss = (
                        own.loss * (targets != -100).sum()
                        if bool((targets != -100).any())
                        else torch.zeros(())
                    )
                else:
                    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
                    loss = F.cross_entropy(
                        logits.flatten(0, 1),
                        targets.flatten(),
                        reduction="sum",
                        ignore_index=-100,
                        label_smoothing=case.label_smoothing if train else 0.0,
                    )
                total += loss.detach()
                right += int((logits.argmax(-1) == targets).sum())
                if train and loss.requires_grad:
                    (loss / counted).backward()
        return total, counted, right

    model.train()
    for step in range(STEPS):
        total, counted, _ = summed(step, train=True)
        outcome.losses.append(float(total / counted))
        outcome.gradients.append(
            {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        )
        outcome.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)))
        optimizer.step()
        optimizer.zero_grad()
        balance()
    model.eval()
    with torch.no_grad():
        total, counted, outcome.right = summed(99, train=False)
    outcome.evaluation = float(total / counted)
    own = dict(model.named_parameters()) | router_biases(model)
    outcome.weights = {name: tensor.detach().clone() for name, tensor in own.items()}
    return outcome


def router_biases(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return what transformers' routers add to scores to choose experts, by name."""
    named = re.compile(r"(e_score_correction|\.expert)_bias$")
    return {name: tensor for name, tensor in model.state_dict().items() if named.search(name)}


def balancing(model: torch.nn.Module, rate: float, lengths: list[int]) -> Callable[[], None]:
    """Count the tokens of rows of these `lengths` in training; return what moves biases by them.

    Algorithm 1 of arXiv 2408.15664.
    """
    loads: dict[str, torch.Tensor] = {}

    def count(name: str) -> Any:
        def hook(module: torch.nn.Module, inputs: Any) -> None:
            chosen, parts = inputs[1], []
            for row, length in zip(chosen.chunk(len(lengths)), lengths, strict=True):
                parts.append(row[:length].flatten())
            if module.training:
                loads[name] = loads[name] + torch.bincount(torch.cat(parts), minlength=size[name])

        return hook

    biases = router_biases(model) if rate else {}
    size = {name: bias.numel() for name, bias in biases.items()}
    for name in biases:
        layer = re.match(r".*?\.\d+\.\w+", name)
        assert layer is not None
        model.get_submodule(f"{layer[0]}.experts").register_forward_pre_hook(count(name))

    def move() -> None:
        for name, bias in biases.items():
            error = loads[name].double().mean() - loads[name]
            bias += rate * error.sign().view_as(bias).float()
        start()

    def start() -> None:
        loads.update({name: torch.zeros(n, dtype=torch.int64) for name, n in size.items()})

    start()
    return move


def plain_optimizer(
    case: Case, model: torch.nn.Module, matrices: Any = ()
) -> torch.optim.Optimizer:
    """Build PyTorch's optimizer, which decays what Hugging Face's Trainer decays, or all.

    Muon updates `matrices`.
    """
    from transformers import Trainer

    params = {
        name: value
        for name, value in case.optimizer["params"].items()
        if name not in DEEPSPEED_ONLY
    }
    decoupled = case.optimizer["type"] == "Adam" and case.optimizer["params"].get(
        "adam_w_mode", True
    )
    if case.optimizer["type"] == "Lion":
        from deepspeed.ops.lion import DeepSpeedCPULion as kind
    elif not case.optimizer["params"].get("bias_correction", True):
        from deepspeed.ops.adam import DeepSpeedCPUAdam as kind

        params["bias_correction"] = False
    elif case.optimizer["type"] == "Muon":
        kind = None
    else:
        kind = torch.optim.AdamW if decoupled else getattr(torch.optim, case.optimizer["type"])
    decayed = Trainer.get_decay_parameter_names(None, model)
    if case.weight_decay_excludes == "nothing":
        decayed = [name for name, _ in model.named_parameters()]
    groups = []
    for name, parameter in model.named_parameters():
        own = next(
            (
                g
                for g in case.groups
                if any(fnmatch(name, pattern) for pattern in as_list(g["names"]))
            ),
            {},
        )
        decay = own.get("weight_decay", None if name in decayed else 0.0)
        groups.append({"params": [parameter], "lr": params["lr"] * own.get("lr_multiplier", 1)})
        groups[-1] |= {} if decay is None else {"weight_decay": decay}
        if kind is None:
            groups[-1] |= {"muon": name in matrices, "lr_multiplier": 1}
    if kind is None:
        from trainer.certify.one_process.optimizers import MuonOfTorch

        made = MuonOfTorch(groups, **params)
        for group in made.param_groups:
            group["lr"] *= group["lr_multiplier"]
        return made
    return kind(groups, **params)


def as_list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def assert_same(ours: Outcome, reference: Outcome, tolerance: float) -> None:
    """Assert equal losses, norms, gradients and weights, relative to a tensor's largest entry."""
    pairs = zip(ours.gradients, reference.gradients, strict=True)
    differing = [
        line
        for step, (mine, theirs) in enumerate(pairs)
        for line in _differences(mine, theirs, tolerance * 20, f"gradient of step {step}")
    ]
    differing += _differences(ours.weights, reference.weights, tolerance * 20, "weight")
    message = lambda text: "\n".join([text, *differing[:40]])  # noqa: E731
    for mine, theirs, own in (
        (ours.losses, reference.losses, tolerance),
        (ours.norms, reference.norms, tolerance * 5),
        (ours.evaluation, reference.evaluation, tolerance),
    ):
        torch.testing.assert_close(mine, theirs, rtol=own, atol=0, msg=message)
    assert ours.right == reference.right
    assert not differing, message("")


def assert_near(ours: Outcome, reference: Outcome) -> None:
    """Assert what low precision keeps: wrong scaling shows, rounding does not."""
    torch.testing.assert_close(ours.losses, reference.losses, rtol=0.02, atol=0)
    torch.testing.assert_close(ours.norms, reference.norms, rtol=0.05, atol=0)
    for mine, theirs in (
        (ours.gradients[0], reference.gradients[0]),
        (ours.weights, reference.weights),
    ):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            error = (mine[name].reshape(value.shape) - value).norm() / value.norm()
            assert error < 0.05, f"{name}: {float(error):.3f}"


def _differences(
    mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float, what: str
) -> list[str]:
    """Return a line for each tensor that differs."""
    assert mine.keys() == theirs.keys()
    layers: dict[str, torch.Tensor] = {}
    for name, value in theirs.items():
        layers[_layer(name)] = torch.maximum(
            layers.get(_layer(name), torch.zeros(())), value.abs().max()
        )
    results = []
    for name, value in theirs.items():
        scale, layer = value.abs().max(), layers[_layer(name)]
        # what is zero by symmetry, such as the gradient of a key's bias, is rounding alone
        scale = layer if scale < 1e-5 * layer else scale
        error = (mine[name].reshape(value.shape) - value).abs().max() / scale.clamp_min(1e-12)
        if not error <= tolerance:
            results.append(f"{what} of {name}: relative error {float(error):.2e} > {tolerance:.0e}")
    return results


def _layer(name: str) -> str:
    return re.split(r"(?<=\.\d)\.|(?<=\.\d\d)\.", name)[0]
