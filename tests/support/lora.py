"""Random LoRA adapters."""

from __future__ import annotations

import json
from pathlib import Path

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")


def write_adapter(folder: Path, seed: int, model: Path) -> Path:
    """A random adapter of rank 4 for the attention of every layer of a llama; returns its folder."""
    import torch
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if name.split(".")[-2] in MODULES:
            rows, columns = weight.shape
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(4, columns, generator=generator) * 0.3
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(rows, 4, generator=generator) * 0.3
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": MODULES, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
