"""Next-token prediction, the task of a causal language model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from trainer.distributed.context_ranks import ContextRanks
from trainer.distributed.documents import WholeDocuments
from trainer.distributed.exchange import vocabulary_shard_of_head
from trainer.errors import ConfigError, Problem
from trainer.models.spec import LanguageModel, ModelSpec
from trainer.recipes.causal_lm.embedding_noise import EmbeddingNoise, has_table
from trainer.tasks.attention import Attention, attend, documents_of
from trainer.tasks.kernel_probes import attention_of
from trainer.tasks.kernels import kernel_chooser
from trainer.tasks.losses.cross_entropy import (
    NO_OPTIONS,
    LossBySource,
    LossHead,
    LossOptions,
    count_correct,
    logits_cross_entropy,
)
from trainer.tasks.masks import Masks
from trainer.tasks.mixers import Mixers, lengths_of, mixers_of, run_by_document, within
from trainer.tasks.patches import (
    attend_in_place_of_eager,
    divide_rows,
    has_eager_alone,
    lacks_sdpa,
    register_attention,
    replace_loss,
)
from trainer.tasks.task import IGNORED, Batch, Sample, WholeStep, changed

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class CausalLM:
    """The task of samples with `input_ids` [n] and `targets` [n], already shifted: targets[t]
    follows input_ids[t].

    No attention mask is needed: padding is at the end, where a causal model's real tokens never
    look. A sample of several documents that are kept apart has their lengths, `documents`
    [k]; the model's own code makes masks of them.
    """

    measures: tuple[str, ...] = ("accuracy",)
    whole_step: WholeStep | None = None

    def __init__(
        self,
        model: LanguageModel,
        padding: int = 0,
        attention: Callable[[], Attention] = Attention,
        mixers: Callable[[], Mixers] = frozenset,
    ) -> None:
        """`mixers`: finds the layers that carry state from one document to the next."""
        self._fused_head = model.head.plain
        self._own_loss = model.own_loss
        self._hidden_size = model.hidden_size
        self._padding_id = padding
        self.attention = cache(attention)
        self._masks = Masks()
        self.mixers = cache(mixers)
        self._packs = False
        self._smoothing = 0.0
        self._trains = False
        self._noise: EmbeddingNoise | None = None
        self._correct: torch.Tensor | None = None
        self._context: ContextRanks | None = None
        self.by_source: LossBySource | None = None

    @classmethod
    def of(
        cls, spec: ModelSpec, padding_id: int = 0, attention: Callable[[], Attention] | None = None
    ) -> CausalLM:
        """Build the task of training this model; without `attention`, a tiny copy is tried."""
        tried = partial(attention_of, spec, _packed_logits)
        mixers = partial(mixers_of, spec, partial(_packed_logits, seal=lambda _, mask: mask))
        return cls(spec.language, padding_id, attention or tried, mixers)

    def regularised(
        self, spec: ModelSpec, label_smoothing: float, neftune_alpha: float
    ) -> CausalLM:
        """Return the same task with smoothed labels and noisy embeddings in training, if requested.

        Raises ConfigError for noise where the model has no table of input embeddings.
        """
        if neftune_alpha and not has_table(spec):
            table = "table of input embeddings that a forward pass would look tokens up in"
            actual = f"{spec.name} has no {table}"
            raise ConfigError(Problem("trainer.neftune_alpha", actual, "a model with one"))
        noise = EmbeddingNoise(neftune_alpha) if neftune_alpha else None
        return changed(self, _smoothing=label_smoothing, _noise=noise)

    def packing(self) -> CausalLM:
        """Return the same task, whose samples are several documents that are kept apart."""
        return changed(self, _packs=True)

    @property
    def draws(self) -> bool:
        return self._noise is not None

    def watching(self, sources: int) -> CausalLM:
        """Return the same task, which also sums the training loss by source."""
        return changed(self, by_source=LossBySource(sources))

    def placed(self, context: ContextRanks | None, batch: dist.ProcessGroup | None = None) -> None:
        self._context = context

    def _own(self, batch: Batch, name: str) -> torch.Tensor:
        """Return this rank's part of the rows of ids or targets."""
        ranks = self._context
        fills = {"input_ids": self._padding_id, "targets": IGNORED}
        return ranks.part(batch[name], fill=fills[name]) if ranks else batch[name]

    def prepare(self, model: nn.Module) -> nn.Module:
        """Put a head that can return the loss in the place of the model's own, and our attention
        in that of transformers' SDPA.
        """
        register_attention(attend)
        if has_eager_alone(model) and self.attention().by_attend:
            attend_in_place_of_eager(model)
        if self._fused_head:
            own = head_of(model)
            head = self._loss_head(own)
            modules = model.named_modules(remove_duplicate=False)
            for name in [name for name, module in modules if module is own]:
                model.set_submodule(name, head)  # a model may have a head and no way to set it
        if self._noise is not None:
            self._noise.add_to(model)
        if self._own_loss:
            replace_loss(model, self._mean)
        if self._context is not None:
            divide_rows(model, self._context)
        if self._packs or self._context is not None:
            run_by_document(model, self.mixers)
        return model

    def _loss_head(self, own: nn.Linear) -> LossHead:
        """Return the head that stands in the place of the model's `own`."""
        return LossHead(own, self._options)

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Pad samples to `input_ids` and `targets`, [batch, longest], int64.

        `lengths` [batch, 1] are those of the rows. Packed samples add `documents` [batch, most],
        lengths with zeros where a row has fewer; a mixture adds `sources` [batch, 1].
        """
        longest = max(len(sample["input_ids"]) for sample in samples)
        inputs = np.full((len(samples), longest), self._padding_id, dtype=np.int64)
        targets = np.full((len(samples), longest), IGNORED, dtype=np.int64)
        for row, sample in enumerate(samples):
            inputs[row, : len(sample["input_ids"])] = sample["input_ids"]
            targets[row, : len(sample["targets"])] = sample["targets"]
        batch = {"input_ids": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}
        if "documents" in samples[0]:
            lengths = [sample["documents"] for sample in samples]
            most = max(map(len, lengths))
            rows = [np.pad(row, (0, most - len(row))) for row in lengths]
            batch["documents"] = torch.from_numpy(np.stack(rows).astype(np.int64))
        if self.by_source is not None and "source" in samples[0]:
            batch["sources"] = torch.tensor([[sample["source"]] for sample in samples])
        batch["lengths"] = torch.tensor([[len(sample["input_ids"])] for sample in samples])
        return batch

    def blank(self, sample: Mapping[str, object]) -> Mapping[str, object]:
        return {**sample, "targets": np.full_like(sample["targets"], IGNORED)}

    def shape(self, batch: Batch) -> tuple[int, int]:
        """Return [batch, sequence], of this rank's part of the rows."""
        rows, length = self._own(batch, "input_ids").shape
        return rows, length

    def hidden_shape(self, batch: Batch, block: int) -> tuple[int, ...]:
        """Return [batch, sequence, hidden size], which is the same for every block."""
        assert self._hidden_size is not None
        return (*self.shape(batch), self._hidden_size)

    def padded(self, batches: Sequence[Batch]) -> list[Batch]:
        longest = max(batch["input_ids"].shape[1] for batch in batches)
        fills = {"input_ids": self._padding_id, "targets": IGNORED}

        def filled(batch: Batch, name: str) -> torch.Tensor:
            missing = longest - batch[name].shape[1]
            return F.pad(batch[name], (0, missing), value=fills[name])

        return [{**batch, **{name: filled(batch, name) for name in fills}} for batch in batches]

    def targets(self, batch: Batch) -> torch.Tensor:
        return (self._own(batch, "targets") != IGNORED).sum()

    def started(
        self, batches: Sequence[Batch], summed: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Count nothing: the loss is a mean over the targets."""

    def real(self, batch: Batch) -> torch.Tensor:
        """Return 1 for each of this rank's tokens, 0 for padding: int64 [batch, sequence]."""
        lengths = batch["lengths"]
        row = batch["input_ids"].shape[1]
        real = (torch.arange(row, device=lengths.device) < lengths).long()
        return self._context.part(real) if self._context else real

    def hidden(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return self._run(model, model.base_model, batch)[0]  # type: ignore[arg-type,no-any-return]

    def logits(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return logits, [batch, sequence, entries of this rank's vocabulary shard]."""
        return self._run(model, model, batch).logits  # type: ignore[no-any-return]

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the summed loss; under `own_loss`, the model's own mean times the targets' number.

        So a router's loss, which the model adds to the mean of the token losses, is weighted by the
        micro-batch's targets.
        """
        if self.by_source is not None and model.training:
            self.by_source.start(batch)
        if self._own_loss:
            return self._own_mean(model, batch) * self.targets(batch)
        if self._fused_head:
            return head_of(model)(self.hidden(model, batch), self._own(batch, "targets"))  # type: ignore[no-any-return]
        options = self._options if model.training else NO_OPTIONS
        logits = self.logits(model, batch)
        shard = vocabulary_shard_of_head(head_of(model))
        targets = self._own(batch, "targets")
        return logits_cross_entropy(logits, targets, options, shard)

    def _own_mean(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the loss of the model's own `forward(labels=...)`."""
        targets = batch["targets"]
        self._trains = model.training
        with head_of(model).given(targets) if self._fused_head else nullcontext():
            return self._run(model, model, batch, labels=targets).loss  # type: ignore[no-any-return]

    @property
    def _options(self) -> LossOptions:
        """The loss's options in training; copies of a model share the observer, a function."""
        by_source = self.by_source
        if by_source is None:
            return LossOptions(self._smoothing)
        return LossOptions(self._smoothing, lambda rows, losses: by_source.add(rows, losses))

    def _run(
        self, model: nn.Module, forward: Callable[..., object], batch: Batch, **labels: torch.Tensor
    ) -> Any:
        """Call the model's forward, whole or below the head; packed documents are kept apart."""
        ids = batch["input_ids"]
        lengths = batch.get("documents")
        arguments = dict[str, object](labels)
        row = self._context.start(ids.shape[1]) if self._context else ids.shape[1]
        documents = None if lengths is None else documents_of(lengths, row)
        if self._context:
            places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
            places = documents.positions if documents else places
            arguments["position_ids"] = self._context.part(places).contiguous()
        elif documents:
            arguments["position_ids"] = documents.positions
        if documents and "flash" in model.config._attn_implementation:  # type: ignore[operator,union-attr]
            # no document is longer than the row: finding the longest would wait for the device
            arguments |= {
                "cu_seq_lens_q": documents.cu_seqlens,
                "cu_seq_lens_k": documents.cu_seqlens,
            }
            arguments |= {"max_length_q": ids.shape[1], "max_length_k": ids.shape[1]}
        if self._noise is not None:
            lengths = documents.lengths if documents else batch["lengths"]
            self._noise.start(lengths, self._context)
        kernels = kernel_chooser(self.attention, ids.device, self._context)
        apart = self._kept_apart(batch, row) if documents or self._context else None
        masks = self._masks.of(documents, self._context, kernels, lacks_sdpa(model))
        with masks, within(apart):
            return forward(input_ids=self._own(batch, "input_ids"), use_cache=False, **arguments)

    def _kept_apart(self, batch: Batch, row: int) -> WholeDocuments | None:
        """Return the documents if the model has layers with state, which then run by document."""
        if "documents" in batch and not self._packs:
            raise ValueError("packed documents, and a task without packing()")
        if not self.mixers():
            return None
        rows = len(batch["input_ids"])
        lengths = lengths_of(batch["documents"], row) if "documents" in batch else [[row]] * rows
        return self._context.documents(lengths) if self._context else WholeDocuments.whole(lengths)

    def measured(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the summed loss and the number of targets with the highest logit.

        The model is in evaluation mode.
        """
        if not self._fused_head and not self._own_loss:
            logits = self.logits(model, batch)
            targets = self._own(batch, "targets")
            shard = vocabulary_shard_of_head(head_of(model))
            loss = logits_cross_entropy(logits, targets, shard=shard)
            return torch.stack([loss, count_correct(logits, targets, shard)])
        loss = self.loss_sum(model, batch)
        if self._fused_head:
            return torch.stack([loss, head_of(model).take_correct()])
        correct = self._correct
        self._correct = None
        assert correct is not None
        return torch.stack([loss, correct])

    def _mean(
        self, logits: torch.Tensor, labels: torch.Tensor, *_: object, **__: object
    ) -> torch.Tensor:
        """Return the mean loss over shifted `labels`; a fused head gives the sum as `logits`."""
        total = logits
        if not self._fused_head:
            self._correct = count_correct(logits, labels)
            options = self._options if self._trains else NO_OPTIONS
            total = logits_cross_entropy(logits, labels, options)
        return total / (labels != IGNORED).sum().clamp_min(1)


def head_of(model: nn.Module) -> LossHead:
    return model.get_output_embeddings()  # type: ignore[operator]


def _packed_logits(
    model: PreTrainedModel, row: torch.Tensor, seal: Callable[..., object]
) -> torch.Tensor:
    """Return the logits of a row of two documents, under masks that `seal` replaces."""
    half = row.shape[1] // 2
    documents = documents_of(torch.tensor([[half, row.shape[1] - half]]), row.shape[1])
    with Masks(seal=seal).of(documents):
        places = documents.positions
        return model(input_ids=row, position_ids=places, use_cache=False).logits  # type: ignore[no-any-return]
