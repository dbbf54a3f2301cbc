"""The one process of a language model, on padded documents, or on packed ones run one by one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from trainer.certify.one_process.edges import Edge, rows_at
from trainer.certify.one_process.expected import IGNORED, Judged, MicroBatch
from trainer.certify.one_process.factors import lowered
from trainer.certify.parameters import Learner
from trainer.certify.recording import Sources, State, Targets, Tensors
from trainer.certify.reference import Reference
from trainer.certify.rounding import STEPS, rows_of
from trainer.certify.tiny_run import LONGEST, Tiny
from trainer.data.mixture import Source
from trainer.data.text.token_files import Encoded
from trainer.models.spec import ModelSpec

Sample = tuple[list[int], list[int]]
"""Inputs and targets: at each position the token that follows, if it counts."""
Noise = Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor], torch.Tensor]
"""A hook that adds noise to the output of the embedding table."""


class Documents(NamedTuple):
    """Documents of different lengths, one too long, with very unequal numbers of targets."""

    training: list[Encoded]
    held_out: list[Encoded]
    """One more document than is evaluated."""


class LanguageReference(Reference):
    """One process with the whole tiny language model, a sample for each document."""

    def __init__(
        self, small: Tiny, spec: ModelSpec, own: Learner, documents: Documents, device: torch.device
    ) -> None:
        if alpha := small.config.trainer.neftune_alpha:
            table: nn.Module = own.model.get_input_embeddings()  # type: ignore[operator]
            table.register_forward_hook(self._adding_noise(alpha))
        data = Sources(*(self._prepared(part, small.row) for part in documents))
        super().__init__(small, spec, own, data, device)
        self._has_own_loss, self._adds_to_loss = self._own_loss()
        self._draws = self._sees_draws() or spec.training.draws  # which may be unproven

    def held_out(self, state: State) -> Judged:
        """Evaluate the held-out samples, each by itself.

        By micro-batches if the model adds a loss of a whole micro-batch, if padding moves its
        logits, or if a float8 product has one scale for all rows.
        """
        self._load(state)
        scaled = self._layout.float8 == "tensorwise"
        together = scaled or self._adds_to_loss or self._padding_counts()
        size = self._layout.micro_batch if together else 1
        samples = self._evaluated_samples()
        return self._judged(samples + [self._blank(samples[0])] * (-len(samples) % size), size)

    def _blank(self, sample: Any) -> Any:
        """Return a sample like this one without a target."""
        inputs, _ = sample
        return inputs, [IGNORED] * len(inputs)

    def continued(self, documents: list[Encoded]) -> list[Encoded]:
        """Replace every other document's tokens by the likeliest, so that accuracy is not 0."""
        self.model.eval()
        written = list(documents)
        for index in range(0, len(written), 2):
            tokens = torch.tensor([list(written[index].tokens)], device=self._device)
            for place in range(1, tokens.shape[1]):
                with torch.no_grad():
                    logits = self._output(self.model, tokens[:, :place])
                tokens[0, place] = logits[0, -1, 1:].argmax() + 1
            written[index] = written[index]._replace(tokens=tokens[0].tolist())
        self.model.train()
        return written

    def projected(self, state: State, step: int) -> tuple[list[Tensors], list[Tensors]]:
        """Compute gradients of STEPS steps at rounded weights, in float32 and in low precision."""
        self._load(state)
        dtype = getattr(torch, self._layout.precision)
        layout = self._layout
        low = lowered(self.model, dtype, layout.float8)
        exact = copy.deepcopy(self.model)
        for rounded, parameter in zip(low.parameters(), exact.parameters(), strict=True):
            parameter.data = rounded.data.float()
        sums: tuple[list[Tensors], list[Tensors]] = ([], [])
        size = self._spec.language.vocabulary
        ranks = range(layout.data_ranks)
        places = [(rank, number) for number in range(layout.accumulation) for rank in ranks]
        for later in range(step, step + STEPS):
            parts = []
            for rank, number in places:
                rows = rows_of(self.small, size, later, rank, number)
                samples = [(inputs.tolist(), targets.tolist()) for inputs, targets in rows]
                parts.append(MicroBatch(rank, number, *self._collated(samples)))
            counted = sum(part.targets.numel() for part in parts)
            for gradients, model in zip(sums, (exact, low), strict=True):
                gradients.append(self._gradients(model, later, parts, counted)[1])
        return sums

    def parts_at(self, edge: Edge, step: int) -> list[MicroBatch]:
        layout = self._layout
        parts = []
        for number in range(layout.accumulation):
            for rank in range(layout.data_ranks):
                place = step, rank, number
                rows = rows_at(edge, self.small, self._spec.language.vocabulary, place)
                lists = [[(d.inputs.tolist(), d.targets.tolist()) for d in row] for row in rows]
                parts += self._parts_of(rank, number, lists)
        return parts

    def _parts_of(self, rank: int, number: int, rows: list[list[Sample]]) -> list[MicroBatch]:
        """Return a micro-batch of rows of one document each."""
        return [MicroBatch(rank, number, *self._collated([row[0] for row in rows]))]

    def _prepared(self, documents: list[Encoded], longest: int) -> Source:
        """Return the samples of documents."""
        return [sample_of(document, longest) for document in documents]

    def _micro_batches(self, step: int, data_rank: int) -> list[MicroBatch]:
        parts = self._samples(step, data_rank)
        longest = max(len(inputs) for part in parts for inputs, _ in part)
        width = longest if self._draws else 0  # what is drawn depends on it, so a step has one
        return [
            MicroBatch(data_rank, i, *self._collated(part, width), 0, self._shared(longest))
            for i, part in enumerate(parts)
        ]

    def _shared(self, longest: int) -> int:
        """Return the width of the rows that ranks divide: of a step's longest in a pipeline."""
        return longest if self._layout.pipeline > 1 else 0

    def _collated(self, samples: Sequence[Any], width: int = 0) -> tuple[torch.Tensor, Targets]:
        width = max(width, *(len(inputs) for inputs, _ in samples))
        inputs = [row + [0] * (width - len(row)) for row, _ in samples]
        targets = [row + [IGNORED] * (width - len(row)) for _, row in samples]
        return torch.tensor(inputs, device=self._device), torch.tensor(targets, device=self._device)

    def _output(self, model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        return model(input_ids=inputs, use_cache=False).logits  # type: ignore[no-any-return]

    def _loss_sum(self, model: nn.Module, inputs: torch.Tensor, targets: Targets) -> torch.Tensor:
        """Return the model's own mean loss, with all that it adds, times the number of targets."""
        smoothing = self._smoothing if model.training else 0.0

        def plain(logits: torch.Tensor, smoothing: float) -> torch.Tensor:
            # PyTorch 2.15 adds up an even share for each logit, in float32 on a CPU: of 150,000
            # logits the gradient is off by 1e-4
            wide = logits.double() if smoothing else logits.float()
            return F.cross_entropy(
                wide.flatten(0, 1),
                targets.flatten(),
                ignore_index=IGNORED,
                reduction="sum",
                label_smoothing=smoothing,
            )

        counted = self._counted(inputs, targets)
        if not self._has_own_loss or not counted:
            return plain(self._output(model, inputs), smoothing)
        own = model(input_ids=inputs, labels=targets, shift_labels=targets, use_cache=False)
        total: torch.Tensor = own.loss * counted
        if smoothing:
            total = total + plain(own.logits, smoothing) - plain(own.logits, 0.0)
        return total

    def _counted(self, inputs: torch.Tensor, targets: Targets) -> int:
        return int((targets != IGNORED).sum())

    def _example(self) -> torch.Tensor:
        return torch.arange(1, 9, device=self._device)[None] % self._spec.language.vocabulary

    def _own_loss(self) -> tuple[bool, bool]:
        """Return whether the model has a loss over shifted labels, and whether it adds to it."""
        ids = self._example()
        self.model.eval()
        with torch.no_grad():
            logits = self._output(self.model, ids).float()
            try:
                shifted = {"shift_labels": ids, "use_cache": False}
                pair = (ids, ids.roll(3))
                losses = [self.model(input_ids=ids, labels=of, **shifted).loss for of in pair]
            except Exception:  # whatever a model's own code raises for an unknown argument
                losses = [None]
        self.model.train()
        if losses[0] is None or not bool(losses[0] == losses[1]):
            return False, False
        plain = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        return True, abs(float(losses[0]) / float(plain) - 1) > 1e-5

    def _sees_draws(self) -> bool:
        """Return True if a forward pass in training depends on the seed."""
        outputs = list[torch.Tensor]()
        self._inputs = self._example()
        self._loads.begin()
        self._loads.ids = self._inputs
        for seed in range(2):
            self._seeds.begin(seed)
            with torch.no_grad():
                outputs.append(self._output(self.model.train(), self._inputs))
        return not torch.equal(*outputs)

    def _padding_counts(self) -> bool:
        """Return True if logits depend on how many tokens follow in the row (ranked ties)."""
        half = LONGEST // 2
        moved = 0.0
        ids = torch.arange(1, LONGEST + 1, device=self._device)[None]
        ids = ids % half % self._spec.language.vocabulary
        self.model.eval()
        with torch.no_grad():
            long = self._output(self.model, ids).float()
            for length in range(half, LONGEST, 2):
                short = self._output(self.model, ids[:, :length]).float()
                moved = max(moved, float((short - long[:, :length]).abs().max()))
        return moved > 1e-5 * float(long.abs().max())

    def _adding_noise(self, alpha: float) -> Noise:
        """Build NEFTune's hook; ids of documents are never 0, the padding."""

        def hook(
            module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor
        ) -> torch.Tensor:
            if not module.training:
                return output
            lengths = (self._inputs != 0).sum(1)
            bounds = alpha / torch.sqrt(lengths * output.shape[-1])
            return output + (bounds[:, None, None] * (2 * torch.rand(output.shape) - 1)).to(output)

        return hook


class PackedReference(LanguageReference):
    """One process in which a sample is a list of documents, each a micro-batch of its own."""

    def held_out(self, state: State) -> Judged:
        self._load(state)
        packs = self._evaluated_samples()
        return self._judged([document for pack in packs for document in pack], 1)

    def _prepared(self, documents: list[Encoded], longest: int) -> Source:
        packs = best_fit(documents, longest)
        return [[sample_of(document, longest) for document in pack] for pack in packs]

    def _micro_batches(self, step: int, data_rank: int) -> list[MicroBatch]:
        parts = self._samples(step, data_rank)
        longest = max(sum(len(ids) for ids, _ in pack) for packs in parts for pack in packs)
        return [
            part._replace(row=self._shared(longest) or part.row)
            for number, packs in enumerate(parts)
            for part in self._parts_of(data_rank, number, packs)
        ]

    def _parts_of(self, rank: int, number: int, rows: list[list[Sample]]) -> list[MicroBatch]:
        """Return a micro-batch for each document, with its place in its row."""
        width = max(sum(len(ids) for ids, _ in row) for row in rows)
        parts = []
        for row in rows:
            starts = list(accumulate((len(ids) for ids, _ in row), initial=0))[:-1]
            for start, document in zip(starts, row, strict=True):
                part = MicroBatch(rank, number, *self._collated([document]), start, width)
                parts.append(part)
        return parts


def sample_of(document: Encoded, longest: int) -> Sample:
    tokens = list(document.tokens)[: longest + 1]
    counted = zip(tokens, list(document.counted)[: longest + 1], strict=True)
    return tokens[:-1], [token if counts else IGNORED for token, counts in counted][1:]


def best_fit(documents: list[Encoded], longest: int) -> list[list[Encoded]]:
    """Pack the longest first, each where the least room is left; samples by first documents."""
    lengths = [min(len(document.tokens) - 1, longest) for document in documents]
    packs: list[list[int]] = [[] for _ in documents]

    def room(pack: list[int]) -> int:
        return longest - sum(lengths[number] for number in pack)

    for number in sorted(range(len(documents)), key=lambda number: -lengths[number]):
        min((pack for pack in packs if room(pack) >= lengths[number]), key=room).append(number)
    filled = sorted(sorted(pack) for pack in packs if pack)
    return [[documents[number] for number in pack] for pack in filled]
