"""The contract of `ModelPatch`. In a package that provides one:

    from kvferry.testing.model_patch import ModelPatchContract

    class TestMyPatch(ModelPatchContract):
        patch = "my_package.my_module:MyPatch"

`patch` may have options (`…:MyPatch?rows=4`). The models are small, with random weights. Needs pytest.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvferry.core.errors import ConfigError
from kvferry.core.request import Request
from kvferry.core.sampling import SamplingParams
from kvferry.engine.config import EngineConfig
from kvferry.engine.engine import Engine
from kvferry.engine.model.patch import make_patch
from kvferry.engine.model.patching import apply_patches
from kvferry.models.random_model import make_random_model

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
PROMPTS = [[5, 7, 11, 13, 17, 19, 23, 29, 31], [5, 7, 11, 13], [2] * 21]
ENGINE: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_threads": 1, "block_size": 4}
ENGINE |= {"kv_cache_memory": "8MiB", "max_num_seqs": 4, "max_num_batched_tokens": 8}


class ModelPatchContract:
    """Set `patch` in a subclass, and `fits` to the architectures of which it changes at least one module."""

    patch: ClassVar[str]
    fits: ClassVar[tuple[str, ...]] = ("llama",)
    architectures: ClassVar[tuple[str, ...]] = ("llama", "qwen3", "gemma2", "qwen3_moe", "gpt2")
    """The architectures that the patch is tried on; one that it does not fit must stay as it is."""

    @pytest.fixture(scope="class")
    @classmethod
    def checkpoints(cls, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
        """A small model of each architecture."""
        folder = tmp_path_factory.mktemp("models")
        names = sorted({*cls.architectures, *cls.fits})
        return {name: make_random_model(folder / name, name) for name in names}

    def load(self, folder: Path, dtype: torch.dtype) -> Any:
        """The model in a folder, as the engine has it when patches are applied."""
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().requires_grad_(False)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_models_compute_the_same_with_it(self, checkpoints: dict[str, Path], dtype: torch.dtype) -> None:
        """`apply_patches` compares queries, keys, values and logits, and raises where they differ."""
        for folder in checkpoints.values():
            apply_patches(self.load(folder, dtype), [self.patch])

    def test_it_says_how_many_modules_it_changed(self, checkpoints: dict[str, Path]) -> None:
        """A count of 0 shows that a patch fits nothing."""
        for name in self.fits:
            with torch.inference_mode():
                count = make_patch(self.patch).apply(self.load(checkpoints[name], torch.float32))
            assert count > 0, f"{self.patch} fits nothing of {name}"

    def test_it_changes_the_model_it_is_given_and_no_other(self, checkpoints: dict[str, Path]) -> None:
        """A change to a class of transformers would change every model of the process."""
        patched, other = (self.load(checkpoints[self.fits[0]], torch.float32) for _ in range(2))
        forwards = {name: type(module).forward for name, module in other.named_modules()}
        before = {name: copy.copy(vars(module)) for name, module in other.named_modules()}
        apply_patches(patched, [self.patch])
        for name, module in other.named_modules():
            assert type(module).forward is forwards[name], f"the class of {name} was changed"
            assert vars(module).keys() == before[name].keys(), f"{name} of another model was changed"

    def test_an_engine_answers_the_same_with_it(self, checkpoints: dict[str, Path]) -> None:
        """Paged attention, chunks, several requests in one step, and a cached prefix."""
        for name in self.fits:
            answers = [self._answers(checkpoints[name], patches) for patches in ((), (self.patch,))]
            assert answers[0] == answers[1], f"other tokens with {self.patch} on {name}"

    def test_an_unknown_option_is_an_error(self) -> None:
        """The user gets the error before a model is loaded."""
        name = self.patch.partition("?")[0]
        with pytest.raises(ConfigError, match="no_such_option"):
            make_patch(f"{name}?no_such_option=1")

    def _answers(self, folder: Path, patches: tuple[str, ...]) -> dict[str, list[int]]:
        engine = Engine(EngineConfig(model=str(folder), model_patch=patches, **ENGINE))
        try:
            answers: dict[str, list[int]] = {}
            for turn in ("first", "again"):
                for number, prompt in enumerate(PROMPTS):
                    name = f"{turn}-{number}"
                    answers[name] = []
                    engine.add(Request(request_id=name, prompt_token_ids=list(prompt), sampling=GREEDY))
                while engine.has_work:
                    for output in engine.step():
                        answers[output.request_id] += output.token_ids
            engine.check()
            return answers
        finally:
            engine.close()
