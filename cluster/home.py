"""Where prepared models and encoders live: `PASTCAST_HOME`, by default `pastcast` under the user's cache folder."""

import os
from pathlib import Path


def pastcast_home() -> Path:
    """The cache folder of this user; not created here."""
    configured = os.environ.get("PASTCAST_HOME")
    if configured:
        return Path(configured).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache).expanduser() if cache else Path.home() / ".cache") / "pastcast"


def model_path(name: str) -> Path:
    """The folder of a prepared model or encoder if `name` names one, else `name` itself as a path."""
    prepared = pastcast_home() / "models" / name
    return prepared if prepared.is_dir() else Path(name).expanduser()
