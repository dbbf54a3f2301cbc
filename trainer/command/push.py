"""`meshloom push RUN`: a run's model to the Hugging Face Hub, also after a push that failed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.command import parser_of, reporting
from trainer.errors import ConfigError, Problem

DESCRIPTION = """
Push the final model of a run to the Hugging Face Hub, with a model card, in one commit. Options
that are not given are taken from the run's trainer.hub.
"""
EPILOG = "\nexit codes: 0 pushed, 64 the run or repository is wrong, 69 the Hub did not take it\n"


@reporting
def main(arguments: Sequence[str], name: str) -> int:
    parser = parser_of(name, DESCRIPTION, EPILOG)
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder, runs/NAME")
    text = "owner/name, or a name in your account"
    parser.add_argument("--repository", metavar="NAME", help=text)
    text = "create a public repository, or push to one that is public"
    parser.add_argument("--public", dest="private", action="store_false", default=None, help=text)
    text = "push the checkpoints that the run keeps, too"
    parser.add_argument("--checkpoints", action="store_true", default=None, help=text)
    text = "the certificate for the card (default: certificate.json in the run's folder, or here)"
    parser.add_argument("--certificate", metavar="FILE", help=text)
    options = vars(parser.parse_intermixed_args(arguments))
    from trainer.config.validate import validate
    from trainer.models.door import check_folder
    from trainer.tools.hub.repository import open_hub
    from trainer.tools.report.run_record import read

    folder = options.pop("run")
    hub = read(folder).section.get("hub") or {}
    hub |= {key: value for key, value in options.items() if value is not None}
    section, problems = validate({"hub": hub})
    if "repository" not in hub:
        name = "trainer.hub.repository"
        hint = "Name it by --repository"
        problems = [Problem(name, "the run's config has none", '"owner/name"', hint)]
    if not (folder / "final").is_dir():
        hint = "Run its command again, which resumes it"
        problems = [Problem(str(folder), "no final/ in it", "a run that has ended", hint)]
    check_folder(folder / "final")
    if problems or section.hub is None:
        raise ConfigError(*problems)
    print(f"pushed: {open_hub(section.hub)(folder)}")
    return 0
