"""Small random models that take images or sounds, of families whose processors need neither torchvision nor
torchaudio, and random inputs for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEXT: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 4104}
"""Of the language models: heads of the size that vLLM's attention on CPUs takes."""
IMAGE_SIZE = 28
RATE = 16000
"""Samples in a second of sound."""


def make_blip2(folder: Path) -> Path:
    """BLIP-2 with an OPT: an image becomes 40 tokens in front of the prompt."""
    from transformers import Blip2Config, Blip2ForConditionalGeneration, OPTConfig
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil
    from transformers.models.blip_2 import Blip2Processor

    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**TEXT, "ffn_dim": 96, "word_embed_proj_dim": 64, "max_position_embeddings": 2048}
    config = Blip2Config(
        vision_config={**tower, "image_size": IMAGE_SIZE, "patch_size": 7},
        qformer_config={**tower, "encoder_hidden_size": 32, "cross_attention_frequency": 1},
        text_config=OPTConfig(**text).to_dict(),
        num_query_tokens=40,
        image_token_index=4100,
    )
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    processor = Blip2Processor(BlipImageProcessorPil(size=size), _tokenizer("<image>"), num_query_tokens=40)
    return _saved(Blip2ForConditionalGeneration, config, processor, folder)


def make_qwen2_audio(folder: Path) -> Path:
    """Qwen2-Audio: a second of sound becomes 25 tokens in place of one."""
    from transformers import (
        Qwen2AudioConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2AudioProcessor,
        WhisperFeatureExtractor,
    )

    tower = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64}
    text = {**TEXT, "intermediate_size": 96, "num_key_value_heads": 1, "max_position_embeddings": 4096}
    config = Qwen2AudioConfig(
        audio_config={**tower, "num_mel_bins": 16}, text_config={"model_type": "qwen2", **text}, audio_token_index=4100
    )
    tokenizer = _tokenizer("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
    processor = Qwen2AudioProcessor(WhisperFeatureExtractor(feature_size=16), tokenizer)
    return _saved(Qwen2AudioForConditionalGeneration, config, processor, folder)


def _tokenizer(*special: str) -> Any:
    """That of the built-in model, in which `special` are the tokens from 4100 on."""
    from transformers import PreTrainedTokenizerFast

    from kvferry.models.catalog import resolve

    tokenizer = PreTrainedTokenizerFast.from_pretrained(resolve("kvferry/tiny-python"))
    tokenizer.add_tokens([f"<unused-{number}>" for number in range(4100 - len(tokenizer))], special_tokens=True)
    tokenizer.add_tokens(list(special), special_tokens=True)
    return tokenizer


def _saved(model_class: Any, config: Any, processor: Any, folder: Path) -> Path:
    import torch
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    model = model_class(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)  # large, so that all of a prompt counts
    model.save_pretrained(folder)
    # transformers 5.19 writes names of Qwen2-Audio that it does not read itself, nor does vLLM.
    path = folder / "model.safetensors"
    tensors = {name.replace(".model.model.", ".model."): value for name, value in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    processor.save_pretrained(folder)
    return folder


def image(seed: int) -> Any:
    """A random picture."""
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (40, 40, 3), dtype=np.uint8))


def sound(seed: int, seconds: float = 1.6) -> Any:
    """The samples of a random chord, and how many there are in a second."""
    import numpy as np

    time = np.arange(int(seconds * RATE)) / RATE
    pitches = np.random.default_rng(seed).uniform(100, 6000, (6, 1))
    return np.sin(2 * np.pi * pitches * time).sum(0).astype(np.float32), RATE
