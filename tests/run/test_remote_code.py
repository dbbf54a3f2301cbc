"""A model whose own code comes with its folder, which has no `generate`, from start to export."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.commands import run, write_job
from tests.support.messages import shows
from trainer.data.text.tokenizer import embedded_tokenizer

CODE = """
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast


class MeanConfig(PretrainedConfig):
    model_type = "mean"

    def __init__(self, vocab_size=4096, hidden_size=16, num_hidden_layers=2, **kwargs):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers = num_hidden_layers
        super().__init__(**kwargs)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.mix = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x):
        count = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[None, :, None]
        return x + torch.tanh(self.mix(x.cumsum(1) / count))


class MeanModel(PreTrainedModel):
    config_class = MeanConfig
    base_model_prefix = "model"

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.post_init()

    def get_input_embeddings(self):
        return self.embed_tokens

    def forward(self, input_ids=None, use_cache=None, **kwargs):
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return BaseModelOutputWithPast(last_hidden_state=x)


class MeanForCausalLM(PreTrainedModel):
    config_class = MeanConfig
    base_model_prefix = "model"

    def __init__(self, config):
        super().__init__(config)
        self.model = MeanModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids=None, labels=None, use_cache=None, **kwargs):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)
"""


@pytest.mark.more
def test_it_trains_and_says_that_it_writes_no_sample(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "modeling_mean.py").write_text(CODE)
    classes = {"AutoConfig": "MeanConfig", "AutoModelForCausalLM": "MeanForCausalLM"}
    auto = {name: f"modeling_mean.{kind}" for name, kind in classes.items()}
    content = {"model_type": "mean", "architectures": ["MeanForCausalLM"], "auto_map": auto}
    (folder / "config.json").write_text(json.dumps(content))
    made = (
        "import sys; from transformers import AutoConfig, AutoModelForCausalLM as A; trusted = "
        "{'trust_remote_code': True}; A.from_config(AutoConfig.from_pretrained(sys.argv[1], "
        "**trusted), **trusted).save_pretrained(sys.argv[1])"
    )
    assert run(sys.executable, "-c", made, str(folder)).code == 0
    (folder / "config.json").write_text(json.dumps(content))
    embedded_tokenizer(tmp_path / "cache").save_pretrained(folder)
    job = write_job(tmp_path)
    raw = json.loads(job.read_text())
    trusted = {"name_or_path": str(folder), "trust_remote_code": True}
    raw["trainer"] |= {"model": trusted, "generate": {"prompt": "auto", "tokens": 2}, "steps": 2}
    job.write_text(json.dumps(raw))
    result = run(
        sys.executable, "launch/train.py", "--config", str(job), f"trainer.run.folder={tmp_path}"
    )
    assert result.code == 0, result.output
    shows(result.output, "no sample", "MeanForCausalLM")
