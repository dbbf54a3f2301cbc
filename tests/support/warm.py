"""Python processes that start in a tenth of a second: forked from one that has imported torch,
DeepSpeed and the rest.

`python` is a script that stands in for the interpreter: it hands its arguments, folder, environment
and terminal to the server, waits for the process that is forked for it, passes signals on, and ends
as that one ends. So the code under test starts its processes by `sys.executable` as ever, with
their own ids, exit codes and signals; only the seconds of importing are gone. Who measures the
start itself, or replaces modules, takes the real interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

PYTHON = Path(__file__).with_name("warm_python")
SOCKET = "MESHLOOM_TESTS_WARM"
"""The environment variable that names the server's socket."""
PRELOADED = [
    "torch._dynamo",
    "torch.distributed.run",
    "torch.utils.cpp_extension",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # which imports torch.compile's compiler
    "deepspeed.launcher.runner",
    "transformers.generation.utils",
    "transformers.models.llama.modeling_llama",
    "accelerate.commands.launch",
    "datasets",
    "trainer.run.run",
    "trainer.certify.worker",
]


def serve(path: str) -> dict[str, Any] | None:
    """Fork a process for each request, and return in it with the request. Ends with its parent."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    waiting: dict[int, socket.socket] = {}
    wake, poke = os.pipe()
    os.set_blocking(poke, False)
    signal.set_wakeup_fd(poke)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([listener, wake, sys.stdin, *waiting.values()], [], [])
        if sys.stdin in ready:  # closed: the tests are over
            for pid in waiting:
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        if wake in ready:
            os.read(wake, 4096)
            reap(waiting)
        for pid, connection in waiting.items():
            if connection in ready and not connection.recv(
                1
            ):  # the stand-in is gone: killed, since it waits for this
                os.kill(pid, signal.SIGKILL)
        if listener in ready:
            connection, _ = listener.accept()
            data, fds, _, _ = socket.recv_fds(connection, 1 << 20, 3)
            while not data.endswith(b"\n"):
                data += connection.recv(1 << 20)
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                for other in (listener, connection, *waiting.values()):
                    other.close()
                os.close(wake)
                os.close(poke)
                return {**json.loads(data), "fds": fds}
            for fd in fds:
                os.close(fd)
            with contextlib.suppress(OSError):
                connection.sendall(f"{pid}\n".encode())
            waiting[pid] = connection


def reap(waiting: dict[int, socket.socket]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (result := os.waitpid(-1, os.WNOHANG))[0]:
            connection = waiting.pop(result[0])
            with contextlib.suppress(OSError):
                connection.sendall(f"{os.waitstatus_to_exitcode(result[1])}\n".encode())
            connection.close()


def become(request: dict[str, Any]) -> None:
    """Make this process what the interpreter would have started, up to the script's first line."""
    os.setsid()
    for target, fd in enumerate(request["fds"]):
        os.dup2(fd, target)
        os.close(fd)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.executable = str(PYTHON)
    sys.orig_argv = [sys.executable, *request["arguments"]]
    import torch

    # after a fork PyTorch makes its pool of threads anew, and fails if two threads ask for it first
    torch.set_num_threads(1)


def go(arguments: list[str]) -> int:
    """Run what the interpreter was asked to run; returns its exit code."""
    try:
        run(arguments)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def leave(code: int) -> NoReturn:
    """End as the interpreter does, without taking all imports apart, which takes seconds."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(arguments: list[str]) -> None:
    while arguments[0] in ("-u", "-B"):
        arguments = arguments[1:]
    if arguments[0] == "-m":
        sys.argv, sys.path[0] = arguments[1:], os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *arguments[2:]], ""
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    for name in PRELOADED:
        import_module(name)
    import torch

    torch.set_num_threads(1)
    wanted = serve(sys.argv[1])
    assert wanted is not None
    become(wanted)
    leave(go(wanted["arguments"]))
