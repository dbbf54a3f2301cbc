"""The one process of embeddings: all texts of a step in one loss, an anchor after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

import torch
import torch.nn.functional as F
from torch import nn

from trainer.certify.one_process.expected import Judged, MicroBatch
from trainer.certify.parameters import Learner
from trainer.certify.recording import Sources, State, Tensors
from trainer.certify.reference import Reference
from trainer.certify.tiny_run import Tiny
from trainer.models.spec import ModelSpec
from trainer.tasks.task import Sample

Text = list[int]
Row = tuple[list[Text], list[int]]
"""The tokens of a sample's texts, and their numbers: equal ones for equal texts."""


Numbers = list[list[int]]
"""The numbers of the texts of each sample; equal texts have one number."""


class TextInputs(TypedDict):
    """The texts of a micro-batch, those of a sample beside each other."""

    input_ids: torch.Tensor
    """[samples x texts, longest], int64; 0 is the padding."""
    lengths: list[int]
    """The number of tokens of each text."""
    skips: list[int]
    """The tokens at the start of each that are not pooled: those of a prompt."""
    samples: int


class EmbeddingReference(Reference):
    """One process with the whole tiny body, and the loss by its definition."""

    adds_up = False

    def __init__(
        self,
        small: Tiny,
        spec: ModelSpec,
        own: Learner,
        sources: Sources,
        skipped: tuple[int, int],
        device: torch.device,
    ) -> None:
        self._options = small.config.trainer.embeddings
        self._skipped = skipped
        super().__init__(small, spec, own, sources, device, ())

    def held_out(self, state: State) -> Judged:
        """Evaluate the held-out samples, all compared with all."""
        self._load(state)
        samples = self._evaluated_samples()
        self.model.eval()
        with torch.no_grad():
            rows = [self._collated([sample]) for sample in samples]
            vectors = torch.cat([self._output(self.model, inputs) for inputs, _ in rows])
            texts = [row for _, numbers in rows for row in numbers]
            total = float(self._loss_of(vectors, texts))
            places = [self._places(vectors, texts, own) for own in range(len(texts))]
        self.model.train()
        unsure = sum(least < most for least, most in places)
        firsts = [least for least, _ in places]
        right: tuple[Any, ...] = (
            sum(place <= 1 for place in firsts),
            sum(place <= 10 for place in firsts),
            sum(1 / place for place in firsts),
        )
        return Judged(total / len(texts), len(texts), right, unsure)

    def _scores(self, vectors: torch.Tensor, texts: list[list[int]], own: int) -> torch.Tensor:
        """Return an anchor's scores, its own positive's first, then those of all negatives."""
        kept = [(own, 1)]
        for other, row in enumerate(texts):
            for column in range(1, len(row)):
                right = row[column] in texts[own][:2]
                right = right or (column == 1 and row[0] == texts[own][0])
                masked = right and self._options.duplicates == "mask"
                if (other, column) != (own, 1) and not masked:
                    kept.append((other, column))
        return self._compared(vectors[own, 0], torch.stack([vectors[place] for place in kept]))

    def _back(self, vectors: torch.Tensor, texts: list[list[int]], own: int) -> torch.Tensor:
        """Return a positive's scores, its own anchor's first, then those of all others."""
        kept = [own]
        for other, row in enumerate(texts):
            right = row[0] in texts[own][:2] or row[1] == texts[own][1]
            if other != own and not (right and self._options.duplicates == "mask"):
                kept.append(other)
        return self._compared(vectors[own, 1], vectors[kept, 0])

    def _compared(self, one: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        if self._options.similarity == "cosine":
            return self._options.scale * F.cosine_similarity(one[None], others, dim=1)
        return self._options.scale * others.mv(one)

    def _loss_of(self, vectors: torch.Tensor, texts: list[list[int]]) -> torch.Tensor:
        """Return the sum over anchors of the cross entropy of their own positive."""
        first = torch.zeros(1, dtype=torch.int64, device=vectors.device)
        losses = []
        for own in range(len(texts)):
            loss = F.cross_entropy(self._scores(vectors, texts, own)[None], first)
            if self._options.symmetric:
                back = F.cross_entropy(self._back(vectors, texts, own)[None], first)
                loss = (loss + back) / 2
            losses.append(loss)
        return torch.stack(losses).sum()

    def _places(self, vectors: torch.Tensor, texts: list[list[int]], own: int) -> tuple[int, int]:
        """Return the place of an anchor's positive, and the last that rounding could give it."""
        scores = self._scores(vectors, texts, own)
        margin = self._margin * float(scores.abs().max())
        place = 1 + int((scores[1:] >= scores[0]).sum())
        last = 1 + int((scores[1:] >= scores[0] - margin).sum())
        first = 1 + int((scores[1:] >= scores[0] + margin).sum())
        return place, place if first == last else last + 1

    def _gradients(
        self, model: nn.Module, step: int, parts: Sequence[MicroBatch], counted: int
    ) -> tuple[float, Tensors]:
        """Return the mean loss of all samples together, and its gradients."""
        model.zero_grad()
        self._outputs = {}
        self._loads.begin()
        vectors = []
        texts = []
        for part in parts:
            self._seeds.start(step, part.data_rank, part.number)
            self._loads.ids = part.inputs["input_ids"]
            place = part.data_rank, part.number
            self._listener.begin([{place: part.inputs["input_ids"]}])
            vectors.append(self._output(model, part.inputs))
            self._outputs |= self._listener.end()
            texts += part.targets
        loss = self._loss_of(torch.cat(vectors), texts)
        (loss * self._scale / counted).backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        scaled = {n: g.float().cpu() / self._scale for n, g in gradients.items()}
        return float(loss.detach()) / counted, scaled

    def _micro_batches(self, step: int, data_rank: int) -> list[MicroBatch]:
        parts = self._samples(step, data_rank)
        width = 0
        if self._spec.training.draws:  # what is drawn depends on it, so a step has one
            every = [sample for part in parts for sample in part]
            width = max(len(text) for sample in every for text in sample["tokens"])
        return [
            MicroBatch(data_rank, number, *self._collated(part, width))
            for number, part in enumerate(parts)
        ]

    def _collated(self, samples: Sequence[Sample], width: int = 0) -> tuple[TextInputs, Numbers]:
        rows = [[int(token) for token in text] for one in samples for text in one["tokens"]]
        skips = [
            self._skipped[column > 0] for one in samples for column in range(len(one["texts"]))
        ]
        width = max(width, *map(len, rows))
        ids = [row + [0] * (width - len(row)) for row in rows]
        given: TextInputs = {
            "input_ids": torch.tensor(ids, device=self._device),
            "lengths": [len(row) for row in rows],
            "skips": skips,
            "samples": len(samples),
        }
        return given, [one["texts"].tolist() for one in samples]

    def _output(self, model: nn.Module, inputs: TextInputs) -> torch.Tensor:
        """Return the vector of each text, [samples, texts, width]."""
        ids = inputs["input_ids"]
        hidden = model(input_ids=ids, attention_mask=(ids != 0).long())
        vectors = []
        each = zip(hidden.last_hidden_state, inputs["lengths"], inputs["skips"], strict=True)
        for states, length, skip in each:
            pools = states[min(skip, length - 1) : length].float()
            of = {"mean": pools.mean(0), "cls": pools[0], "lasttoken": pools[-1]}
            vector = of[self._options.pooling]
            vectors.append(F.normalize(vector, dim=0) if self._options.normalize else vector)
        return torch.stack(vectors).unflatten(0, (inputs["samples"], -1))

    def _loss_sum(self, model: nn.Module, inputs: TextInputs, targets: Numbers) -> torch.Tensor:
        return self._loss_of(self._output(model, inputs), targets)

    def _counted(self, inputs: TextInputs, targets: Numbers) -> int:
        return len(targets)

    def _example(self) -> TextInputs:
        return self._collated([self._data.training[0]])[0]
