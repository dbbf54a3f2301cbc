"""The arms and the shapes of gpu.py: their seconds, their configs, and which of them run by default."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

LLAMA = {
    "model_type": "llama",
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
SHAPES: dict[str, dict[str, Any]] = {
    "1B": LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "tie_word_embeddings": True,
    },
    "8B": LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    "Qwen3-0.6B": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    # as wide as float8 wants
    "tiny": LLAMA
    | {
        "hidden_size": 1024,
        "intermediate_size": 1024,
        "num_hidden_layers": 2,
        "vocab_size": 128,
    },
}
"""Configs of transformers, without weights. 1B and, on several GPUs, 8B run by default."""
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
RATE = 1e-5
MICRO_BATCH = 2
"""Sequences of a micro-batch; an arm's own config may have another number."""
SEQUENCE = 8192
"""Tokens."""
RECOMPUTE = "selective"
RESULTS = Path(__file__).resolve().parent / "results" / "gpu_certificates.json"
"""The certificates of configs, by their digests (gpu_certificates.py)."""
PLANNING = 50
"""Seconds that the plans of all arms have, at once."""
PREDICTING = 400
"""Seconds in place of `PLANNING` where the longest sequence is searched by plans."""


@dataclass(frozen=True)
class Arm:
    seconds: int
    """After which it is stopped, with those that earlier arms left."""
    own: dict[str, object] = field(default_factory=dict)
    """Keys of the section `trainer`; without them it is none of our engines."""
    keys: dict[str, object] = field(default_factory=dict)
    """DeepSpeed's keys that it has in place of the config's."""
    memory: str = ""
    """The GPU, by the planner's name, to whose memory it is limited; empty: all there is."""
    adapter: bool = False
    """True if only an adapter is trained, on a folder of a base."""
    by_default: bool = True
    """False: it runs only if `--arms` names it."""


LORA = {"r": 16, "alpha": 32}
NF4 = {"type": "nf4", "double_quant": True}
PLAIN = {"engine": "mesh", "compile": "none"}
COMPILED = {"engine": "mesh", "compile": "blocks"}
LONGEST = PLAIN | {"adapter": LORA, "activation_checkpointing": "full"}
"""Uncompiled, as it is planned."""
ALONE = {"train_micro_batch_size_per_gpu": 1}
CEILINGS = "ceilings"
PROFILED = "mesh, compiled"
AGAIN = "mesh, compiled, again"
SAVING = "mesh, saving"
PEFT = "Trainer + PEFT"
ARMS = {
    CEILINGS: Arm(35),
    "mesh": Arm(45, PLAIN),
    PROFILED: Arm(75, COMPILED),
    "mesh, compiled, float8": Arm(65, COMPILED | {"float8": "tensorwise"}),
    "mesh, compiled, float8 with the head": Arm(
        65, COMPILED | {"float8": "tensorwise", "float8_head": True}, by_default=False
    ),
    "bare FSDP2": Arm(35, by_default=False),
    "bare FSDP2, compiled": Arm(50),
    "accelerate": Arm(35, {"engine": "accelerate", "compile": "none"}, by_default=False),
    "deepspeed": Arm(70, {"engine": "deepspeed"}),
    "Trainer": Arm(45),
    SAVING: Arm(115, PLAIN),
    "mesh, LoRA": Arm(130, COMPILED | {"adapter": LORA}, adapter=True, by_default=False),
    "mesh, QLoRA": Arm(
        150, COMPILED | {"adapter": LORA | {"quantize": NF4}}, adapter=True, by_default=False
    ),
    PEFT: Arm(240, adapter=True, by_default=False),
    **{
        f"longest in {size} GB": Arm(240, LONGEST, ALONE, device, adapter=True, by_default=False)
        for size, device in ((24, "l4-24gb"), (48, "l40s-48gb"), (80, "h100-80gb"))
    },
    AGAIN: Arm(50, COMPILED),
}
"""In the order in which they run: ceilings first, since all rows are shares of them, and the A/A
arm last, as far from the arm that it repeats as can be."""
USUAL = [name for name, arm in ARMS.items() if arm.by_default]


def in_order(arms: Sequence[str]) -> list[str]:
    """Return these arms in the order of `ARMS` if the ceilings are among them, or else as given."""
    return [arm for arm in ARMS if arm in arms] if CEILINGS in arms else [*arms]


def json_of(shape: str, count: int, smoke: bool, sequence: int = SEQUENCE) -> dict[str, Any]:
    """Return the config that all arms of a shape share, on `count` GPUs."""
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": not smoke},
        "zero_optimization": {"stage": 3 if count > 1 else 1},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": RATE, "weight_decay": 0.1, "torch_adam": smoke},
        },
        "trainer": {
            "model": {"config": SHAPES[shape]},
            "data": {"path": "random tokens", "sequence_length": 16 if smoke else sequence},
            "steps": 10,
            "activation_checkpointing": RECOMPUTE,
        },
    }


def own_json(arm: str, shared: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the config of an arm; a base that it names is written into `folder`.

    An adapter is one to a base: here a folder with its config alone.
    """
    own = {**shared["trainer"], **ARMS[arm].own}
    if ARMS[arm].adapter:
        base = folder / f"base of {arm}"
        base.mkdir()
        model = own["model"]["config"]
        described = {**model, "architectures": [ARCHITECTURES[model["model_type"]]]}
        (base / "config.json").write_text(json.dumps(described))
        own["model"] = {"name_or_path": str(base)}
    return {**shared, **ARMS[arm].keys, "trainer": own}


def digest_of(config: Mapping[str, Any]) -> str:
    """Return a digest of a config, wherever the folder of its base is."""
    model = config["trainer"]["model"]
    if "name_or_path" in model:
        path = Path(model["name_or_path"]) / "config.json"
        model = {"config": json.loads(path.read_text())}
    same = {**config, "trainer": {**config["trainer"], "model": model}}
    return hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()


def certified(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the certificate of a config, for its row; nothing if there is none."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    result = known.get(digest_of(config))
    if result is None:
        return {}
    verdict = "PASS" if result["passed"] else "FAIL"
    return {"certified": f"{verdict} at {result['commit']}"}


def missing(arm: str) -> str | None:
    """Return the reason why an arm can't run on this machine."""
    if "float8" in ARMS[arm].own and find_spec("torchao") is None:
        return "left out: torchao is not installed (pip install 'meshloom[float8]')"
    if arm in ("deepspeed", "Trainer") and find_spec("deepspeed") is None:
        return "left out: deepspeed is not installed (pip install 'meshloom[deepspeed]')"
    return None
