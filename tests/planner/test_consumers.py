"""The names of a plan's largest consumers, for a reader who knows no operators of PyTorch."""

from __future__ import annotations

from trainer.tools.planner.fakes.ledger import Allocation, Ledger


def test_what_no_module_made_is_named_by_what_it_is() -> None:
    live = [
        Allocation(8, "optimizer", "", "zeros_like", 0),
        Allocation(4, "optimizer", "", "zeros", 0),
        Allocation(2, "temporaries", "", "_to_copy", 0),
        Allocation(1, "activations", "model.layers.3.mlp", "_to_copy", 0),
    ]
    ledger = Ledger()
    ledger.begin("step 2")
    ledger.allocations += live
    [peak] = ledger.peaks()
    sizes = peak.by_consumer
    assert list(sizes.values()) == [12, 2, 1]
    zeros, cast, module = sizes
    assert zeros.startswith("optimizer of ") and not zeros.endswith("zeros_like")
    assert "cast" in cast and "_" not in cast
    assert "model.layers.*.mlp" in module
