"""`meshloom push RUN`: a run's model to the Hugging Face Hub, also after a push that failed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from trainer.command import parser_of, reporting
from trainer.config.sections.trainer import HubSection
from trainer.errors import ConfigError, Problem
from trainer.storage import check_new

DESCRIPTION = """
Push the final model of a run to the Hugging Face Hub, with a model card, in one commit. Options
that are not given are taken from the run's trainer.hub. With --to, write the same files to a
folder; that needs no Hub and no network.
"""
EPILOG = (
    "\nexit codes: 0 pushed or written, 64 the run, repository or folder is wrong,\n"
    "            69 the Hub did not take it, 74 the disk\n"
)


@reporting
def main(arguments: Sequence[str], name: str) -> int:
    parser = parser_of(name, DESCRIPTION, EPILOG)
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder, runs/NAME")
    text = "owner/name, or a name in your account; with --to, the name in the card"
    parser.add_argument("--repository", metavar="NAME", help=text)
    where = parser.add_mutually_exclusive_group()
    text = "write to a new or empty folder, in place of the Hub"
    where.add_argument("--to", type=Path, metavar="FOLDER", help=text)
    text = "create a public repository, or push to one that is public"
    where.add_argument("--public", dest="private", action="store_false", default=None, help=text)
    text = "push the checkpoints that the run keeps, too"
    parser.add_argument("--checkpoints", action="store_true", default=None, help=text)
    text = "the certificate for the card (default: certificate.json in the run's folder, or here)"
    parser.add_argument("--certificate", metavar="FILE", help=text)
    options = vars(parser.parse_intermixed_args(arguments))
    folder = options.pop("run")
    target = options.pop("to")
    if target is None:
        section = _section_of(folder, options)
        from trainer.tools.hub.repository import open_hub

        print(f"pushed: {open_hub(section)(folder)}")
        return 0
    check_new(target)
    options["repository"] = options["repository"] or target.absolute().name
    section = _section_of(folder, options)
    from trainer.tools.hub.repository_files import files_of, write_folder

    files = files_of(folder, section.repository, section.certificate, section.checkpoints)
    write_folder(target, files)
    command = f"hf upload owner/name {quote(str(target))}"
    print(f"written: {target}, with its card README.md. `{command}` uploads it")
    return 0


def _section_of(folder: Path, options: dict[str, object]) -> HubSection:
    """Return the run's trainer.hub with the options that are given.

    Raises ConfigError if one is wrong, if no repository is named, or if the run has no final model
    that is safe to read.
    """
    from trainer.config.validate import validate
    from trainer.models.door import check_folder
    from trainer.tools.report.run_record import read

    hub = read(folder).section.get("hub") or {}
    hub |= {key: value for key, value in options.items() if value is not None}
    section, problems = validate({"hub": hub})
    if "repository" not in hub:
        name = "trainer.hub.repository"
        hint = "Name it by --repository, or write the files to a folder by --to"
        problems = [Problem(name, "the run's config has none", '"owner/name"', hint)]
    if not (folder / "final").is_dir():
        hint = "Run its command again, which resumes it"
        problems = [Problem(str(folder), "no final/ in it", "a run that has ended", hint)]
    check_folder(folder / "final")
    if problems or section.hub is None:
        raise ConfigError(*problems)
    return section.hub
