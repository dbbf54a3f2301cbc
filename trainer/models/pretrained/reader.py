"""A base's values under the names of the model, converted by transformers one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from trainer.models.pretrained.conversion import Conversion, converted, plan, targets_of
from trainer.models.pretrained.files import StoredTensors
from trainer.models.pretrained.quantised import (
    ACTIVATIONS,
    check_read,
    check_scaled,
    check_unread,
    conversion_errors,
    is_code,
)
from trainer.models.pretrained.way_back import pieces_of, values_of
from trainer.models.spec import Weights
from trainer.state import FileTensor

if TYPE_CHECKING:
    from transformers.quantizers.base import HfQuantizer


class ConvertedWeights(Weights):
    """The weights of a base as transformers' `from_pretrained` gives them, one tensor at a time.

    A value has the dtype that it is stored in; a dequantised one is in float32. While a tensor is
    read, only the tensors that it is made of are in memory.
    """

    def __init__(
        self,
        stored: StoredTensors,
        model: PreTrainedModel,
        quantiser: HfQuantizer | None,
        place: str,
    ) -> None:
        """Plan what each tensor of `model`, on the meta device, is read from.

        Raises ConfigError for a quantised weight that would be read as its codes, and for a scale
        that nothing would read.
        """
        self._stored = stored
        self._model = model
        self._quantiser = quantiser
        self._place = place
        self._like: dict[str, torch.Tensor] = model.state_dict()
        self._conversions: dict[str, Conversion] = {}
        self.unread: dict[str, str] = {}
        """Tensors of the files that are not read -> the names that they would have in the model."""
        self._plan()
        self._latest: tuple[str, dict[str, torch.Tensor]] = ("", {})
        read = {key for conversion in self._conversions.values() for key, _ in conversion.sources}
        check_unread(self.unread, read, model, quantiser, place)

    def read(self, name: str) -> torch.Tensor | None:
        for known in (name, *self._tied.get(name, ())):
            if (conversion := self._conversions.get(known)) is not None:
                return self._values(conversion)[known]
        return None

    def release(self) -> None:
        self._latest = ("", {})
        self._stored.release()

    def names(self) -> set[str]:
        """Return the names of the model's tensors that the files have."""
        return set(self._conversions)

    @property
    def stored(self) -> StoredTensors:
        """The tensors of the files."""
        return self._stored

    def targets(self) -> dict[str, str]:
        """Map each tensor of the files to the tensor that it is read into; of several, one."""
        return targets_of(self._conversions.values())

    def pieces(self) -> dict[str, tuple[FileTensor, ...]]:
        """Map each of the model's tensors to those of the files that make up its bytes, in order.

        One whose bytes are not whole tensors of the files is left out.
        """
        result: dict[str, tuple[FileTensor, ...]] = {}
        for conversion in {id(one): one for one in self._conversions.values()}.values():
            result |= pieces_of(conversion, self._like, self._stored, self._model)
        return result

    def dtypes(self) -> dict[str, torch.dtype]:
        """Map each of the model's tensors in the files to the dtype of its first source there.

        For a quantised weight it is the dtype of its codes.
        """
        return {
            name: self._stored.like(conversion.sources[0][0]).dtype
            for name, conversion in self._conversions.items()
        }

    def values(self) -> set[str]:
        """Return the names of all that is read, without scales, as in a base in 16 bits."""
        return {name for one in self._conversions.values() for name in values_of(one)}

    def strangers(self) -> list[str]:
        """List the tensors of the files that the model has no place for.

        The scales of activations in a quantised base do not count: they belong to weights that are
        read.
        """
        keys = sorted(key for key, name in self.unread.items() if name not in self._like)
        quantised = self._quantiser is not None
        return [key for key in keys if not (quantised and ACTIVATIONS.search(key))]

    @property
    def quantiser(self) -> HfQuantizer | None:
        """Transformers' quantiser of the files; None if they are not quantised."""
        return self._quantiser

    @property
    def quantised_by(self) -> str:
        """The method by which the files are quantised; empty if they are not."""
        if self._quantiser is None:
            return ""
        method = self._quantiser.quantization_config.quant_method
        return str(getattr(method, "value", method))

    @cached_property
    def _tied(self) -> dict[str, tuple[str, ...]]:
        """The other names of each tied tensor: the files may have any one of them."""
        groups: dict[int, list[str]] = {}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            groups.setdefault(id(parameter), []).append(name)
        several = [names for names in groups.values() if len(names) > 1]
        return {name: tuple(n for n in names if n != name) for names in several for name in names}

    def _plan(self) -> None:
        planned, self.unread = plan(self._stored.names(), self._model, self._quantiser)
        for conversion in planned.values():
            self._check(conversion)
            for target in self._targets(conversion):
                self._conversions[target] = conversion

    def _targets(self, conversion: Conversion) -> Iterator[str]:
        """Yield the tensors that a conversion makes; if several, it runs on shapes to find them."""
        patterns = [] if conversion.transform is None else conversion.transform.target_patterns
        if len(patterns) > 1 or any("*" in pattern for pattern in patterns):
            yield from self._converted(conversion, on_meta=True)
        else:
            yield conversion.first

    def _check(self, conversion: Conversion) -> None:
        """Raise ConfigError for a code that would be read as a number.

        Also sets the padding of codes to whole blocks, and drops the quantiser's converter where
        the only source is no code, so that the value is read as it is stored.
        """
        stored = self._stored
        sources = conversion.sources
        operations = () if conversion.transform is None else conversion.transform.operations
        if not any(getattr(step, "hf_quantizer", None) for step in operations):
            for key, _ in sources:
                check_read(stored, key, self._like[conversion.first], self._place)
            return
        matched = [(key, pattern) for key, pattern in sources if pattern is not None]
        conversion.fill_blocks(check_scaled(stored, matched, self._quantiser, self._place))
        if len(operations) == len(sources) == 1 and not is_code(stored.like(sources[0][0])):
            conversion.pass_on()

    def _values(self, conversion: Conversion) -> dict[str, torch.Tensor]:
        if conversion.transform is None:
            return {conversion.first: self._stored[conversion.sources[0][0]]}
        if self._latest[0] != conversion.first:
            self._latest = ("", {})  # frees the last before the next is read
            self._latest = (conversion.first, self._converted(conversion))
        values = self._latest[1]
        if len(values) == 1:
            self._latest = ("", {})
        return values

    def _converted(self, conversion: Conversion, on_meta: bool = False) -> dict[str, torch.Tensor]:
        with conversion_errors(self._place, conversion.first):
            return converted(conversion, self._stored, self._model, on_meta)
