"""Every causal decoder family of transformers, made small and certified.

    python -m tests.support.conformance.sweep [LAYOUT...] [FAMILY...]

Writes table.json beside this file and docs/families.md, of all families or with the rows of those
that are named; of the families that are known, the columns of the layouts that are named alone.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support.commands import ROOT
from tests.support.pool import Pool, machine_here
from tests.support.whole_table import TITLE

TABLE = Path(__file__).with_name("table.json")
PAGE = ROOT / "docs" / "families.md"
LAYOUTS: dict[str, dict[str, Any]] = {
    "ZeRO-3": {"zero_optimization": {"stage": 3}},
    "pipeline": {"pipeline": {"stages": 2}, "gradient_accumulation_steps": 2},
    "tensor": {"tensor_parallel": {"autotp_size": 2}},
    "context": {"sequence_parallel_size": 2},
    "experts": {
        "zero_optimization": {"stage": 3},
        "expert_parallel": {"enabled": True, "autoep_size": 2},
    },
}
NEWER = (
    "The tensor column is of transformers 5.24, but for 45 that passed before plans by shape.",
    "",
)
"""What the table does not say."""
# what the default config of a family's class lacks, so that it can be built and run
NEEDED: dict[str, dict[str, Any]] = {
    "big_bird": {"is_decoder": True, "attention_type": "original_full"},
    "deepseek_v2": {"num_experts_per_tok": 6, "moe_intermediate_size": 1408},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0}
            for kind in ("full_attention", "sliding_attention")
        }
    },
    "dbrx": {"attn_config": {"rope_theta": 500000.0, "kv_n_heads": 8, "clip_qkv": 8.0}},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 8, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "xmod": {"default_language": "en_XX", "is_decoder": True},
    **{
        family: {"is_decoder": True}
        for family in ("bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie")
        + (
            "megatron-bert",
            "rembert",
            "roberta",
            "roberta-prelayernorm",
            "roc_bert",
            "roformer",
            "xlm-roberta",
        )
        + ("xlm-roberta-xl", "reformer")
    },
}
LEFT_OUT: dict[str, str] = {}
"""Families that fail, and are left out of the table until they are repaired."""


def families() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def config_of(family: str, layout: str) -> dict[str, Any]:
    """The default config of the family's class, under a layout on two ranks."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
        "trainer": {
            "engine": "mesh",
            "steps": 8,
            "data": {"sequence_length": 64},
            "model": {"config": {"model_type": family, **NEEDED.get(family, {})}},
        },
        **LAYOUTS[layout],
    }


def certified(path: str) -> str:
    """Return the verdict. Runs on each rank."""
    import transformers

    from trainer.certify.certificate import certify, table
    from trainer.certify.tiny_run import tiny_run
    from trainer.errors import MeshloomError
    from trainer.recipes.causal_lm import certificate as language_case

    transformers.logging.set_verbosity_error()
    language_case.PARAMETERS = 2_000_000  # smaller tables of tokens: some have 262,144 ids
    try:
        certificate = certify(tiny_run(path, [], 2), machine_here())
    except MeshloomError as error:
        return f"refused: {error}"
    return "pass" if certificate.passed else f"FAIL: {table(certificate).splitlines()[-1]}"


def verdict(pool: Pool, family: str, layout: str) -> str:
    """Return `pass`, `refused: REASON`, `FAIL: PLACE` or `CRASH: LAST LINE`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config_of(family, layout)))
        try:
            first, second = pool.run(certified, path=str(path), timeout=400)
        except AssertionError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            # the rank that failed says why; the other only that it waited
            causes = [line for line in lines if "Error" in line] or lines
            return f"CRASH: {causes[0]}"[:300]
    return next((one for one in (first, second) if one != "pass"), "pass").replace(folder, "")


def main(names: list[str]) -> int:
    known: dict[str, dict[str, str]] = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    pool, layouts = Pool(2), [name for name in names if name in LAYOUTS]
    for family in [name for name in names if name not in LAYOUTS] or families():
        start = time.monotonic()
        requested = layouts if layouts and family in known else LAYOUTS
        rows = {layout: verdict(pool, family, layout) for layout in requested}
        known[family] = known.get(family, {}) | rows
        print(f"{family:<26} {time.monotonic() - start:5.1f} s  {known[family]}", flush=True)
        TABLE.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    pool.close()
    _, title, rest = PAGE.read_text().partition(TITLE)
    PAGE.write_text(f"{page(known)}\n{title}{rest}")
    return 0


def page(table: dict[str, dict[str, str]]) -> str:
    """Return the page of families up to the table of bases, which `whole_table` makes."""
    counts = {name: sum(row.get(name) == "pass" for row in table.values()) for name in LAYOUTS}
    reasons: dict[str, int] = {}

    def cell(text: str) -> str:
        if text in ("pass", ""):
            return text
        kind, _, why = text.partition(": ")
        kind = {"refused": "unsupported"}.get(kind, kind)
        why = " ".join(why.split())
        return f"{kind} [{reasons.setdefault(shortened(why), len(reasons) + 1)}]"

    rows = [
        f"| {family} | {' | '.join(cell(row.get(layout, '')) for layout in LAYOUTS)} |"
        for family, row in sorted(table.items())
    ]
    tried = {name: sum(name in row for row in table.values()) for name in LAYOUTS}
    few = {name: f" of {tried[name]}" if tried[name] < len(table) else "" for name in LAYOUTS}
    summary = ", ".join(f"{layout} {count}{few[layout]}" for layout, count in counts.items())
    return "\n".join(
        [
            "# Families",
            "",
            "Families that transformers lists as causal language models, made small",
            (
                "from the default config of each class, and certified (`launch/verify.py`) on two "
                "processes"
            ),
            "under ZeRO-3, two stages of a pipeline, and two ranks that share matrices (tensor),",
            "sequences (context) or experts, by the engine `mesh`.",
            "Why a family is unsupported is at the bottom; the run says so before anything is trained, and",
            "what to do. With each of these keys at 1, every family whose ZeRO-3 passes can be trained.",
            "Made by `python -m tests.support.conformance.sweep`;",
            "`pytest --whole tests/conformance/families` compares.",
            "",
            *NEWER,
            f"Of the {len(table)} families of transformers 5.23 pass: {summary}.",
            *(f"Tried and not in the table: {family} ({why})." for family, why in LEFT_OUT.items()),
            "",
            f"| family | {' | '.join(LAYOUTS)} |",
            f"| --- |{' --- |' * len(LAYOUTS)}",
            *rows,
            "",
            *(f"{number}. {reason}" for reason, number in reasons.items()),
            "",
        ]
    )


def shortened(reason: str) -> str:
    """Return what was seen, without what differs between families that are refused alike."""
    import re
    import textwrap

    for own, common in ALIKE.items():
        reason = re.sub(own, common, reason)
    return textwrap.shorten(reason.split("; expected")[0].rstrip(":"), 200, placeholder=" ...")


ALIKE = {
    r"\b(trainer\.model|pipeline\.stages|tensor_parallel\.autotp_size|zero_optimization\.stage"
    r"|sequence_parallel_size|expert_parallel\.autoep_size): [\w-]+:? ?": "",
    r"(a part of a sequence differs by) .*": r"\1 more than rounding",
    r"^\w+Config is an encoder with a decoder": "it is an encoder with a decoder",
    r"^[\w.*]+ is to be split as '(\w+)'": r"a part of its blocks is to be split as '\1'",
    r"^[\w.*]+ (works on a part)": r"a parameter of its blocks \1",
    r"^[\w.*]+ (draws random numbers)": r"a part of its blocks \1",
    r"^(not causal): .*": r"\1: a token moves the logits of an earlier one",
    r"(a hidden state of shape) \[.*\], and.*": r"\1 other than [batch, sequence, width]",
    r"(cut into stages): (the stage of .*: )?AttributeError: .*": (
        r"\1: the model reads an attribute of its blocks"
    ),
    r", and [\w.]+ is one with [\w.]+": ", and its blocks share parameters",
}
"""Pattern of a reason's words -> those of all families that are refused alike; table.json has them
whole.
"""
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
