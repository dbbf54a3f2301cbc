"""`meshloom push RUN`: a run's final model to the Hugging Face Hub, also after a push that failed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.command import parser_of, reporting
from trainer.errors import ConfigError, Problem

DESCRIPTION = """
Push the final model of a run to the Hugging Face Hub, with a model card, in one commit. What an
option does not say is taken from the run's trainer.hub.
"""
EPILOG = """
exit codes: 0 pushed, 64 no such run, or a repository that you may not write, 69 the Hub can't be
reached or did not take it: nothing is lost, and the same command pushes it
"""


@reporting
def main(arguments: Sequence[str], name: str) -> int:
    """Run the command `name`; returns its exit code."""
    parser = parser_of(name, DESCRIPTION, EPILOG)
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder, runs/NAME")
    text = "the repository, owner/name; without an owner, it is yours"
    parser.add_argument("--repository", metavar="NAME", help=text)
    text = "create the repository as a public one, or push to one that is public"
    parser.add_argument("--public", dest="private", action="store_false", default=None, help=text)
    text = "push the checkpoints that the run keeps, too"
    parser.add_argument("--checkpoints", action="store_true", default=None, help=text)
    text = "the certificate for the card (default: certificate.json in the run's folder)"
    parser.add_argument("--certificate", metavar="FILE", help=text)
    options = vars(parser.parse_intermixed_args(arguments))
    folder = options.pop("run")
    from trainer.config.validate import validate
    from trainer.run.resume import FINAL
    from trainer.tools.hub.repository import check_hub, push
    from trainer.tools.report.run_record import read

    run, hub = read(folder), {key: value for key, value in options.items() if value is not None}
    raw = {"hub": (run.section.get("hub") or {}) | hub}
    if "repository" not in raw["hub"]:
        expected = "--repository, or the run's trainer.hub.repository"
        raise ConfigError(Problem(name, "no repository", expected))
    if not (folder / FINAL).is_dir():
        hint = "Run its command again, which goes on with it"
        raise ConfigError(Problem(str(folder), "no final/ in it", "a run that has ended", hint))
    section, problems = validate(raw)
    if problems or section.hub is None:
        raise ConfigError(*problems)
    check_hub(section.hub)
    print(f"pushed: {push(folder, section.hub)}")
    return 0
