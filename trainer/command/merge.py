"""`meshloom merge RUN OUT`: a LoRA adapter in its base, as one model, tensor by tensor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.command import parser_of, reporting
from trainer.errors import ConfigError, Problem
from trainer.storage import check_new

if TYPE_CHECKING:
    from trainer.config.sections.adapter import QuantizeSection

DESCRIPTION = """
Merge a LoRA adapter into its base, and write a model that transformers opens by itself, in the
dtype of the base. One tensor at a time is in memory. An adapter that was trained on a quantised
base (trainer.adapter.quantize) is added to the base as it is in its files, unless
--quantised-base asks for the quantised one.
"""
EPILOG = (
    "\nexit codes: 0 written, 64 the adapter or its base is wrong, 65 no tokenizer, 74 the disk\n"
)


@reporting
def main(arguments: Sequence[str], name: str) -> int:
    parser = parser_of(name, DESCRIPTION, EPILOG)
    text = "a run's folder, runs/NAME, a checkpoint, or a folder with adapter_config.json"
    parser.add_argument("adapter", type=Path, metavar="RUN|ADAPTER", help=text)
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write, new or empty")
    text = "the base's folder or hub id (default: the one that the adapter names)"
    parser.add_argument("--base", metavar="DIR", help=text)
    text = "add it to the quantised base, dequantised: the model that was trained"
    parser.add_argument("--quantised-base", action="store_true", help=text)
    options = parser.parse_intermixed_args(arguments)
    check_new(options.out)
    from trainer.models.door import check_folder
    from trainer.run.start.folder import model_in

    folder = model_in(options.adapter)
    check_folder(folder)
    base = _base_of(folder, options.base)
    bits = _bits_of(folder, options.quantised_base)
    if bits is not None and not options.quantised_base:
        from trainer.models.finetuning.quantised.quantised_files import name_of

        another = "so what is merged differs from what was trained by the error of quantising"
        print(f"note    the adapter was trained on a base {name_of(bits)}, {another}")
        print("        (--quantised-base merges into that base, dequantised)")
    opens = merge(folder, base, options.out, bits if options.quantised_base else None)
    print(f"merged: {options.out} opens with {opens}")
    return 0


def _bits_of(folder: Path, requested: bool) -> QuantizeSection | None:
    """Return how an adapter's base was quantised; None if it was not.

    Raises ConfigError if it is `requested` and was not.
    """
    from trainer.models.finetuning.quantised import quantised_files

    bits = quantised_files.read(folder)
    if requested and bits is None:
        actual = f"{folder} has no {quantised_files.FILE}"
        expected = "an adapter that was trained on a quantised base"
        raise ConfigError(Problem("--quantised-base", actual, expected, "Leave it out."))
    return bits


def _base_of(folder: Path, requested: str | None) -> str:
    """Return the requested base, or that which an adapter's folder names.

    Raises ConfigError if the folder has no adapter, or there is no base.
    """
    from trainer.models.finetuning.lora_folder import CONFIG, read_config

    if not (folder / CONFIG).is_file():
        actual = f"no {CONFIG} in it"
        expected = "a run with trainer.adapter, or an adapter's folder"
        hint = "A model without an adapter needs no merging" if folder.is_dir() else ""
        raise ConfigError(Problem(str(folder), actual, expected, hint))
    base = requested or read_config(folder / CONFIG).get("base_model_name_or_path")
    if not base:
        raise ConfigError(Problem(str(folder / CONFIG), "it names no base", "one, or --base"))
    return str(base)


def merge(folder: Path, base: str, out: Path, bits: QuantizeSection | None = None) -> str:
    """Write `base` to `out`, with the adapter of `folder` added to its weights.

    `bits`: how the base is quantised and dequantised before that; None: it is not. Returns the name
    of the function that opens the result. Raises ConfigError if adapter and base don't fit.
    """
    from trainer import checkpoint
    from trainer.config.sections.adapter import AdapterSection
    from trainer.config.sections.model_and_data import ModelSection
    from trainer.data.text.tokenizer import load_tokenizer
    from trainer.distributed.ranks import ALONE
    from trainer.models.door import opening
    from trainer.models.finetuning.lora import adapted
    from trainer.models.finetuning.quantised.quantised_files import dequantised, layers_of
    from trainer.models.huggingface import spec_of
    from trainer.models.language.model_config import read_config as read_architecture
    from trainer.models.spec import exported, given_tensors

    expected = "an adapter that PEFT opens, and its base with a tokenizer"
    with opening(f"{folder}, {base}", expected):
        section = ModelSection(name_or_path=base)
        architecture = read_architecture(section)
        stated = architecture.get_text_config(decoder=True).dtype  # building it changes that
        spec = spec_of(architecture, section)
        described = adapted(spec, AdapterSection(path=str(folder), merge=True))
        assert described.files.merged is not None
        merged = described.files.merged(folder)
        if bits is not None:
            merged = dequantised(merged, layers_of(described, bits))
        entries = exported(spec, given_tensors(merged, ALONE), ALONE)
        source = folder if (folder / "tokenizer_config.json").exists() else base
        tokenizer = load_tokenizer(str(source))

    # a dequantised value is in float32, whatever the base's own dtype
    by_file = getattr(spec.building.weights, "quantised_by", "")
    quantised = bits is not None or bool(by_file)
    dtype = (quantised and stated) or entries[0].dtype

    files = spec.files.exported()

    def save(partial: Path) -> None:
        files.save_config(partial, dtype)
        tokenizer.save_pretrained(partial)
        if spec.files.base is not None:
            spec.files.base.save_tokenizer_files(partial)
        files.check(partial)

    form = checkpoint.ModelForm(dtype if quantised else None)
    checkpoint.export(out, entries, checkpoint.ModelFolder(save, form), ALONE)
    return files.opens
