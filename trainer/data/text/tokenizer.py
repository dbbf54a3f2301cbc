"""Tokenizers: the one that the user names, or one that is trained on the embedded corpus."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.data.cache import cached_folder
from trainer.data.progress import QUIET, Progress
from trainer.data.text import corpus
from trainer.errors import DataError, Problem, refused
from trainer.models.door import CHECK_PATH, HUB_TRIED, check_folder, may_be_on_hub
from trainer.supervise.process import cache_folder

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase

    from trainer.config.sections.trainer import TrainerSection
    from trainer.distributed.ranks import Ranks

END_OF_TEXT = "<|endoftext|>"


def tokens_of(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], offsets: bool = False
) -> BatchEncoding:
    """Tokenise texts without special tokens: `input_ids`, and `offset_mapping` if `offsets`.

    Takes about 160 bytes of memory per character.
    """
    options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    if offsets:
        options["return_offsets_mapping"] = True
    expected = "a tokenizer that takes every text"
    hint = "Set another trainer.data.tokenizer"
    with refused(_name(tokenizer), expected, named=True, hint=hint, raises=DataError):
        return tokenizer(list(texts), **options)


def load_tokenizer(
    name_or_path: str,
    trust_remote_code: bool = False,
    revision: str | None = None,
    **options: object,
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or hub id. Raises DataError if it has no end-of-text token."""
    tokenizer = load_any_tokenizer(name_or_path, trust_remote_code, revision, **options)
    end_of_text(tokenizer)
    return tokenizer


def load_any_tokenizer(
    name_or_path: str,
    trust_remote_code: bool = False,
    revision: str | None = None,
    **options: object,
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or hub id, which may end texts with no token."""
    from transformers import AutoTokenizer

    options |= {"trust_remote_code": trust_remote_code, "revision": revision}
    expected = "a folder with a tokenizer, or a hub id"
    start = "no tokenizer could be loaded: "
    hint = "Set trainer.data.tokenizer, or copy the tokenizer's files into the folder"
    folder = Path(name_or_path)
    check_folder(folder)
    if not folder.exists():
        if not may_be_on_hub(name_or_path):
            raise DataError(Problem(name_or_path, "no such folder", expected, "Correct the path"))
        start += HUB_TRIED
        hint = CHECK_PATH
    # a dozen libraries raise what they like
    with refused(name_or_path, expected, start=start, hint=hint, raises=DataError):
        return AutoTokenizer.from_pretrained(name_or_path, **options)  # type: ignore[no-any-return]


def tokenizer_name(section: TrainerSection) -> str | None:
    """Return the folder or hub id of a config's tokenizer; None: the embedded one."""
    return section.data.tokenizer or section.model.name_or_path


def named_tokenizer(
    section: TrainerSection,
    load: Callable[..., PreTrainedTokenizerBase],
    ranks: Ranks,
    progress: Progress,
    **options: Any,
) -> PreTrainedTokenizerBase:
    """Load the tokenizer that a config names, or train the embedded one. Collective.

    `load`: `load_tokenizer` or `load_any_tokenizer`.
    """
    name = tokenizer_name(section)
    if name is None:

        def embedded() -> PreTrainedTokenizerBase:
            return embedded_tokenizer(cache_folder(), progress=progress, **options)

        ranks.try_on_first(embedded)  # the rank that trains it
        return embedded()
    trust = section.model.trust_remote_code
    revision = section.model.revision
    return ranks.on_own(lambda: load(name, trust, revision, **options))


def embedded_tokenizer(
    cache: Path, vocabulary: int = 4096, progress: Progress = QUIET, **options: object
) -> PreTrainedTokenizerBase:
    """Return a byte-level BPE for the embedded corpus, trained at first use (seconds) and cached.

    Deterministic. Raises DiskError if it can't be stored.
    """
    from transformers import PreTrainedTokenizerFast

    name = f"tokenizer-{corpus.name()}-{vocabulary}"
    folder = cached_folder(cache, name, lambda folder: _train(vocabulary, folder), progress)
    return PreTrainedTokenizerFast.from_pretrained(folder, **options)


def end_of_text(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of the token that ends a document. Raises DataError if there is none."""
    if tokenizer.eos_token_id is None:
        actual = "a tokenizer without an end-of-text token"
        hint = "Set eos_token in its tokenizer_config.json"
        raise DataError(Problem(_name(tokenizer), actual, "eos_token", hint))
    return int(tokenizer.eos_token_id)


def tokenizer_key(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest that tokenizers share only if they make the same tokens of every text."""
    content = json.dumps([_name(tokenizer), tokenizer.get_vocab()])
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        content = backend.to_str()
    parts = (content, str(tokenizer.bos_token_id), str(tokenizer.eos_token_id))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _train(vocabulary: int, folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    described = {
        **json.loads(Tokenizer(models.BPE()).to_str()),
        "pre_tokenizer": {**byte_level, "add_prefix_space": False},
        "decoder": {**byte_level, "add_prefix_space": True},
    }
    tokenizer = Tokenizer.from_str(json.dumps(described))
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.documents(), trainer)
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    ).save_pretrained(folder)


def _name(tokenizer: PreTrainedTokenizerBase) -> str:
    return str(getattr(tokenizer, "name_or_path", "")) or type(tokenizer).__name__
