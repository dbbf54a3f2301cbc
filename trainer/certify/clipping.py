"""A limit of the gradient norm that some of the run's steps certainly exceed, and some certainly do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import sqrt

from trainer.certify.small import Small

CLIPPED_STEPS = 3
"""The number of steps whose norms one process computes beforehand."""
APART = 1.01
"""The ratio of two norms at which a limit between them surely separates those of the run."""


def clipping(small: Small, norms: Sequence[float]) -> Small:
    """Set the limit between the two adjacent `norms` that are furthest apart, if the config has one."""
    settings = small.config.settings
    if not float(settings.get("gradient_clipping", 0.0)):
        return small
    low, high = max(pairwise(sorted(norms)), key=lambda pair: pair[1] / pair[0])
    if not high > APART * low:
        less = "all its steps have one gradient norm, which is over the limit or under it: it proves less"
        return replace(small, changes=(*small.changes, less))
    limit = sqrt(low * high)
    steps = lambda over: " and ".join(str(i) for i, norm in enumerate(norms) if (norm > limit) is over)  # noqa: E731
    said = f"gradient_clipping {limit:.4g}: over it in step {steps(True)}, under it in step {steps(False)}"
    config = replace(small.config, settings={**settings, "gradient_clipping": limit})
    return replace(small, config=config, changes=(*small.changes, said))
