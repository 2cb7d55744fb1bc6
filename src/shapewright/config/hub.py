"""Fetch a config.json, and nothing else, from a Hugging Face hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from shapewright.config.validate import shown
from shapewright.errors import ConfigError, MissingExtraError, UnknownModelError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(@[\w./-]{1,100})?", re.ASCII)


def is_hub_id(source: str) -> bool:
    """Whether a text reads like ``organisation/name``, with ``@revision`` behind it or not.

    >>> is_hub_id("meta-llama/Llama-3.1-8B"), is_hub_id("gpt2"), is_hub_id("./a/b")
    (True, False, False)
    """
    return _HUB_ID.fullmatch(source) is not None


def fetch_config(hub_id: str) -> Path:
    """Download config.json of a hub repository, or find it in the local cache.

    No weights and no code are fetched. The environment variable ``HF_ENDPOINT`` names another hub.

    Args:
        hub_id: ``organisation/name`` or ``organisation/name@revision``.

    Raises:
        MissingExtraError: huggingface_hub is not installed.
        UnknownModelError: no such repository, or one without a config.json.
        ConfigError: the hub cannot be reached or refuses access.
    """
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError:
        raise MissingExtraError(
            f"reading {shown(hub_id)} from the hub needs huggingface_hub, which is not installed; "
            f"run pip install 'shapewright[hub]', or download its config.json and give the path"
        ) from None
    repo_id, _, revision = hub_id.partition("@")
    endpoint = os.environ.get("HF_ENDPOINT") or None
    # One line is said about a failure, here; the library would add one for each try.
    huggingface_hub.logging.set_verbosity_error()
    try:
        # The library reads HF_ENDPOINT once, at import; passing it makes a later change count too.
        path = huggingface_hub.hf_hub_download(repo_id, "config.json", revision=revision or None, endpoint=endpoint)
    except errors.GatedRepoError:
        raise ConfigError(
            f"{shown(repo_id)} is gated; accept its terms on the hub and log in with 'hf auth login', "
            f"or download its config.json and give the path"
        ) from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
        if isinstance(error, errors.LocalEntryNotFoundError):
            raise _unreachable(repo_id, endpoint, error) from None
        raise UnknownModelError(
            f"the hub has no config.json at {shown(hub_id)} ({type(error).__name__}); check its spelling"
        ) from None
    except Exception as error:  # whatever transport the library uses raises errors of its own
        raise _unreachable(repo_id, endpoint, error) from None
    return Path(path)


def _unreachable(repo_id: str, endpoint: str | None, error: Exception) -> ConfigError:
    where = shown(endpoint) if endpoint else "the Hugging Face hub"
    reason = " ".join(str(error).split())[:120].rstrip(" .:,") or type(error).__name__
    return ConfigError(
        f"cannot fetch the config of {shown(repo_id)} from {where}: {reason}; check the network and HF_ENDPOINT, "
        f"or give the path of a config.json"
    )
