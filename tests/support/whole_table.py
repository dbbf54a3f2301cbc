"""What comes back of a base: the table of docs/families.md for the families of bases.py.

python -m tests.support.whole_table        # writes that section of docs/families.md again
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

from tests.support.bases import FAMILIES, write_base
from tests.support.commands import ROOT
from trainer.config.sections.adapter import AdapterSection
from trainer.config.sections.model_and_data import ModelSection
from trainer.distributed.ranks import ALONE
from trainer.errors import ConfigError
from trainer.models import huggingface
from trainer.models.door import object_in
from trainer.models.finetuning.lora import adapted
from trainer.models.language import model_config
from trainer.models.materialise import on_host
from trainer.models.names import in_short
from trainer.models.spec import ModelSpec
from trainer.parallel.checks import checked
from trainer.probes.question import ONE_PROCESS
from trainer.recipes.causal_lm.task import CausalLM

PAGE = ROOT / "docs" / "families.md"
TITLE = "## What comes back of a base"
HEAD = "| family | trained | no gradient from text | carried | dropped | packed | context | LoRA |"
TEXT = """
Tiny bases of these families, as transformers saves them, fine-tuned on text. `final/` has every
tensor of the base under the base's names ([fine-tuning](bases.md#a-base-comes-back-whole)).
*Trained* is the class that gets the gradients, and the class of the base if that is another.
Parameters without a *gradient from text* belong to that class, but no token reaches them: they
stay as they are, without moments or weight decay. *Carried* tensors have no place in it, and come
back byte for byte. Heads that predict later tokens (`mtp.*`, DeepSeek's last layer), which
transformers does not build, are carried as well. *Packed*, *context* and *LoRA*: a tiny copy
passes what a run asks before it keeps documents of a sample apart, before it divides sequences
over two ranks, and before it trains an adapter that PEFT opens on the class of the base; else
the run's reason against it. Made by `python -m tests.support.whole_table`;
`tests/models/test_whole.py` compares.
"""


def spec_of(family: str, folder: Path) -> ModelSpec:
    """Open a base of a family that is written to a folder."""
    section = ModelSection(name_or_path=str(write_base(folder, family)))
    return huggingface.spec_of(model_config.read_config(section), section)


def comes_back(family: str, folder: Path) -> str:
    """Return the beginning of a family's row: what comes back of a base."""
    spec = spec_of(family, folder)
    whole = spec.files.base
    assert whole is not None
    stated = object_in(folder / "config.json")["architectures"][0]
    kind = type(spec.build()).__name__
    trained = f"`{kind}`" if kind == stated else f"`{kind}` of `{stated}`"
    model = on_host(spec)
    ids = torch.arange(10, 22).reshape(2, 6)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    moved = {name for name, value in model.named_parameters() if value.grad is not None}
    unmoved = {name for name, _ in model.named_parameters()} - moved
    stored = load_file(folder / "model.safetensors").keys()
    back = whole.written
    carried = stored & {*whole.carried}
    cells = [
        _short(unmoved, moved),
        _short(carried, stored - carried),
        _short(stored - back, stored & back),
    ]
    return f"| {family} | {trained} | {' | '.join(cells)} |"


def runs(family: str, folder: Path) -> str:
    """Return the end of a family's row: how it can be trained."""
    spec = spec_of(family, folder)
    return f" {_packed(spec)} | {_in_parts(spec)} | {_adapted(spec)} |"


def _packed(spec: ModelSpec) -> str:
    return _answer(lambda: checked(spec, CausalLM.of(spec), ONE_PROCESS, ALONE, packed=True))


def _in_parts(spec: ModelSpec) -> str:
    layout = replace(ONE_PROCESS, shard=2, context=2)
    return _answer(lambda: checked(spec, CausalLM.of(spec), layout, ALONE))


def _adapted(spec: ModelSpec) -> str:
    return _answer(lambda: adapted(spec, AdapterSection(r=2, alpha=4)).files.exported())


def _answer(ask: Callable[[], object]) -> str:
    try:
        ask()
    except ConfigError as error:
        return error.problems[0].actual
    return "pass"


def _short(names: Collection[str], others: Collection[str]) -> str:
    return f"`{in_short(sorted(names), others)}`" if names else ""


def section() -> str:
    """Return the section of the page."""
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        folders = {family: Path(folder) / family for family in FAMILIES}
        rows = [comes_back(*one) + runs(*one) for one in folders.items()]
    rule = "| --- " * HEAD.count(" |") + "|"
    return "\n".join([TITLE, TEXT, HEAD, rule, *rows, ""])


def main() -> None:
    first, _, _ = PAGE.read_text().partition(TITLE)
    PAGE.write_text(f"{first.rstrip()}\n\n{section()}")


if __name__ == "__main__":
    main()
