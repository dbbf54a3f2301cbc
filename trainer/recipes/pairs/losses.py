"""The losses over pairs, each an equation with its source.

Of a pair with chosen answer w and rejected answer l: log p is the sum of the log-probabilities of
an answer's tokens, n the number of them, r the same sum of the reference, h = log p - log r, and
z = beta (h_w - h_l - margin). ls is the logarithm of the sigmoid s, e the label smoothing.
Checked against TRL 1.16, which ignores label smoothing in `sigmoid`, and has no margins in these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import logsigmoid

from trainer.config.sections.pair_losses import PairsSection


class Answers(NamedTuple):
    """Both answers of some pairs as numbers, each [pairs], in float64."""

    chosen: torch.Tensor
    """log p of the chosen answers."""
    rejected: torch.Tensor
    chosen_reference: torch.Tensor
    """log r of the chosen answers; 0 without a reference."""
    rejected_reference: torch.Tensor
    chosen_tokens: torch.Tensor
    rejected_tokens: torch.Tensor
    margins: torch.Tensor

    @property
    def chosen_ratio(self) -> torch.Tensor:
        return self.chosen - self.chosen_reference

    @property
    def rejected_ratio(self) -> torch.Tensor:
        return self.rejected - self.rejected_reference


Loss = Callable[[Answers, PairsSection], torch.Tensor]
"""Returns the loss of each pair."""


def _z(pairs: Answers, keys: PairsSection) -> torch.Tensor:
    return keys.beta * (pairs.chosen_ratio - pairs.rejected_ratio - pairs.margins)


def _means(pairs: Answers) -> torch.Tensor:
    """Return h_w / n_w - h_l / n_l."""
    of_chosen = pairs.chosen_ratio / pairs.chosen_tokens.clamp_min(1)
    return of_chosen - pairs.rejected_ratio / pairs.rejected_tokens.clamp_min(1)


def _smoothed(z: torch.Tensor, keys: PairsSection) -> torch.Tensor:
    """Return -(1 - e) ls(z) - e ls(-z)."""
    return -(1 - keys.label_smoothing) * logsigmoid(z) - keys.label_smoothing * logsigmoid(-z)


def _sigmoid(pairs: Answers, keys: PairsSection) -> torch.Tensor:
    """DPO (arXiv 2305.18290, equation 7), with an offset (2402.10571) and smoothing (cDPO)."""
    return _smoothed(_z(pairs, keys), keys)


def _hinge(pairs: Answers, keys: PairsSection) -> torch.Tensor:
    """max(0, 1 - z) (SLiC, arXiv 2305.10425; RSO, 2309.06657)."""
    return torch.relu(1 - _z(pairs, keys))


def _ipo(pairs: Answers, keys: PairsSection) -> torch.Tensor:
    """(h_w / n_w - h_l / n_l - 1 / (2 beta))^2 (arXiv 2310.12036, equation 17)."""
    return (_means(pairs) - 1 / (2 * keys.beta)) ** 2


def _robust(pairs: Answers, keys: PairsSection) -> torch.Tensor:
    """(-(1 - e) ls(z) + e ls(-z)) / (1 - 2 e) (arXiv 2403.00409, equation 12)."""
    z = _z(pairs, keys)
    e = keys.label_smoothing
    return (-(1 - e) * logsigmoid(z) + e * logsigmoid(-z)) / (1 - 2 * e)


def _sigmoid_norm(pairs: Answers, keys: PairsSection) -> torch.Tensor:
    """-ls(beta (h_w / n_w - h_l / n_l)) (length-normalised DPO, arXiv 2411.15124, section 5.1)."""
    return _smoothed(keys.beta * _means(pairs), keys)


def _apo_zero(pairs: Answers, keys: PairsSection) -> torch.Tensor:
    """1 - s(beta h_w) + s(beta h_l) (arXiv 2408.06266, equation 7)."""
    chosen = torch.sigmoid(keys.beta * pairs.chosen_ratio)
    return 1 - chosen + torch.sigmoid(keys.beta * pairs.rejected_ratio)


def _apo_down(pairs: Answers, keys: PairsSection) -> torch.Tensor:
    """s(beta h_w) + 1 - s(z) (arXiv 2408.06266, equation 8)."""
    return torch.sigmoid(keys.beta * pairs.chosen_ratio) + 1 - torch.sigmoid(_z(pairs, keys))


def _exo_pair(pairs: Answers, keys: PairsSection) -> torch.Tensor:
    """s(z) (ls(z) - log(1 - e)) + s(-z) (ls(-z) - log e) (EXO, arXiv 2402.00856, equation 16)."""
    z = _z(pairs, keys)
    e = torch.tensor(keys.label_smoothing, dtype=z.dtype, device=z.device)
    right = torch.sigmoid(z) * (logsigmoid(z) - torch.log1p(-e))
    return right + torch.sigmoid(-z) * (logsigmoid(-z) - torch.log(e))


def _nca_pair(pairs: Answers, keys: PairsSection) -> torch.Tensor:
    """-ls(beta h_w) - ls(-beta h_w) / 2 - ls(-beta h_l) / 2 (NCA, arXiv 2402.05369)."""
    chosen = keys.beta * pairs.chosen_ratio
    rejected = keys.beta * pairs.rejected_ratio
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def _bco_pair(pairs: Answers, keys: PairsSection) -> torch.Tensor:
    """-ls(beta h_w) - ls(-beta h_l) (BCO without its shift, arXiv 2404.04656, equation 8)."""
    return -logsigmoid(keys.beta * pairs.chosen_ratio) - logsigmoid(
        -keys.beta * pairs.rejected_ratio
    )


def _sppo_hard(pairs: Answers, keys: PairsSection) -> torch.Tensor:
    """(h_w - 1 / (2 beta))^2 + (h_l + 1 / (2 beta))^2 (SPPO, arXiv 2405.00675, equation 4.7)."""
    half = 0.5 / keys.beta
    return (pairs.chosen_ratio - half) ** 2 + (pairs.rejected_ratio + half) ** 2


def _simpo(pairs: Answers, keys: PairsSection) -> torch.Tensor:
    """-ls(beta (log p_w / n_w - log p_l / n_l) - gamma) (SimPO, arXiv 2405.14734, equation 6)."""
    return _smoothed(keys.beta * _means(pairs) - keys.gamma, keys)


def _cpo(pairs: Answers, keys: PairsSection) -> torch.Tensor:
    """-ls(beta (log p_w - log p_l)) (CPO, arXiv 2401.08417, equation 3)."""
    return _smoothed(_z(pairs, keys), keys)


def _orpo(pairs: Answers, keys: PairsSection) -> torch.Tensor:
    """-beta ls(log odds_w - log odds_l), odds = q / (1 - q) with log q = log p / n (ORPO,
    arXiv 2403.07691, equations 4 and 7)."""
    chosen = pairs.chosen / pairs.chosen_tokens.clamp_min(1)
    rejected = pairs.rejected / pairs.rejected_tokens.clamp_min(1)
    return -keys.beta * logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def _log_odds(log_q: torch.Tensor) -> torch.Tensor:
    """Return log(q / (1 - q)); a q that is rounded to 1, and one of no tokens, has finite odds."""
    least = torch.finfo(log_q.dtype).tiny
    return log_q - torch.log(-torch.expm1(log_q.clamp_max(-least)))


@dataclass(frozen=True)
class PairLossKind:
    """A loss, and what of the config and the data it takes."""

    compute: Loss
    has_reference: bool = True
    smooths: bool = False
    """True if it takes a label smoothing."""
    needs_smoothing: bool = False
    takes_margins: bool = False
    means: bool = False
    """True if its rewards are means over an answer's tokens, as in TRL."""
    sft_weight: float = 0.0
    """The usual weight of the chosen answers' cross-entropy."""


LOSSES: dict[str, PairLossKind] = {
    "sigmoid": PairLossKind(_sigmoid, smooths=True, takes_margins=True),
    "hinge": PairLossKind(_hinge, takes_margins=True),
    "ipo": PairLossKind(_ipo),
    "robust": PairLossKind(_robust, smooths=True, takes_margins=True),
    "sigmoid_norm": PairLossKind(_sigmoid_norm, smooths=True),
    "apo_zero": PairLossKind(_apo_zero),
    "apo_down": PairLossKind(_apo_down, takes_margins=True),
    "exo_pair": PairLossKind(_exo_pair, smooths=True, needs_smoothing=True, takes_margins=True),
    "nca_pair": PairLossKind(_nca_pair),
    "bco_pair": PairLossKind(_bco_pair),
    "sppo_hard": PairLossKind(_sppo_hard),
    "simpo": PairLossKind(_simpo, False, smooths=True, means=True),
    "cpo": PairLossKind(_cpo, False, smooths=True, takes_margins=True, sft_weight=1.0),
    "orpo": PairLossKind(_orpo, False, means=True, sft_weight=1.0),
}
