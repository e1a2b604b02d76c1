"""At what an engine ends a turn unasked: the tokenizer's end of text, and every `eos_token_id` of the model's generation_config.json.

vLLM adds them to the stop ids of every call. They are named here, so that a transcript knows the token that ended its turn
for what it is; many models have several (Qwen: `<|im_end|>` and `<|endoftext|>`; Llama 3: three).
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cluster.failures import SettingsError

GENERATION_CONFIG = "generation_config.json"


def engine_stops(tokenizer: Any, stops: Iterable[int]) -> set[int]:
    """`stops` and the tokenizer's end of text, if it has one."""
    end = tokenizer.eos_token_id
    return {*stops} if end is None else {*stops, int(end)}


def generation_stops(folder: Path) -> tuple[int, ...]:
    """The end tokens that a model's folder names for generation; none where it says nothing. Raises SettingsError for a damaged file."""
    file = folder / GENERATION_CONFIG
    if not file.is_file():
        return ()
    try:
        named = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise SettingsError(f"{file} is not the JSON of a generation config: {error}; copy the model again") from error
    ids = named if isinstance(named, list) else [] if named is None else [named]
    if not all(isinstance(i, int) for i in ids):
        raise SettingsError(f"{file}: eos_token_id is {named!r}, not token ids; copy the model again")
    return tuple(ids)
