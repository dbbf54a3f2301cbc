"""Blocks and the loss by `torch.compile`: one graph for all blocks that are alike.

Where ranks divide a block's experts, the host reads how many tokens go to which rank: the graphs
are those of its parts without experts (attention, norms, the router, shared experts).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from traceback import FrameSummary
from typing import Any

import torch
from torch import nn

from trainer.errors import ConfigError, Problem, named_line
from trainer.layout import PIPELINE_SCHEDULES, Layout
from trainer.models.names import expert_stacks
from trainer.models.spec import ModelSpec
from trainer.parallel import patches
from trainer.supervise.process import Machine

BACKEND = "inductor"
TRIED = "aot_eager"
"""The compiler of a run; and that of a trial, which does all but make kernels."""
EARLY: dict[str, object] = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["raise_comms", "sink_waits"],
}
"""The compiler's options by which a graph begins a message as soon as it can, and waits for it
where its result is read: products that need it not are computed in between."""
LOG = logging.getLogger(__name__)
COLD_SECONDS = 600.0
"""The seconds that compiling one graph may take, and be no hang."""


def apply(
    model: nn.Module,
    spec: ModelSpec,
    *,
    blocks: bool = True,
    layout: Layout | None = None,
    trial: bool = False,
) -> None:
    """Compile the forward of each block as it stands, and the loss of a chunk of logits, in place.

    Parameters are inputs of a graph, so that equal blocks share it. Without `blocks`, the loss
    alone. `layout` tells if ranks exchange within blocks, and if matrices are split: these PyTorch
    2.15 compiles for fixed lengths alone. In a `trial`, errors of the compiler are raised.
    """
    patches.prepare_compiler()

    dynamic = False if layout and layout.tensor > 1 else None
    exchanges = layout is not None and layout.tensor * layout.context > 1
    backend = TRIED if trial else BACKEND
    options: Any = EARLY if exchanges and backend == "inductor" else None

    def compiled(function: Callable[..., object], of_tokens: int = 0) -> Callable[..., object]:
        graph = torch.compile(
            function, fullgraph=True, dynamic=dynamic, backend=backend, options=options
        )
        return graph if trial else _Compiled(function, graph, of_tokens)

    divided = layout is not None and layout.expert > 1
    stacks = expert_stacks(model, spec.blocks) if divided else []
    for name in spec.blocks if blocks else ():
        for part in without_experts(name, model.get_submodule(name), stacks):
            patches.replace_forward(part, compiled(part.forward))
    for module in model.modules():
        if (compute_chunks_by := getattr(module, "compute_chunks_by", None)) is not None:
            compute_chunks_by(compiled)


def without_experts(name: str, module: nn.Module, stacks: Sequence[str]) -> Iterator[nn.Module]:
    """Return the parts of a module, as large as can be, that have parameters and no experts.

    That is the module itself if it has none. `stacks`: the names of the modules of experts.
    """
    if name in stacks:
        return
    if not any(stack.startswith(f"{name}.") for stack in stacks):
        yield module
        return
    for own, child in module.named_children():
        if next(child.parameters(), None) is not None:
            yield from without_experts(f"{name}.{own}", child, stacks)


class _Compiled:
    """A compiled function, which runs uncompiled once the compiler has failed, with a note.

    A graph is whole or not made: nothing has been computed when the compiler fails. The first
    `of_tokens` arguments are tensors, and one graph serves any size of their first dimension.
    """

    def __init__(
        self, function: Callable[..., object], graph: Callable[..., object], of_tokens: int
    ) -> None:
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        self._function = function
        self._run = graph
        self._of_tokens = of_tokens
        self._errors = FailOnRecompileLimitHit, TorchDynamoException

    def __call__(self, *args: object, **kwargs: object) -> object:
        if self._run is not self._function:
            for tensor in args[: self._of_tokens]:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
            try:
                return self._run(*args, **kwargs)
            except self._errors as error:
                limit = isinstance(error, self._errors[0])
                reason = (
                    "more variants (shapes, modes) than it keeps" if limit else reason_of(error)
                )
                LOG.warning("torch.compile: a part runs uncompiled from here on: %s", reason)
                self._run = self._function
        return self._function(*args, **kwargs)


def refusal(layout: Layout) -> str | None:
    """Return the reason why the blocks of a layout can't be compiled, or None."""
    if layout.recompute.mode == "offload":
        key = "trainer.activation_checkpointing offload"
        moved = f"Blocks whose activations are moved to the host ({key})"
        return f"{moved} can't be compiled. Use full or selective."
    selective = layout.recompute.mode == "selective"
    if layout.expert > 1 and (layout.tensor > 1 or selective):
        key = "selective recomputation" if selective else "tensor parallelism"
        host = "how many tokens go to which rank's experts is read on the host"
        return f"With {key} a block is compiled as a whole, and {host} (expert_parallel)."
    if layout.pipeline > 1 and layout.schedule.splits_backward:
        block = "a compiled block computes all of its gradients at once"
        apart = f"{layout.schedule.name} computes gradients of weights apart, and {block}"
        other = PIPELINE_SCHEDULES["Interleaved1F1B"]
        waits = other.bubble(layout.accumulation, layout.pipeline)
        return f"{apart}. {other.name} is compiled; there a rank waits for {waits:.0%} of a step."
    return None


def check_compiler(layout: Layout, device: torch.device) -> None:
    """Raise ConfigError if blocks are to be compiled, and this machine can't compile."""
    if layout.compile == "blocks" and (actual := lacking(device)):
        expected = "a machine on which torch.compile works"
        hint = 'Install a C++ compiler such as g++, or set trainer.compile to "none".'
        raise ConfigError(Problem("trainer.compile", actual, expected, hint))


def lacking(device: torch.device) -> str | None:
    """Return the reason why `torch.compile` fails on a device, or None; found by trying."""
    try:
        torch.compile(lambda x: x.sin() + 1, backend=BACKEND)(torch.ones(8, device=device))
    except Exception as error:  # whatever the compiler lacks
        return f"torch.compile fails on this machine: {reason_of(error)}"
    return None


def reason_of(error: Exception) -> str:
    """Return the compiler's error on one line, with the last place outside PyTorch's own code."""
    stack: Sequence[FrameSummary] = getattr(error, "real_stack", None) or ()
    own = [f" ({f.filename}:{f.lineno})" for f in stack if torch.__path__[0] not in f.filename]
    return named_line(getattr(error, "inner_exception", error)) + "".join(own[-1:])


class Reports(logging.Handler):
    """Tells the watchdog that a graph is being compiled, and the user what runs uncompiled."""

    def __init__(self, machine: Machine) -> None:
        from torch._dynamo.callback import callback_handler

        super().__init__()
        self._machine = machine
        self._callbacks = callback_handler
        self._noted: set[str] = set()
        LOG.addHandler(self)
        self._callbacks.register_start_callback(self._start)
        self._callbacks.register_end_callback(self._end)

    def _start(self, _: object) -> None:
        self._machine.watch.moves(COLD_SECONDS)
        self._machine.signs.at("compiling")

    def _end(self, _: object) -> None:
        self._machine.watch.moves()
        self._machine.signs.hide()

    def emit(self, record: logging.LogRecord) -> None:
        if (text := record.getMessage()) not in self._noted:
            self._noted.add(text)
            self._machine.signs.note(text)

    def close(self) -> None:
        LOG.removeHandler(self)
        if self._start in self._callbacks.start_callbacks:  # torch.compiler.reset() removes them
            self._callbacks.remove_start_callback(self._start)
            self._callbacks.remove_end_callback(self._end)
        super().close()
