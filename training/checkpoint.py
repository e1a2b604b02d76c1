"""A checkpoint: a folder that vLLM loads as it is, with a record of what it came from.

The weights are bfloat16 safetensors with an adapter merged in (and kept beside them); the tokenizer's files are the
base's, byte for byte, so that the trainee's ids keep their meaning. A folder is written under a staging name and gets
its own name at once: a checkpoint is complete or it is not there.
"""

import logging
import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.failures import DataError, PastcastError, SettingsError
from cluster.record import Record
from training.examples import RowSummary

RECORD = "checkpoint.json"
ADAPTER = "adapter"
"""Folder of the unmerged adapter inside a checkpoint."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
"""What is copied from the base, where it has it."""

MAXIMUM_GAP = 1.0
"""Nats, on one token. Two correct bfloat16 forwards differ by up to 0.2 (a logit of 16 to 32 has steps of 0.125)."""
MAXIMUM_MEAN_GAP = 0.2
"""Nats. Correct forwards: about 0.04; a misloaded tensor: whole nats."""

_logger = logging.getLogger(__name__)


class CheckpointOrigin(Record):
    """What a checkpoint came from; equal origins on one machine give equal weights."""

    base: str
    base_fingerprint: str
    """`cluster.fingerprint.weights_hash` of the base's folder."""
    run: str
    """Name of the run's directory."""
    run_fingerprint: str
    rows: RowSummary
    settings: dict[str, Any]
    """The `training` settings without the output path."""
    losses: tuple[float, ...]
    """Mean loss over the learned tokens of each optimizer step, nats."""


class Verification(Record):
    """How vLLM's continuation compares with a forward of transformers over the same ids."""

    tokens: int
    """Ids vLLM generated greedily, over all prompts."""
    largest_gap: float
    """Nats: the largest difference between the two log-probabilities of a generated id."""
    mean_gap: float
    largest_regret: float
    """Nats: how much more likely the id is that transformers would have chosen; 0 where both choose the same."""

    @property
    def agrees(self) -> bool:
        """Whether the differences are those of rounding."""
        gaps = (self.largest_gap, self.mean_gap, self.largest_regret)
        return all(math.isfinite(g) for g in gaps) and (
            self.largest_gap <= MAXIMUM_GAP and self.mean_gap <= MAXIMUM_MEAN_GAP and self.largest_regret <= MAXIMUM_GAP
        )


class CheckpointSummary(Record):
    """What a training made."""

    path: Path
    origin: CheckpointOrigin
    prompts: tuple[tuple[int, ...], ...]
    """Openings of a few training rows: what an engine that loads the checkpoint is asked to continue."""
    steps: int
    tokens: int
    """Read in all, padding excluded."""
    seconds: float
    """Of the optimizer steps, without loading and export."""
    verification: Verification | None = None
    """None until an engine has loaded it."""

    @property
    def rows(self) -> RowSummary:
        """What became of the run's forecasts."""
        return self.origin.rows

    @property
    def tokens_per_second(self) -> float:
        """Mean speed."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def staging_path(out: Path) -> Path:
    """Where a checkpoint is written before it has its own name."""
    return out.with_name(f".{out.name}.part")


def unverified_path(out: Path) -> Path:
    """Where a checkpoint lies that no engine has loaded yet."""
    return out.with_name(f".{out.name}.unverified")


def refuse_existing(out: Path) -> None:
    """Raises SettingsError if something has the checkpoint's name already."""
    if out.exists():
        raise SettingsError(f"{out} exists already; remove it or choose another training.output")


def export_checkpoint(model: Any, tokenizer_source: Path, out: Path, origin: CheckpointOrigin) -> None:
    """Write a trained model to `out`. The model is used up: its adapter is merged and its weights become bfloat16.

    Raises SettingsError if `out` exists, DataError if a weight is not finite.
    """
    import torch
    from peft import PeftModel

    refuse_existing(out)
    for name, weight in model.named_parameters():
        if not bool(torch.isfinite(weight).all()):
            raise DataError(f"checkpoint {out}: weight {name} is not finite; lower training.learning_rate")
    staging = staging_path(out)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    if isinstance(model, PeftModel):
        model.save_pretrained(staging / ADAPTER)
        model = model.merge_and_unload()
    model.to(torch.bfloat16).save_pretrained(staging)
    for name in TOKENIZER_FILES:
        (staging / name).unlink(missing_ok=True)
        if (tokenizer_source / name).is_file():
            shutil.copyfile(tokenizer_source / name, staging / name)
    (staging / RECORD).write_text(origin.model_dump_json(indent=1) + "\n")
    _sync(staging)
    publish(staging, out)


def publish(staging: Path, out: Path) -> None:
    """Give a complete folder its name. Raises SettingsError if the name is taken."""
    refuse_existing(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    staging.rename(out)


def read_origin(checkpoint: Path) -> CheckpointOrigin:
    """What a checkpoint came from. Raises DataError if the folder is not one of ours."""
    file = checkpoint / RECORD
    if not file.is_file():
        raise DataError(f"{checkpoint} is not a checkpoint: {RECORD} is missing")
    return CheckpointOrigin.model_validate_json(file.read_text())


def verify_checkpoint(
    path: Path, prompts: Sequence[Sequence[int]] = (), new_tokens: int = 16, max_model_len: int = 1024
) -> Verification:
    """Load a checkpoint in a real vLLM engine, generate greedily, and score the same ids with transformers.

    `prompts` are token ids; without any, a short one of the tokenizer's own. The engine lives in this process and takes
    its memory with it when the process ends, so call this in a process of its own (`training.launch`).

    Raises PastcastError with both figures if the two disagree by more than rounding explains.
    """
    # Read by vLLM when it is imported: the engine's core stays in this process.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    if not prompts:
        prompts = [
            AutoTokenizer.from_pretrained(path).encode("The question resolves on the day", add_special_tokens=False)
        ]
    room = max_model_len - new_tokens
    prompts = [list(p)[:room] for p in prompts]
    engine = LLM(
        model=str(path), dtype="bfloat16", enforce_eager=True, max_model_len=max_model_len, max_num_seqs=len(prompts)
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, logprobs=0, detokenize=False)
    outputs = engine.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], sampling, use_tqdm=False)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    gaps: list[float] = []
    regrets: list[float] = []
    for prompt, output in zip(prompts, outputs, strict=True):
        completion = output.outputs[0]
        generated = list(completion.token_ids)
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *generated]])).logits[0].float()
        distribution = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        for token, scored, row in zip(generated, completion.logprobs, distribution, strict=True):
            gaps.append(abs(scored[token].logprob - row[token].item()))
            regrets.append((row.max() - row[token]).item())
    found = Verification(
        tokens=len(gaps), largest_gap=max(gaps), mean_gap=math.fsum(gaps) / len(gaps), largest_regret=max(regrets)
    )
    if not found.agrees:
        raise PastcastError(
            f"checkpoint {path}: vLLM and transformers disagree on the same weights ({found}); the checkpoint is not usable"
        )
    _logger.info("checkpoint %s: vLLM and transformers agree (%s)", path, found)
    return found


def _sync(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
