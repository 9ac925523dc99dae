"""The models of the steps, made here with random weights: speed does not depend on them, and no network is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpu.context import Context

LLAMA_1B: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
"""A Llama of 1.1 billion parameters; its KV takes 22 KiB a token in bfloat16."""


def llama(context: Context) -> str:
    """The folder of the 1.1B Llama, or of a tiny one on a CPU; made when a step first needs it."""
    from kvferry.models.random_model import make_random_model  # takes seconds, which a skipped step need not

    folder = context.folder / "models" / ("tiny" if context.small else "llama-1b")
    if (folder / "complete").exists():
        return str(folder)
    if context.small:
        make_random_model(folder, "llama", head_dim=64, max_position_embeddings=8192)  # vLLM's kernels need 32
    else:
        make_on_device(folder, LLAMA_1B, context.device)
    (folder / "complete").touch()
    return str(folder)


def make_on_device(folder: Path, shape: dict[str, Any], device: str) -> None:
    """Write a Llama whose weights are drawn on the device: a CPU takes a minute to draw a billion."""
    import shutil

    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    from kvferry.models.random_model import DEFAULT_TOKENIZER, make_config

    folder.mkdir(parents=True, exist_ok=True)
    config = make_config("llama", **shape)
    config.dtype = torch.bfloat16
    config.architectures = ["LlamaForCausalLM"]
    with torch.device("meta"):
        names = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).state_dict()
    generator = torch.Generator(device).manual_seed(0)
    weights = {}
    for name, tensor in names.items():
        values = torch.empty(tensor.shape, dtype=torch.bfloat16, device=device)
        scale = tensor.shape[-1] ** -0.5
        weights[name] = (
            values.fill_(1.0) if tensor.ndim == 1 else values.normal_(0.0, scale, generator=generator)
        ).cpu()
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert DEFAULT_TOKENIZER is not None
    for path in DEFAULT_TOKENIZER.iterdir():
        if path.suffix in (".json", ".jinja") and path.name not in ("config.json", "generation_config.json"):
            shutil.copyfile(path, folder / path.name)
