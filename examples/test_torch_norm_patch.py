"""How a package shows that its model patch does what a patch must: `pytest examples`."""

from kvferry.testing.model_patch import ModelPatchContract


class TestTorchNorm(ModelPatchContract):
    patch = "torch_norm_patch:TorchNorm?largest=4096"
    fits = ("llama", "qwen3")
