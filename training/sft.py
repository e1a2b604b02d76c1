"""Supervised fine-tuning on token-exact rows, with TRL's SFTTrainer.

The trainer gets ids and labels and nothing else: it tokenizes, templates, packs and cuts nothing, so the batch that the
model sees holds our labels. All weights are trained, or a LoRA adapter on every linear layer; master weights are f32,
the arithmetic is bfloat16. The result is exported, but it is not a checkpoint before an engine has loaded it.
"""

import logging
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    TrainerState,
)
from trl import SFTConfig, SFTTrainer

from cluster.config import Settings, TrainingSettings
from cluster.failures import DataError, SettingsError
from cluster.fingerprint import weights_hash
from cluster.home import model_path
from rollout.chat import load_chat
from rollout.run import RunDirectory
from training.checkpoint import CheckpointOrigin, CheckpointSummary, export_checkpoint, refuse_existing, unverified_path
from training.examples import IGNORED, RowSummary, TrainingRow, columns, training_rows
from training.progress import Progress, TrainingProgress

WARM_UP = 0.05
"""Share of the optimizer steps over which the learning rate rises; then it falls to zero as half a cosine."""

_logger = logging.getLogger(__name__)


def train_sft(run: Path, settings: Settings, progress: Progress) -> CheckpointSummary:
    """Fine-tune `settings.training.base` on a run's trajectories and export it to the unverified path of its output.

    Raises SettingsError if the output exists or the base is missing, DataError if no trajectory gives a row.
    """
    training = settings.training
    refuse_existing(training.output)
    base = model_path(training.base)
    if not (base / "config.json").is_file():
        raise SettingsError(f"training.base {training.base}: {base} holds no model; prepare it or name a folder")
    directory = RunDirectory(run)
    rows, summary = run_rows(directory, base, settings)
    _logger.info("%s: %s", run, summary)
    if not rows:
        raise DataError(
            f"{run} gives no training row: {summary}; roll out more of the train split or loosen `training`"
        )

    if training.threads is not None:
        torch.set_num_threads(training.threads)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    reporting = Reporting(progress)
    with tempfile.TemporaryDirectory(prefix="pastcast-sft-") as scratch:
        trainer = make_trainer(
            rows, model, AutoTokenizer.from_pretrained(base), training, Path(scratch), callbacks=[reporting]
        )
        trainer.train()
    origin = CheckpointOrigin(
        base=training.base,
        base_fingerprint=weights_hash(base),
        run=directory.path.resolve().name,
        run_fingerprint=directory.manifest().fingerprint,
        rows=summary,
        settings=training.model_dump(mode="json", exclude={"output"}),
        losses=tuple(reporting.losses),
    )
    out = unverified_path(training.output)
    shutil.rmtree(out, ignore_errors=True)
    export_checkpoint(trainer.model, base, out, origin)
    return CheckpointSummary(
        path=out,
        origin=origin,
        prompts=openings(rows),
        steps=len(reporting.losses),
        tokens=reporting.tokens,
        seconds=reporting.seconds,
    )


def run_rows(directory: RunDirectory, base: Path, settings: Settings) -> tuple[list[TrainingRow], RowSummary]:
    """A run's rows for a trainee whose tokenizer lies in `base`."""
    model = settings.model
    chat = load_chat(base, model.chat, model.tool_parser, model.reasoning_parser, weights_hash(base))
    with directory.ledger() as ledger:
        return training_rows(ledger, directory.events(), chat, settings.training)


def openings(rows: Sequence[TrainingRow], count: int = 2) -> tuple[tuple[int, ...], ...]:
    """What stands before the first learned token of the first rows."""
    return tuple(r.input_ids[: next(i for i, label in enumerate(r.labels) if label != IGNORED)] for r in rows[:count])


def make_trainer(
    rows: Sequence[TrainingRow],
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    settings: TrainingSettings,
    scratch: Path,
    callbacks: Sequence[TrainerCallback] = (),
) -> SFTTrainer:
    """TRL's trainer over exactly these rows; it writes nothing but to `scratch`."""
    datasets.disable_progress_bars()
    on_gpu = torch.cuda.is_available()
    batches = -(-len(rows) // (settings.batch_size * settings.gradient_accumulation))
    arguments = SFTConfig(
        output_dir=str(scratch),
        seed=settings.seed,
        data_seed=settings.seed,
        num_train_epochs=settings.epochs,
        per_device_train_batch_size=settings.batch_size,
        gradient_accumulation_steps=settings.gradient_accumulation,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=round(WARM_UP * batches * settings.epochs),
        train_sampling_strategy="group_by_length",
        bf16=True,
        use_cpu=not on_gpu,
        # Costs a fifth of the speed; on a CPU memory is not what is short.
        gradient_checkpointing=on_gpu,
        max_length=None,
        packing=False,
        padding_free=False,
        completion_only_loss=False,
        assistant_only_loss=False,
        dataloader_num_workers=0,
        dataloader_pin_memory=on_gpu,
        logging_steps=1,
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    adapter = None
    if settings.lora_rank:
        adapter = LoraConfig(
            r=settings.lora_rank,
            lora_alpha=2 * settings.lora_rank,
            lora_dropout=0.0,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict(columns(rows)),
        processing_class=tokenizer,
        peft_config=adapter,
        callbacks=list(callbacks),
    )
    # Without a progress bar the trainer prints every log line; ours go through the progress function.
    trainer.remove_callback(PrinterCallback)
    return trainer


class Reporting(TrainerCallback):  # type: ignore[misc] # transformers is untyped here
    """Turns the trainer's logs into progress and keeps the loss curve."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._started = 0.0
        self.losses: list[float] = []
        self.tokens = 0
        self.seconds = 0.0

    def on_train_begin(self, *_: object, **__: object) -> None:
        self._started = time.perf_counter()

    def on_log(
        self, _args: object, state: TrainerState, _control: object, logs: Mapping[str, Any] | None = None, **_: object
    ) -> None:
        if not logs or "loss" not in logs:
            return
        self.losses.append(float(logs["loss"]))
        self.tokens = int(logs["num_tokens"])
        self.seconds = time.perf_counter() - self._started
        self._progress(
            TrainingProgress(
                step=state.global_step,
                steps=state.max_steps,
                loss=self.losses[-1],
                tokens=self.tokens,
                seconds=self.seconds,
            )
        )
