"""Files from the Hugging Face hub, through its own client, which is an extra."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from osora_cli.errors import SetupError

INSTALL_COMMAND = "python -m pip install huggingface_hub"

Progress = Callable[[str], None]


def hub_download(repo: str, file: str, folder: Path | None = None, *, progress: Progress | None = None) -> Path:
    """One file of a model repository, after its licence has been said.

    Args:
        repo: `org/name`.
        file: path inside the repository.
        folder: where it is put, under its own name. None: the hub client's cache.
        progress: called with lines for the user; the first is the licence.

    Raises:
        SetupError: the client is not installed, there is no network, or the hub has no such file.
    """
    client = _client(f"hf://{repo}/{file}")
    say = progress or (lambda _: None)
    try:
        say(f"licence of {repo}: {_licence(client, repo)}")
        say(f"fetching {file}")
        path = client.hf_hub_download(repo_id=repo, filename=file, local_dir=None if folder is None else str(folder))
    # The client raises its own errors, those of whichever HTTP library it is built on, and OSError.
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise SetupError(
            f"the hub did not give `hf://{repo}/{file}`: {reason[0]}",
            hint="fetch it where there is a network, and name the local file in from_pretrained",
        ) from error
    return Path(path)


def _client(wanted: str) -> ModuleType:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise SetupError(f"`{wanted}` needs the hub's client, which is not installed", hint=INSTALL_COMMAND) from error


def _licence(client: ModuleType, repo: str) -> str:
    """What the repository's model card declares."""
    card = client.HfApi().model_info(repo).card_data
    declared = getattr(card, "license", None)
    return str(declared) if declared else f"not declared in its model card; read it at hf.co/{repo}"
