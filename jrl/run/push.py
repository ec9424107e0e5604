"""Pushing an exported directory to the Hugging Face Hub.

The token is huggingface_hub's: HF_TOKEN, or that of ``hf auth login``; HF_ENDPOINT names another
hub. Nothing is sent before ``--push`` asks for it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jrl.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def check_push(name: str) -> None:
    """Checks a name and the token before an export that takes minutes.

    Raises:
      UserError: the name is not OWNER/NAME, there is no token, or the Hub refuses it.
    """
    if not _NAME.fullmatch(name):
        raise UserError(f"--push {name!r}: write OWNER/NAME, such as --push me/sorter")
    import huggingface_hub

    if huggingface_hub.get_token() is None:
        raise UserError(
            f"--push {name}: there is no token of the Hub; set HF_TOKEN, or run `hf auth login`"
        )
    _ask(name, _api().whoami)


def push_directory(directory: Path, name: str, *, private: bool = False) -> str:
    """Uploads a directory as one commit, to a repository that is created if there is none.

    Args:
      directory: from ``export_run``.
      name: OWNER/NAME.
      private: of a new repository.

    Returns:
      The address of the model.

    Raises:
      UserError: the Hub cannot be reached, or refuses.
    """
    api = _api()
    _ask(name, lambda: api.create_repo(name, private=private, exist_ok=True))
    _ask(
        name,
        lambda: api.upload_folder(
            repo_id=name, folder_path=str(directory), commit_message="Export of a JRL run"
        ),
    )
    return f"{api.endpoint}/{name}"


def _api() -> Any:
    import huggingface_hub

    return huggingface_hub.HfApi()


def _ask(name: str, call: Any) -> Any:
    try:
        return call()
    except Exception as error:  # of httpx, of the Hub, of files
        lines = [line for line in str(error).splitlines() if line.strip()]
        reason = lines[-1] if lines else type(error).__name__
        raise UserError(f"--push {name}: {reason:.300}") from None
