"""The model whose weights are drawn on the device is one that engines load; here the device is a CPU."""

from pathlib import Path

from gpu.models import LLAMA_1B, make_on_device
from gpu.right import answer, make_engine


def test_a_model_drawn_on_the_device_is_served(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    make_on_device(tmp_path / "model", {**LLAMA_1B, **sizes, **heads}, "cpu")
    engine = make_engine(tmp_path / "model", "cpu", "bfloat16")
    [found] = answer(engine, [[5, 6, 7]])
    engine.close()
    assert len(found.tokens) == 12
