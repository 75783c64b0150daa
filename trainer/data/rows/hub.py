"""Whether the Hugging Face Hub can be reached, found out once and early.

Its libraries try each file six times, half a minute in all, before they look into their cache or give up. They read
HF_HUB_OFFLINE when they are imported, so the answer has to be there before.
"""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit
from urllib.request import getproxies

from trainer.data.rows.sources import is_local
from trainer.files import expanded
from trainer.schema import Config, as_sources

CONNECT_TIMEOUT_S = 5.0


def hub_names(config: Config) -> list[str]:
    """Models, tokenizers and data sets of the config that only the Hub or its cache can give."""
    models = [name for name in (config.model.name, config.data.tokenizer) if name and name != "auto"]
    missing = [name for name in models if not expanded(name).is_dir()]
    sources = [s.path for s in as_sources([*config.data.train, *config.data.eval]) if not is_local(s.path)]
    return [name for name in (*missing, *sources) if not name.startswith(("builtin:", "/", ".", "~"))]


def is_hub_reachable() -> bool:
    """Whether the Hub's host takes a connection; True behind a proxy, which only the libraries can ask."""
    address = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    if address.scheme in getproxies():
        return True
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        with socket.create_connection((address.hostname or "", port), timeout=CONNECT_TIMEOUT_S):
            return True
    except OSError:
        return False


def settle_offline(config: Config) -> None:
    """Tell the Hub's libraries to use their cache alone when something is asked of a Hub that cannot be reached."""
    if hub_names(config) and "HF_HUB_OFFLINE" not in os.environ and not is_hub_reachable():
        os.environ["HF_HUB_OFFLINE"] = "1"
