"""The kind of the dispatch modes that run within a recomputed block."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class BlockMode(TorchDispatchMode):
    """A dispatch mode for a block that may use flex attention, and have compiled parts."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled parts of a block run compiled, as PyTorch's own modes here do."""
        return True
