"""A model with transformers' own head for masked tokens, as a spec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from trainer.config.sections.masked import MaskedSection
from trainer.config.sections.model_and_data import ModelSection
from trainer.errors import ConfigError, Problem
from trainer.models import huggingface
from trainer.models.flops import flops_per_token
from trainer.models.language.auto_class import MASKED
from trainer.models.spec import ModelSpec
from trainer.models.tiny_config import SIZES
from trainer.probes.probe import TOLERANCE, Finding, observe, own_loss_difference, probe
from trainer.recipes.labels.kinds import Labelled
from trainer.recipes.labels.model import LENGTHS, with_new_head
from trainer.recipes.masked_lm.masking import Masked, MaskRule
from trainer.recipes.masked_lm.task import MaskedTask

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from trainer.layout import Layout

BOTH_SIDES = "a token is predicted from both sides, by attention over the whole sequence"


def check_layout(layout: Layout) -> None:
    """Raise ConfigError for a layout that masked language models do not have."""
    if layout.context > 1:
        actual = f"{layout.context} ranks that divide each sequence"
        expected = f"1, as {BOTH_SIDES}"
        raise ConfigError(Problem("sequence_parallel_size", actual, expected))
    if layout.float8 == "tensorwise":
        expected = "rowwise, for masked tokens"
        raise ConfigError(Problem("trainer.float8", "tensorwise", expected))


def spec_of(config: PreTrainedConfig, options: ModelSection, *, weights: bool = True) -> ModelSpec:
    """Build the spec of an architecture with a head for masked tokens.

    The head of a base that has none begins at random. Raises ConfigError.
    """
    whole = options.model_copy(update={"keep_untrained": False})
    spec = huggingface.spec_of(config, whole, weights=weights, kind=MASKED)
    task = MaskedTask(spec, 0)
    ids = min(spec.language.vocabulary, SIZES.vocabulary)  # of a tiny copy
    spec = spec.tried_on(task.trial(made_up(LENGTHS, ids)))
    return with_new_head(spec, False) if options.name_or_path and weights else spec


def made_up_rule(section: MaskedSection, vocabulary: int) -> MaskRule:
    """Return a rule for made-up tokens: 0 pads, and 1 is the mask token."""
    shares = section.probability, section.masked, section.random
    return MaskRule(*shares, 1, vocabulary, frozenset((0, 1)))


def made_up_tokens(lengths: Sequence[int], vocabulary: int) -> list[dict[str, np.ndarray]]:
    """Draw samples of these lengths, whose tokens are none of `made_up_rule`'s special ones."""
    rng = np.random.default_rng(0)
    return [
        {"input_ids": rng.integers(2, vocabulary, length).astype(np.int32)} for length in lengths
    ]


def made_up(lengths: Sequence[int], vocabulary: int) -> list[Labelled]:
    """Draw masked samples of these lengths."""
    rule = made_up_rule(MaskedSection(), vocabulary)
    source = Masked(made_up_tokens(lengths, vocabulary), rule, 0)
    return [source[number] for number in range(len(source))]


def flops_of(spec: ModelSpec, section: MaskedSection, sequence: int) -> float:
    """Return the training FLOPs of a token, of which a share alone passes through the head."""
    whole = flops_per_token(spec, sequence)
    return whole - 6.0 * spec.language.head.parameters * (1 - section.probability)


def check_own_loss(spec: ModelSpec) -> None:
    """Raise ConfigError unless loss and gradients are those of the model's own `forward(labels=)`,
    and padding changes neither. A tiny copy is tried.
    """

    def compare(own: torch.nn.Module, ours: torch.nn.Module, small: ModelSpec) -> Finding | None:
        task = MaskedTask(small, 0)
        samples = made_up(LENGTHS, small.language.vocabulary)
        batch = task.collate(samples)
        if finding := _padding(task, own.eval(), samples):
            return finding
        names = ("input_ids", "attention_mask", "labels")
        prepared = task.prepare(ours.train())
        return own_loss_difference(
            own.train(),
            ours,
            lambda: own(**{name: batch[name] for name in names}).loss * batch["count"],
            lambda: task.loss_sum(prepared, batch),
        )

    finding = observe(lambda: probe(spec, lambda model, small: model, compare))
    if finding is not None:
        expected = "a model whose own head is trained as transformers does"
        place = f"trainer.model: {spec.name}"
        raise finding.error(place, expected, start="a tiny copy of it does not run: ")


def _padding(
    task: MaskedTask, model: torch.nn.Module, samples: Sequence[Labelled]
) -> Finding | None:
    """Compare the logits of sequences in a padded micro-batch with those of each alone."""
    with torch.no_grad():
        together = task.logits(model, task.collate(samples))
        for number, sample in enumerate(samples):
            alone = task.logits(model, task.collate([sample]))
            length = alone.shape[1]
            moved = float((together[number : number + 1, :length] - alone).abs().max())
            if not moved <= 10 * TOLERANCE * float(together.std()):
                return Finding(f"padding moves the logits of {length} tokens by {moved:.1e}")
    return None
