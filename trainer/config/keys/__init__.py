"""The tables of DeepSpeed's keys (keys.txt), optimizers (optimizers.txt) and schedulers."""

from __future__ import annotations

from pathlib import Path

from trainer.config.keys.grammar import parse
from trainer.config.keys.hints import useless
from trainer.config.keys.key import Key


def _table(name: str) -> dict[str, Key]:
    return parse(Path(__file__).with_name(name).read_text(encoding="utf-8"))


def _by_type(table: dict[str, Key]) -> dict[str, dict[str, Key]]:
    """Return the parameters of each type that is not refused, by the type's name."""
    sections = [name for name, key in table.items() if key.kind == "section" and not key.refused]
    split = [(path.partition("."), key) for path, key in table.items()]
    return {
        section: {name: key for (owner, dot, name), key in split if dot and owner == section}
        for section in sections
    }


KEYS = _table("keys.txt")
"""Each key of DeepSpeed's JSON, by its dotted path."""
RENAMED = {path: key.now for path, key in KEYS.items() if key.now}
"""Other names that DeepSpeed accepts for a key."""
DIFFERS = {path: key.differs for path, key in KEYS.items() if key.differs}
"""Keys whose default differs from DeepSpeed's, with the reason; `--dry-run` shows it."""
LOW_PRECISION = tuple(path for path in DIFFERS if KEYS[path].kind != "section")
"""The keys of `DIFFERS` whose default depends on the precision."""
RECOMPUTES = "activation_checkpointing."
"""The section whose keys all have the same effect here: blocks are recomputed."""

_OPTIMIZERS = _table("optimizers.txt")
OPTIMIZERS = _by_type(_OPTIMIZERS)
SCHEDULERS = _by_type(_table("schedulers.txt"))
_PARAMETERS = [
    (f"{place}.params.{name}", key)
    for place, types in {"optimizer": OPTIMIZERS, "scheduler": SCHEDULERS}.items()
    for table in types.values()
    for name, key in table.items()
]
PARAMETERS = tuple(
    dict.fromkeys(path for path, key in _PARAMETERS if not (key.refused or key.idle))
)
"""The parameters of all optimizers and schedulers, by their dotted paths."""
AUTOS = {
    path: key.when_auto for path, key in [*KEYS.items(), *_PARAMETERS] if key.when_auto is not None
}
"""The values in place of "auto" that need not be computed: those of Hugging Face's Trainer."""
UNBUILT = tuple(name for name in OPTIMIZERS if _OPTIMIZERS[name].idle)
"""The optimizers of the table that no engine runs; each engine refuses them with its reason."""
NOT_OFFERED = {name.lower(): why for name, why in useless(_OPTIMIZERS).items() if "." not in name}
"""The reason for each optimizer that can't be chosen, by its name in lower case."""
