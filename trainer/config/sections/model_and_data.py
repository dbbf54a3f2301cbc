"""The sections of what is trained: the model, its parameter groups, and the data."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from trainer.config.keys.key import Excludes, Key, Recipes
from trainer.config.sections.fim import FimSection
from trainer.config.sections.section import (
    ANSWERS,
    CORPUS,
    CUT,
    DOCUMENTS,
    IMAGES,
    LABELS,
    MASKED,
    ROWS,
    TEXT,
    TEXTS,
    TOKENS,
    Count,
    FileName,
    Number,
    Section,
    Whole,
)
from trainer.plugins import SourceName

Paths = str | Annotated[list[str], Field(min_length=1, max_length=100_000)]


class ModelSection(Section):
    """The model. With neither a name nor a config: the embedded default.

    For images: a name of torchvision.models, "package.module:callable", or a folder that a run
    left.
    """

    name_or_path: Annotated[
        str | None,
        Key(
            excludes=Excludes(
                "trainer.model.config",
                "name_or_path loads weights, config starts from scratch.",
                but_for=IMAGES.names,
            )
        ),
    ] = None
    """The folder or hub id of a model, whose weights training starts from."""
    config: Annotated[
        dict[str, Any] | str | None,
        Key(
            recipes=Recipes(
                TOKENS.names,
                lambda config: not isinstance(config, str),
                "a section {...} of keyword arguments of the model",
            )
        ),
    ] = None
    """A transformers config, or the path of its JSON: train from scratch.

    For images: keyword arguments of the callable that builds the model.
    """
    blocks: Annotated[str | None, Key(recipes=IMAGES)] = None
    """The pattern of your own classifier's modules that run once each, in order: "layers.*"."""
    weights: Annotated[str | None, Key(recipes=IMAGES)] = None
    """The pretrained weights of a torchvision model: "DEFAULT", or a name: "IMAGENET1K_V2"."""
    revision: Annotated[str | None, Key(needs="a model's name", recipes=TOKENS)] = None
    """The branch, tag or commit of a model on the hub."""
    trust_remote_code: Annotated[bool, Key(recipes=TOKENS)] = False
    """True to run the code that a model brings along."""
    attention: Annotated[
        Literal["sdpa", "eager", "flash_attention_2"] | None, Key(recipes=TOKENS)
    ] = None
    """The implementation of attention; None: transformers' choice."""
    keep_untrained: Annotated[bool, Key(needs="a model's name", recipes=TEXT)] = True
    """False to save the trained class alone, without what its base has beside it.

    Otherwise the folder at the end is the base's, with the trained values in it: under its names
    and class, with its towers, heads, settings and processors.
    """


class Rows(Section):
    """The place of rows, and the columns that are read."""

    path: Annotated[
        Paths | None,
        Key(excludes=Excludes("trainer.data.sources", "Each of the sources has its own path.")),
    ] = None
    """Files, globs, folders (also at addresses: "s3://bucket/*.jsonl"), or a hub id."""
    format: Annotated[
        SourceName,
        Key(
            needs=ROWS,
            recipes=Recipes(
                TOKENS.names,
                lambda form: form in ("auto", "parquet", "hub"),
                '"auto", "parquet" or "hub" of images',
            ),
        ),
    ] = "auto"
    split: Annotated[str, Key(needs=ROWS)] = "train"
    name: Annotated[str | None, Key(needs=ROWS)] = None
    """The subset of a hub data set."""
    records: Annotated[
        Literal["auto", "text", "prompt_completion", "instruction", "alpaca", "chat"],
        Key(needs=ROWS, recipes=TEXTS),
    ] = "auto"
    """The kind of a row; auto: by its columns; alpaca: an instruction in Alpaca's own prompt.

    Of pairs of answers: chat: texts are turns, the prompt's of the user; instruction: as chat, with
    the columns "instruction", "input" and "history" as prompt; auto: texts are plain.
    """
    text_column: Annotated[
        str, Key(needs=ROWS, recipes=Recipes((*DOCUMENTS.names, *LABELS.names, *MASKED.names)))
    ] = "text"
    prompt_column: Annotated[str | None, Key(recipes=TEXTS)] = None
    completion_column: Annotated[str | None, Key(recipes=DOCUMENTS)] = None
    chat_column: Annotated[str, Key(needs=ROWS, recipes=DOCUMENTS)] = "messages"
    """The column of chats; also "conversations", if it is left at the default."""
    chosen_column: Annotated[str, Key(needs=ROWS, recipes=ANSWERS)] = "chosen"
    """The column of the better answers: texts, or messages with or without those of the prompt."""
    rejected_column: Annotated[str, Key(needs=ROWS, recipes=ANSWERS)] = "rejected"
    max_rows: Annotated[Count | None, Key(unit="records", needs=ROWS)] = None
    """The number of rows to read, from the first; None: all."""


class SourceSection(Rows):
    """One of several sources, with a weight or a number of passes over it, by default one pass."""

    path: Paths
    """Files, globs, folders (also at addresses: "s3://bucket/*.jsonl"), or a hub id."""
    label: FileName | None = None
    """Its name in the log; None: its path."""
    weight: Annotated[Annotated[Number, Field(gt=0, le=1e9)] | None, Key(unit="factor")] = None
    """Its share of the samples, relative to the other sources' weights."""
    epochs: Annotated[Annotated[Number, Field(gt=0, le=1e4)] | None, Key(unit="epochs")] = None


class _Samples(Rows):
    """How samples are made from the data."""

    sources: Annotated[list[SourceSection], Field(max_length=1000), Key(recipes=CORPUS)] = []
    """Several sources, mixed; in place of `path`."""
    chat_template: Annotated[str | None, Key(needs=ROWS, recipes=TEXTS)] = None
    """A file with a Jinja template, or the name of a shipped one; None: the tokenizer's own, or a
    plain one."""
    loss_on: Annotated[
        Literal["assistant", "last_assistant", "all"], Key(needs=ROWS, recipes=DOCUMENTS)
    ] = "assistant"
    """The label tokens of a chat: all of the assistant's turns, its last one, or all tokens."""
    generation_prompt: Annotated[Literal["mask", "score"], Key(needs=ROWS, recipes=TEXT)] = "mask"
    """The handling of an answer's tokens that its prompt has at inference, as an empty thought."""
    too_long: Annotated[Literal["truncate", "drop", "error"], Key(recipes=CUT)] = "truncate"
    """The handling of samples of one document or text of more than `sequence_length` tokens."""
    corrupt: Annotated[Literal["error", "skip"], Key(needs=ROWS, recipes=CORPUS)] = "error"
    """The handling of rows that are not JSON, lack a column, or hold neither text nor a chat.

    Skipped ones are counted.
    """
    stream: Annotated[bool, Key(needs=ROWS, recipes=TEXT)] = False
    """True to prepare each file of `path` when its samples are needed, and to remove it after."""
    sequence_length: Annotated[Whole, Field(ge=2, le=2**24), Key(unit="tokens", recipes=TOKENS)] = (
        512
    )
    """Tokens per sample."""
    documents: Annotated[
        Literal["concatenate", "pad", "pack"] | None,
        Key(
            recipes=Recipes(
                CORPUS.names,
                lambda documents: documents == "concatenate",
                "none: its samples are no documents",
            )
        ),
    ] = None
    """Samples are cut from one stream; one document each; or several isolated whole documents.

    None: chats are packed, or padded if the model does not keep packed ones apart; others are
    concatenated.
    """
    fim: Annotated[FimSection | None, Key(recipes=DOCUMENTS)] = None
    """Fill-in-the-middle of training texts; None: none."""
    isolate: Annotated[bool, Key(needs="concatenated documents", recipes=DOCUMENTS)] = False
    """True if concatenated documents do not attend to one another; padded, packed ones never do."""


class DataSection(_Samples):
    """The text data. With no path and no sources: the embedded corpus.

    For images: digits, mnist, fashion_mnist, cifar10 or cifar100; a folder with a folder for each
    class; parquet files or a hub id with an image column.
    """

    evaluation_path: Annotated[
        Paths | Annotated[dict[str, Paths], Field(min_length=1, max_length=100)] | None,
        Key(
            recipes=Recipes(
                CUT.names, lambda paths: not isinstance(paths, dict), "one path of images"
            )
        ),
    ] = None
    """Data for evaluation; several sets by name: {"code": "code.jsonl", "chat": "chat.jsonl"}."""
    evaluation_fraction: Annotated[
        Number, Field(ge=0, le=0.5), Key(unit="share", needs="training data to hold out from")
    ] = 0.01
    """The share of the training documents held out if there is no `evaluation_path`."""
    tokenizer: Annotated[str | None, Key(recipes=TOKENS)] = None
    """The folder or hub id of a tokenizer; None: the model's own, or the embedded one."""
    workers: Annotated[
        Annotated[Whole, Field(ge=1, le=1024)] | None, Key(unit="processes", recipes=CORPUS)
    ] = None
    """Processes that prepare the data, on one rank; None: one a core, or one for little data."""

    @property
    def packs(self) -> bool:
        """True if a sample may be several documents that do not attend to one another."""
        return self.documents == "pack" or (self.arrangement == "concatenate" and self.isolate)

    @property
    def arrangement(self) -> Literal["concatenate", "pad", "pack", "pairs"]:
        """The value of `documents`; "concatenate" as long as it is not decided."""
        return self.documents or "concatenate"


class ParameterGroup(Section):
    """Parameters with a learning rate or a weight decay of their own."""

    names: str | Annotated[list[str], Field(min_length=1, max_length=10_000)]
    """Patterns of their names, * for any letters: "model.embed_tokens.*"."""
    lr_multiplier: Annotated[Number, Field(gt=0, le=1e6), Key(unit="factor")] = 1.0
    """The factor of the optimizer's or scheduler's learning rate at each step."""
    weight_decay: Annotated[Annotated[Number, Field(ge=0, le=1e6)] | None, Key(unit="factor")] = (
        None
    )
    """The weight decay; None: as without a group."""

    @property
    def patterns(self) -> list[str]:
        return [self.names] if isinstance(self.names, str) else self.names
