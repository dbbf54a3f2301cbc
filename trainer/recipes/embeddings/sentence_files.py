"""The files beside a model's own by which sentence-transformers opens its folder.

Written by the names that all its versions read: `modules.json`, a folder for each module.
"""

from __future__ import annotations

import json
from pathlib import Path

from trainer.config.sections.embeddings import EmbeddingsSection
from trainer.storage import Json

MODES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
MODES_LATER = ("weightedmean_tokens", "lasttoken")
"""The names of poolings, as `pooling_mode_...` in a module's config."""
CHOSEN = {"cls": "cls_token", "mean": "mean_tokens", "lasttoken": "lasttoken"}


def write_modules(folder: Path, options: EmbeddingsSection, width: int, length: int) -> None:
    """Write how the model of a folder becomes a `SentenceTransformer`."""
    names = ["Transformer", "Pooling", *(["Normalize"] if options.normalize else [])]
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{name}" if index else "",
            "type": f"sentence_transformers.models.{name}",
        }
        for index, name in enumerate(names)
    ]
    every = (*MODES, *MODES_LATER)
    pooling: Json = {
        "word_embedding_dimension": width,
        **{f"pooling_mode_{mode}": mode == CHOSEN[options.pooling] for mode in every},
        "include_prompt": options.include_prompt,
    }
    whole = {
        "prompts": {name: options.prompts.get(name, "") for name in ("query", "document")},
        "default_prompt_name": None,
        "similarity_fn_name": options.similarity,
    }
    _write(folder / "modules.json", modules)
    _write(folder / "sentence_bert_config.json", {"max_seq_length": length, "do_lower_case": False})
    _write(folder / "config_sentence_transformers.json", whole)
    for index, name in enumerate(names[1:], 1):
        (folder / f"{index}_{name}").mkdir(exist_ok=True)
        _write(folder / f"{index}_{name}" / "config.json", pooling if name == "Pooling" else {})


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
