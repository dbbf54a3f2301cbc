"""What a rung costs, measured from outside: Python imports this in each process that has the folder on its PYTHONPATH.

`climb.py` puts it there, and no script knows of it, however it starts its ranks. The first optimizer of a process that
makes four updates is measured; what comes later (the one-device run that a script compares with) is not. A process
writes one file `PID.json` into $LADDER_MEASURE:

- parameters, gradients, optimizer: bytes of this rank after the backward pass; DeepSpeed's float32 masters are
  optimizer state
- activations: the peak of what one step allocates and frees again: what autograd keeps, what is computed again,
  gathered parameters, buffers
- communicated: bytes handed to each collective in one step: the whole of what is reduced, gathered or scattered
- seconds: from update to update, those around the profiled step left out; cpu_seconds: what this process worked in
  them, which another program on the machine changes little
"""

import gc
import json
import os
import sys
import tempfile
import time
from collections import Counter
from importlib import import_module
from pathlib import Path

PROFILED, CLEAR = 2, 5  # the update from which a step is profiled, and the first after whose start times count again


class Measurement:
    def __init__(self, torch, folder):
        self.torch, self.folder, self.begun = torch, Path(folder), time.time()
        self.updates, self.times, self.fresh, self.measured, self.result = Counter(), {}, False, None, None
        self.gradients = 0
        backward = torch.autograd.backward

        def marked(*positional, **named):
            backward(*positional, **named)
            self.fresh = True
            if self.measured is not None and self.result is None:
                self.gradients = max(self.gradients, self.count(self.measured)["gradients"])

        torch.autograd.backward = marked
        import_module("torch.optim.optimizer").register_optimizer_step_pre_hook(self.before_update)

    def before_update(self, optimizer, positional, named):
        if not self.fresh or (self.measured is not None and optimizer is not self.measured):
            return  # DeepSpeed updates one group at a time; and only the first optimizer is measured
        self.fresh = False
        number = self.updates[id(optimizer)]
        self.updates[id(optimizer)] += 1
        if number == PROFILED:
            self.measured = optimizer
            activity = [self.torch.profiler.ProfilerActivity.CPU]
            if self.torch.cuda.is_available():
                activity.append(self.torch.profiler.ProfilerActivity.CUDA)
            self.profile = self.torch.profiler.profile(activities=activity, record_shapes=True, profile_memory=True)
            self.profile.start()
        elif number == PROFILED + 1:
            self.profile.stop()
            held = self.count(optimizer)
            held["gradients"] = max(held["gradients"], self.gradients)
            with tempfile.TemporaryDirectory() as folder:
                self.profile.export_chrome_trace(f"{folder}/trace.json")
                events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
            ranks = int(os.environ.get("WORLD_SIZE", 1))
            self.result = held | {"activations": transient(events), "communicated": communicated(events, ranks)}
        self.times.setdefault(id(optimizer), []).append((time.perf_counter(), time.process_time()))
        if self.result:
            self.write(self.times[id(optimizer)])

    def write(self, times):
        spans = [(end[0] - begin[0], end[1] - begin[1]) for begin, end in zip(times, times[1:], strict=False)]
        counted = spans[1:PROFILED] + spans[CLEAR - 1 :]
        rank = {"rank": int(os.environ.get("RANK", -1)), "begun": self.begun}
        rank |= {"seconds": [wall for wall, _ in counted], "cpu_seconds": [busy for _, busy in counted]}
        (self.folder / f"{os.getpid()}.json").write_text(json.dumps(self.result | rank))

    def count(self, optimizer):
        """Bytes of this rank's parameters, gradients and optimizer state."""
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        state = [value for entry in optimizer.state.values() for value in entry.values()]
        names = ("DeepSpeedEngine", "PipelineEngine")
        engines = [item for item in gc.get_objects() if type(item).__name__ in names]
        engine = next((item for item in engines if hasattr(item, "module") and hasattr(item, "optimizer")), None)
        if engine is None:
            weights, gradients = own, [parameter.grad for parameter in own]
        else:
            given, wrapper = list(engine.module.parameters()), engine.optimizer
            weights = [getattr(parameter, "ds_tensor", parameter) for parameter in given]
            state += own + list(getattr(wrapper, "single_partition_of_fp32_groups", ()))
            state += list(getattr(wrapper, "fp32_partitioned_groups_flat", ()))
            gradients = [parameter.grad for parameter in given + own]
            averaged = getattr(wrapper, "averaged_gradients", {})
            gradients += [tensor for tensors in averaged.values() for tensor in tensors or ()]
            gradients.append(getattr(wrapper, "grad_partitions_flat_buffer", None))
        parameters = self.bytes(weights)
        return {
            "parameters": sum(parameters.values()),
            "gradients": sum(self.bytes(gradients).values()),
            "optimizer": sum(size for place, size in self.bytes(state).items() if place not in parameters),
        }

    def bytes(self, tensors):
        """Of each storage, by its address."""
        locals_ = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
        storages = [x.untyped_storage() for x in locals_ if isinstance(x, self.torch.Tensor) and x.numel()]
        return {storage.data_ptr(): storage.nbytes() for storage in storages}


def transient(events):
    """The peak, in bytes, of what is allocated and freed again; on the GPU where there is one."""
    memory = [event for event in events if event["name"] == "[memory]"]
    device = max((event["args"]["Device Type"] for event in memory), default=0)
    memory = sorted((event for event in memory if event["args"]["Device Type"] == device), key=lambda e: e["ts"])
    open_, moves = {}, []
    for index, event in enumerate(memory):
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        if size > 0:
            open_[address] = (index, size)
        elif address in open_:
            begin, size = open_.pop(address)
            moves += [(begin, size), (index, -size)]
    total = peak = 0
    for _, size in sorted(moves):
        total += size
        peak = max(peak, total)
    return peak


SIZES = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "int": 4, "unsigned char": 1}
BASES = {"c10d::_allgather_base_": "all_gather", "c10d::_reduce_scatter_base_": "reduce_scatter"}


def communicated(events, ranks):
    """Bytes by collective. gloo has no reduce-scatter of its own: what it makes an all-reduce of is what was asked."""

    def size(event, operand):
        number = 1
        for dimension in event["args"]["Input Dims"][operand]:
            number *= dimension
        return number * SIZES.get(event["args"]["Input type"][operand], 4)

    asked, below = Counter(), Counter()
    for event in events:
        if event["name"] in BASES:
            part, whole = sorted((size(event, 0), size(event, 1)))
            asked[BASES[event["name"]]] += whole
            gathered = "gather" in event["name"]
            below["all_gather" if gathered else "all_reduce"] += part if gathered else whole
    found = Counter()
    for event in events:
        backend, _, name = event["name"].partition(":")
        if backend in ("gloo", "nccl") and event.get("args", {}).get("Input Dims") and name not in ("recv", "barrier"):
            found[name] += size(event, 0)
    for name, number in below.items():
        found[name] -= min(number, found[name])
    found["all_gather"] *= ranks
    return {name: number for name, number in (asked + found).items() if number}


def is_a_rung():
    words = " ".join(sys.orig_argv)
    return "multiprocessing-fork" in words or "/ladder/" in words or "trainer.command" in words


if os.environ.get("LADDER_MEASURE") and is_a_rung():
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    import torch

    Measurement(torch, os.environ["LADDER_MEASURE"])
