"""How many ranks a token goes to with experts over several: what a uniform router would choose."""

from __future__ import annotations

from fractions import Fraction
from math import comb


def share_of_tokens(experts: int, chosen: int, ranks: int) -> Fraction:
    """Return the share of all tokens that go to each of the ranks that divide the experts.

    A token goes to a rank unless its `chosen` experts, all different, are all on other ranks.
    """
    elsewhere = comb(experts - experts // ranks, chosen)
    return 1 - Fraction(elsewhere, comb(experts, chosen))
