"""The certificate of packed documents: the one process does not pack, and runs each document by
itself.
"""

from __future__ import annotations

from typing import Any

import torch

from trainer.certify.parameters import Learner
from trainer.certify.recording import State
from trainer.certify.reference import Judged, MicroBatch, Reference
from trainer.certify.samples import Documents
from trainer.certify.tiny_run import Tiny
from trainer.config import TrainerSection
from trainer.data.text.token_files import Encoded
from trainer.distributed.ranks import Ranks
from trainer.errors import ConfigError, Problem
from trainer.models.spec import ModelSpec
from trainer.trial.draws import observe_draws
from trainer.trial.setup import own_randomness, tiny

CHANGE = (
    "packed samples, whose documents one process runs one by one; no dropout or noise: it "
    "would draw otherwise"
)


def without_dropout(architecture: Any, section: TrainerSection) -> tuple[Any, TrainerSection]:
    """Set every dropout rate of a model's config (in place) and its adapter to 0, and switch noise
    off.
    """
    for key, value in vars(architecture).items():
        if hasattr(value, "to_dict"):
            without_dropout(value, section)
        elif isinstance(value, float) and "drop" in key:
            setattr(architecture, key, 0.0)
    adapter = section.adapter and section.adapter.model_copy(update={"dropout": 0.0})
    return architecture, section.model_copy(update={"adapter": adapter, "neftune_alpha": 0.0})


def check_nothing_drawn(spec: ModelSpec, ranks: Ranks) -> None:
    """Raise ConfigError if the model still draws random numbers. Collective."""

    def draws() -> bool:
        with own_randomness():
            small, model = tiny(spec)
            return observe_draws(model, small).any

    if ranks.on_first(draws):
        seen = (
            "the model draws random numbers in training; documents one by one would draw "
            "others "
            "than packed ones"
        )
        raise ConfigError(
            Problem("trainer.data.documents", seen, 'a rate of 0, or "pad", to verify it')
        )


class PackedReference(Reference):
    """One process in which a sample is a list of documents, each of which is a micro-batch of its
    own.
    """

    def __init__(
        self, small: Tiny, spec: ModelSpec, own: Learner, documents: Documents, device: torch.device
    ) -> None:
        self._training, self._held_out = (best_fit(part, small.row) for part in documents)
        super().__init__(small, spec, own, documents, device)

    def held_out(self, state: State) -> Judged:
        self._load(state)
        self.model.eval()
        documents = (
            document for pack in self._held_out[: self._small.held_out] for document in pack
        )
        return self._judged(self._padded([self._sample(document)]) for document in documents)

    def _micro_batches(self, step: int, data_rank: int) -> list[MicroBatch]:
        numbers = self._numbers(step, data_rank, len(self._training))
        return [
            MicroBatch(data_rank, index, *self._padded([self._sample(document)]))
            for index, part in enumerate(numbers)
            for number in part
            for document in self._training[number]
        ]


def best_fit(documents: list[Encoded], longest: int) -> list[list[Encoded]]:
    """Pack by definition: the longest first, each where the least room is left; samples by first
    documents.
    """
    lengths = [min(len(document.tokens) - 1, longest) for document in documents]
    packs: list[list[int]] = [[] for _ in documents]

    def room(pack: list[int]) -> int:
        return longest - sum(lengths[number] for number in pack)

    for number in sorted(range(len(documents)), key=lambda number: -lengths[number]):
        min((pack for pack in packs if room(pack) >= lengths[number]), key=room).append(number)
    return [
        [documents[number] for number in pack]
        for pack in sorted(sorted(pack) for pack in packs if pack)
    ]
