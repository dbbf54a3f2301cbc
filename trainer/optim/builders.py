"""The class and arguments by which each engine builds a config's optimizer, or why it can't.

Facts of DeepSpeed 0.19.8 (`_configure_basic_optimizer` and `_do_optimizer_sanity_check` of
runtime/engine.py) and of PyTorch 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from trainer.layout import Layout
from trainer.plugins import NAMED
from trainer.storage import Json


@dataclass(frozen=True)
class Builder:
    """The class and the arguments by which an optimizer is built."""

    library: str
    """The class, by its public name."""
    params: Json
    """The arguments besides the parameters to train."""
    notes: tuple[str, ...] = ()
    """Notes on parameters of the config that have no effect here, a line each."""
    build: Callable[..., Optimizer] | None = None
    """Makes the optimizer of parameter groups and the arguments, in place of the class."""


class No(str):
    """The reason why an optimizer is not built, as a sentence."""


@dataclass(frozen=True)
class Lack:
    """A parameter in the config's table that a class does not take."""

    why: str
    harmless: object = None
    """The value that has no effect, besides null; others are refused, or noted."""
    refused: bool = True


@dataclass(frozen=True)
class Classes:
    """The classes that the engines use for one optimizer, or the reasons why there is none."""

    torch: str
    """The class in the engines `mesh` and `accelerate`."""
    deepspeed: str
    offloaded: str
    """The class in `deepspeed` if `offload_optimizer` keeps the state on the host."""


_CLIPS = "under ZeRO DeepSpeed clips Muon's orthogonalised update in place of the gradient"
_CLIPS_MUON = f"{_CLIPS}, and one learning-rate schedule is set for both of its halves"
_SHAPES = "it scales rates by base shapes of each model"
_MUP = f"{_SHAPES}, which the package mup needs and a JSON can't give"
_LAMB = (
    "Lamb takes its trust ratio from each whole tensor, of which a rank has but a part under ZeRO; "
    "without ZeRO DeepSpeed's kernel is for GPUs, and not proven here"
)
_HAS_LION = "the deepspeed engine runs DeepSpeed's on GPUs, and on a CPU with offload_optimizer"
_LION = No(f"PyTorch has no Lion; {_HAS_LION}")
MUON = "trainer.optim.muon.Muon"
_CPU_ADAM = "deepspeed.ops.adam.DeepSpeedCPUAdam"
_PASSED = ("SGD", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta")
"""Optimizers of PyTorch that DeepSpeed passes through."""

ROWS: dict[str, Classes] = {
    "AdamW": Classes("torch.optim.AdamW", "torch.optim.AdamW", _CPU_ADAM),
    "Adam": Classes("torch.optim.Adam", "torch.optim.Adam", _CPU_ADAM),
    "Adagrad": Classes(
        "torch.optim.Adagrad", "torch.optim.Adagrad", "deepspeed.ops.adagrad.DeepSpeedCPUAdagrad"
    ),
    **{name: Classes(*[f"torch.optim.{name}"] * 3) for name in _PASSED},
    "Lion": Classes(_LION, "deepspeed.ops.lion.FusedLion", "deepspeed.ops.lion.DeepSpeedCPULion"),
    "Lamb": Classes(*[No(_LAMB)] * 3),
    "Muon": Classes(MUON, No(_CLIPS_MUON), No(_CLIPS_MUON)),
    **{name: Classes(*[No(_MUP)] * 3) for name in ("MuAdam", "MuAdamW", "MuSGD")},
}

_OTHER = "; the mesh engine has PyTorch's own"
_KERNEL = Lack("DeepSpeed's kernel is one of its own", refused=False)
_FLOAT32 = Lack("its state has the precision of what it updates", True, refused=False)
_AMSGRAD = Lack("DeepSpeed's kernel has no AMSGrad; torch_adam true has PyTorch's", False)
_TORCH_ADAM = {
    "bias_correction": Lack(
        "PyTorch's Adam always corrects its bias; the deepspeed engine without torch_adam need not",
        True,
    ),
    "fp32_optimizer_states": _FLOAT32,
}
LACKS: dict[str, dict[str, Lack]] = {
    "torch.optim.AdamW": _TORCH_ADAM,
    "torch.optim.Adam": _TORCH_ADAM,
    "deepspeed.ops.adam.FusedAdam": {
        "amsgrad": _AMSGRAD,
        "foreach": _KERNEL,
        "fp32_optimizer_states": _FLOAT32,
    },
    _CPU_ADAM: {"amsgrad": _AMSGRAD, "foreach": _KERNEL},
    "torch.optim.SGD": {
        "fused": Lack(
            "the engine may skip a step, and a fused first step with dampening, or DeepSpeed's, "
            "would leave the momentum undefined",
            False,
            refused=False,
        )
    },
    "torch.optim.Adagrad": {"fp32_optimizer_states": _FLOAT32},
    MUON: {
        **_TORCH_ADAM,
        "adam_w_mode": Lack("Muon and its AdamW both decay weights apart from gradients", True),
        "ns_method": Lack(
            "PyTorch's iteration is the standard one, equal but for rounding", refused=False
        ),
    },
    "deepspeed.ops.adagrad.DeepSpeedCPUAdagrad": {
        "foreach": _KERNEL,
        "maximize": Lack(f"DeepSpeedCPUAdagrad only minimises{_OTHER}", False),
        "lr_decay": Lack(f"DeepSpeedCPUAdagrad has no decay of its rate{_OTHER}", 0),
        "initial_accumulator_value": Lack(f"DeepSpeedCPUAdagrad starts at 0{_OTHER}", 0),
    },
    "deepspeed.ops.lion.FusedLion": {"fp32_optimizer_states": _FLOAT32},
}
"""Parameters in the config's table that a class does not take, by class; it takes all others."""


def in_torch(settings: Json, layout: Layout, device: str, grouped: bool) -> Builder | No:
    """Return the builder of `mesh` and `accelerate`, or why they can't build the optimizer."""
    kind = settings["optimizer"]["type"]
    params = settings["optimizer"]["params"]
    if build := NAMED["optimizer"].get(kind):
        return Builder(kind, params, build=build)
    library = ROWS[kind].torch
    if isinstance(library, No):
        return library
    kernel = library == "torch.optim.SGD" and not params.get("dampening")
    kernel |= library == "torch.optim.Adagrad" and (device == "cpu" or torch.__version__ >= "2.15")
    return _recipe(_adam(library, params), params, kernel)


def in_deepspeed(settings: Json, layout: Layout, device: str, grouped: bool) -> Builder | No:
    """Return DeepSpeed's builder for a config's optimizer on a device, or why it can't build it.

    `grouped`: True if parameters have different learning rates or weight decays.
    """
    kind = settings["optimizer"]["type"]
    params = settings["optimizer"]["params"]
    if kind in NAMED["optimizer"]:
        return No("DeepSpeed builds its own, and not those of plug-ins and scripts")
    offloaded = layout.offload_optimizer != "none"
    library = ROWS[kind].offloaded if offloaded else ROWS[kind].deepspeed
    if isinstance(library, No):
        return library
    if offloaded and kind in ("Adam", "AdamW") and params.get("torch_adam"):
        library = ROWS[kind].deepspeed
    corrects = params.get("bias_correction", True)
    if kind in ("Adam", "AdamW") and not (offloaded or corrects or params.get("torch_adam")):
        library = "deepspeed.ops.adam.FusedAdam"
    if library == "deepspeed.ops.lion.FusedLion" and device != "cuda":
        on_host = "on a CPU offload_optimizer brings its DeepSpeedCPULion"
        return No(f"DeepSpeed's FusedLion is for GPUs; {on_host}")
    sharded = layout.zero_stage > 0 or layout.precision != "float32"
    untested = kind in _PASSED and layout.zero_stage > 0
    if untested and not settings.get("zero_allow_untested_optimizer"):
        key = '"zero_allow_untested_optimizer": true; the mesh engine runs it without'
        return No(f"DeepSpeed takes {kind} under ZeRO only with {key}")
    if library == "torch.optim.Adagrad" and sharded and grouped:
        anew = (
            "DeepSpeed builds Adagrad again with one weight decay and one rate for all parameters"
        )
        hint = 'set trainer.weight_decay_excludes to "nothing", without trainer.parameter_groups'
        return No(f"under ZeRO {anew}; {hint}, or use the mesh engine")
    float32 = settings.get("data_types", {}).get("grad_accum_dtype") == "fp32"
    bfloat16 = layout.precision == "bfloat16" and layout.zero_stage <= 1
    if library == "torch.optim.Adagrad" and float32 and bfloat16:
        optimizer = "DeepSpeed's optimizer of bfloat16 with float32 gradients"
        return No(f"{optimizer} leaves out Adagrad's first state; use ZeRO-2")
    offload = settings.get("zero_optimization", {}).get("offload_optimizer") or {}
    if device == "cuda" and offload.get("ratio", 1) < 1:
        steps = "DeepSpeed steps what stays on the GPU by an AdamW that no learning-rate schedule"
        return No(f"below an offload_optimizer.ratio of 1 {steps} reaches; set it to 1")
    return _recipe(_adam(library, params), params)


def _adam(library: str, params: Mapping[str, object]) -> str:
    """Return AdamW's class for "Adam" unless `adam_w_mode` is false, as DeepSpeed does."""
    decoupled = library == "torch.optim.Adam" and params.get("adam_w_mode", True)
    return "torch.optim.AdamW" if decoupled else library


def _recipe(library: str, params: Mapping[str, object], kernel: bool = False) -> Builder | No:
    """Build a builder from those of `params` that `library` takes and that don't choose it.

    `kernel`: True if there is a fused kernel besides Adam's.
    """
    choices = ("adam_w_mode", "torch_adam")
    taken = {name: value for name, value in params.items() if name not in choices}
    notes = []
    for name, lack in LACKS.get(library, {}).items():
        value = params.get(name)
        if name == "fused" and kernel:
            continue
        taken.pop(name, None)
        if value is None or value == lack.harmless:
            continue
        if lack.refused:
            return No(f"optimizer.params.{name}: {lack.why}")
        notes.append(f"optimizer.params.{name} has no effect here: {lack.why}")
    if library in ("torch.optim.AdamW", "torch.optim.Adam", MUON):
        kernel = True
        if params.get("torch_adam") is False:
            reason = "PyTorch's kernel makes the same update"
            notes.append(f"optimizer.params.torch_adam has no effect here: {reason}")
    if kernel and taken.get("fused") is None:
        taken["fused"] = not taken.get("foreach")
    return Builder(library, taken, tuple(notes))
