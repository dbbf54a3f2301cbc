"""A repository on the Hub: checked before a run begins; the model is pushed in one commit."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import get_session, set_client_factory

from trainer.config.sections.trainer import HubSection
from trainer.errors import ConfigError, HubError, Problem
from trainer.run.start.folder import not_pushed, note_pushed
from trainer.tools.hub.card import CARD, read_certificate
from trainer.tools.hub.repository_files import files_of

MODEL = r"[^/]+\.safetensors(\.index\.json)?|(adapter_|generation_|quantization_)?config\.json"
"""Files that an earlier push may have left, and that would be read as parts of the new model."""
SILENCE = 300.0
"""The timeout of a request to the Hub, in seconds, unless its client has one."""
NO_HUB = (
    "Without a Hub, leave out trainer.hub: `meshloom push RUN --to FOLDER` writes a finished run's "
    "model and card to a folder"
)
NO_ANSWER = f"HF_ENDPOINT names another Hub, HTTPS_PROXY a proxy. {NO_HUB}"
"""The hints for a Hub that may not be used, and for one that does not answer."""


def open_hub(section: HubSection) -> Callable[[Path], str]:
    """Check that the repository can be written, and create it if needed; return a push function.

    The function pushes a run's folder and returns the repository's address, as `push` does. Raises
    ConfigError if the Hub is set to offline, if the token, name or permission is wrong, if the
    certificate can't be read, or if a repository that should be private is public. Raises HubError
    if the Hub can't be reached.
    """
    problem = partial(Problem, f"trainer.hub: {section.repository}")
    expected = "a repository on the Hub that you may write"
    if constants.HF_HUB_OFFLINE:
        hint = f"Unset it. {NO_HUB}"
        raise ConfigError(problem("HF_HUB_OFFLINE is set", hint=hint))
    if section.certificate is not None:
        read_certificate(Path(section.certificate))
    try:
        client = get_session()
        if client.timeout.read is None:
            hooks = client.event_hooks
            make = partial(type(client), event_hooks=hooks, follow_redirects=True, timeout=SILENCE)
            set_client_factory(make)
        api = HfApi()
        name = api.create_repo(section.repository, private=section.private, exist_ok=True).repo_id
        public = not api.model_info(name).private
        # so small a file is not uploaded, but the Hub rejects a user who may not write
        api.preupload_lfs_files(name, [CommitOperationAdd(CARD, b"# A model\n")])
    except Exception as error:  # the Hub's, its client's or the network's
        if not isinstance(error, HFValidationError) and not _refuses(error):
            raise HubError(problem(_unanswered(error), hint=NO_ANSWER)) from error
        hint = "`hf auth login` or the variable HF_TOKEN gives a token that may write"
        raise ConfigError(problem(_shown(error), expected, hint)) from error
    if public and section.private:
        hint = "Make it private in its settings, or set trainer.hub.private=false"
        raise ConfigError(problem("it is public", "a private one", hint))
    return partial(push, section, name)


def push(section: HubSection, name: str, folder: Path) -> str:
    """Push the run in `folder` to the repository `name` in one commit; return its address.

    Raises HubError if the push fails, for whatever reason, and DiskError if its record in `folder`
    can't be written.
    """
    try:
        files = files_of(folder, name, section.certificate, section.checkpoints)
        earlier = re.compile(f"{MODEL}|checkpoints/.*" if section.checkpoints else MODEL)
        old = {file for file in HfApi().list_repo_files(name) if earlier.fullmatch(file)}
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            CommitOperationAdd(*file) for file in files.items()
        ]
        operations += map(CommitOperationDelete, sorted(old - files.keys()))
        message = f"Push the model of {folder.resolve().name}"
        address = str(HfApi().create_commit(name, operations, commit_message=message).repo_url)
    except Exception as error:  # the Hub's, its client's, the network's or Xet's
        cause = error.__cause__ if type(error) is RuntimeError and error.__cause__ else error
        if isinstance(cause, HubError):  # raised by a signal
            raise cause from None
        raise not_pushed(folder, _shown(cause)) from error
    note_pushed(folder, section)
    return address


def _refuses(error: Exception) -> bool:
    """Return True if a Hub has answered that the token, the name or the permission is wrong."""
    if not isinstance(error, HfHubHTTPError) or _is_page(error):
        return False
    return error.response.status_code in (400, 401, 403, 404)


def _unanswered(error: Exception) -> str:
    """Return the text, with the Hub's address, of an error that says nothing of a user's rights."""
    if isinstance(error, HfHubHTTPError):
        return _shown(error)
    if isinstance(error, ValueError | LookupError):  # of JSON, or of a key that is missing there
        return f"{_address()} answers, but not as a Hub does ({_shown(error)})"
    return f"no answer from {_address()} ({_shown(error)})"


def _is_page(error: HfHubHTTPError) -> bool:
    """Return True if the answer is a page for people, as those of proxies and other servers."""
    return "html" in error.response.headers.get("content-type", "")


def _shown(error: BaseException) -> str:
    if isinstance(error, HfHubHTTPError):
        text = error.server_message or error.response.reason_phrase
        text = "a page of HTML, as no Hub does" if _is_page(error) else text
        return f"{_address()} answers {error.response.status_code}, {text}"[:300].rstrip(".")
    return " ".join(f"{type(error).__name__}: {error}".split())[:300].rstrip(".")


def _address() -> str:
    """Return the address of the Hub, without a password."""
    return re.sub("//[^/]*@", "//", constants.ENDPOINT)
