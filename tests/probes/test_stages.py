"""Whether a model can be cut into pipeline stages: planted faults."""

from __future__ import annotations

import pytest

from tests.support.messages import raises, shows
from tests.support.training import LLAMA, spec_of
from trainer.errors import ConfigError
from trainer.probes.questions.stages import check_cut


def test_too_few_blocks():
    with raises(ConfigError, "pipeline.stages", "3 blocks", "4 pipeline", "least"):
        check_cut(spec_of(LLAMA), 4)


def test_a_model_that_computes_beside_its_blocks_is_refused(monkeypatch):
    """The check compares numbers: it finds a stage that scales its input."""
    from transformers.models.llama.modeling_llama import LlamaModel

    real = LlamaModel.forward

    def scaled(self, *args, **kwargs):
        output = real(self, *args, **kwargs)
        output.last_hidden_state = output.last_hidden_state * 1.5
        return output

    monkeypatch.setattr(LlamaModel, "forward", scaled)
    with pytest.raises(ConfigError) as caught:
        check_cut(spec_of(LLAMA), 2)
    shows(caught.value, "cut", "pipeline.stages to 1")


def test_a_shared_module_is_refused(monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel

    real_layer, real_init = LlamaDecoderLayer.forward, LlamaModel.__init__

    def init(self, config):
        real_init(self, config)
        for layer in self.layers:
            object.__setattr__(layer, "shared", self.norm)

    monkeypatch.setattr(LlamaModel, "__init__", init)
    monkeypatch.setattr(
        LlamaDecoderLayer,
        "forward",
        lambda self, hidden, *args, **kwargs: real_layer(
            self, self.shared(hidden), *args, **kwargs
        ),
    )
    with raises(ConfigError, "cut", "model.norm"):
        check_cut(spec_of(LLAMA), 2)
