"""Does a tiny copy run at all?"""

from __future__ import annotations

from trainer.models.own.module import LARGEST_BUILT
from trainer.probes.inputs import logits_of, sequence_of
from trainer.probes.probe import Finding, observe
from trainer.probes.question import Need, Probed, Question


def is_tried(about: Probed) -> bool:
    """Return True if a tiny copy runs, as far as is known."""
    return about.is_tried


def is_language(about: Probed) -> bool:
    """Return True for a language model whose tiny copy runs."""
    return about.is_tried and about.is_language


def is_own_module(about: Probed) -> bool:
    """Return True for your own module, if it is not too large to be tried."""
    return about.is_tried and not about.is_language


ALL = Need("all models", is_tried)
LANGUAGE = Need("language models", is_language)
OWN = Need("your own modules", is_own_module)


def _ask(about: Probed) -> None:
    name = about.spec.name
    if not about.is_language:
        if about.spec.tiny.copy is None and about.spec.parameters > LARGEST_BUILT:
            about.give_up()
            about.learn(f"{name} is too large to be tried before it is trained")
        return
    reason = observe(lambda: _reason(about))
    if reason:
        text = reason.actual if isinstance(reason, Finding) else reason
        about.give_up()
        unproven = f"it is not proven that {name} is causal, nor that its loss is ours"
        about.learn(f"{unproven}: {text}", unproven=text)


def _reason(about: Probed) -> str:
    small, model = about.tiny
    spreads = logits_of(model.eval(), sequence_of(small)[None]).std(1)
    return "" if float(spreads.max()) > 0 else "its logits are not finite, or all the same"


QUESTION = Question(
    name="whether it runs",
    key="trainer.model",
    need=Need("all models", lambda about: True),
    ask=_ask,
    holds="A tiny copy runs, and its logits are finite and not all the same",
    otherwise="a note that nothing is proven of it; unsupported on several processes",
    cost="0.05 s",
)
