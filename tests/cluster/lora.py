"""A LoRA adapter as peft writes it."""

from pathlib import Path

import torch


def make_adapter(base: Path, folder: Path, seed: int) -> Path:
    """Over the model in `base`, with weights large enough to be seen."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(model, lora).save_pretrained(folder)
    return folder
