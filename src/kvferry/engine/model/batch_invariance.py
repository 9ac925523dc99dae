"""Checks at start whether a row of the model's output depends on the other rows of its batch, and names the kernels by
the bits of some results.

Rounding depends on the order of additions, and a library chooses the order by the shapes of its arguments. kvferry's
CPU kernels give a row the same bits in any batch and any chunk; PyTorch's products may not.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvferry.engine.model.attention import PagedContext, ProbedLayers, attention_context
from kvferry.engine.ops.batch import AttentionBatch

BLOCK_SIZE = 8
LENGTHS = (40, 25, 1)
"""Tokens of the sequences that are computed together, and then each alone in chunks."""
CHUNKS = (7, 1, 16, 1, 64)

_PRODUCTS = ("mm", "bmm", "baddbmm", "addmm", "addmv", "mv", "dot", "linear", "convolution", "attention", "grouped_mm")


class Arithmetic(NamedTuple):
    """The arithmetic of a model in this process. `dependence`: the reason why a row may depend on other rows of its
    batch; empty if it does not. `name`: the same for two instances if they give some sequences the same logits, bit by
    bit."""

    dependence: str
    name: str


def arithmetic_of(module: Any, probed: ProbedLayers, device: torch.device) -> Arithmetic:
    """Compute some sequences together, and each of them alone in chunks. All ranks call it together."""
    settings = module.config.get_text_config()
    vocabulary, max_len = settings.vocab_size, getattr(settings, "max_position_embeddings", None) or max(LENGTHS)
    generator = torch.Generator().manual_seed(1)
    sequences = [
        torch.randint(0, vocabulary, (min(length, max_len),), generator=generator).to(device) for length in LENGTHS
    ]
    with torch.inference_mode():
        with _Products() as products:
            together = _Paged(module, probed, device).run(sequences)
        # also if products were found: all tensor-parallel ranks must run the same forward passes
        alone = [_Paged(module, probed, device).run_in_chunks(sequence) for sequence in sequences]
    name = _name_of(together, device, "torch" if products.names else "kvferry")
    if products.names:
        return Arithmetic(f"PyTorch computes {', '.join(sorted(products.names))}", name)
    same = all(torch.equal(batched, single) for batched, single in zip(together, alone, strict=True))
    return Arithmetic("" if same else "some rows differ in their last bits", name)


def _name_of(results: list[Tensor], device: torch.device, kernels: str) -> str:
    """The owner of the kernels, with a digest of their results; on other devices than CPUs, where results may vary, the
    kind of device instead."""
    if device.type != "cpu":
        return f"{kernels} {torch.__version__} {torch.cuda.get_device_name(device)}"
    hasher = hashlib.sha256()
    for result in results:
        hasher.update(result.float().contiguous().numpy().tobytes())
    return f"{kernels} {hasher.hexdigest()[:16]}"


class _Products(TorchDispatchMode):
    """Records, while active, PyTorch's operations that add products."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if any(name.endswith(product) for product in _PRODUCTS) and not _adds_nothing(args):
            self.names.add(name)
        return function(*args, **(kwargs or {}))


def _adds_nothing(args: Any) -> bool:
    """True if this is an outer product, as in rotary embeddings, or empty, as the product of shared experts in a model
    without them."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    return any(tensor.numel() == 0 for tensor in tensors) or (len(tensors) == 2 and tensors[0].shape[-1] == 1)


class _Paged:
    """The model with a small paged KV cache of its own."""

    def __init__(self, module: Any, probed: ProbedLayers, device: torch.device) -> None:
        self._module, self._device, self._windows = module, device, probed.windows
        num_blocks = sum(-(-length // BLOCK_SIZE) for length in LENGTHS)
        dtype = next(module.parameters()).dtype
        self._caches = [
            torch.zeros(num_blocks, x.num_kv_heads, BLOCK_SIZE * (x.key_dim + x.value_dim), dtype=dtype, device=device)
            for x in probed.layouts
        ]

    def run(self, sequences: list[Tensor]) -> list[Tensor]:
        """Logits [length, vocab] of each sequence, computed in one batch."""
        lengths, tables, first = [len(sequence) for sequence in sequences], [], 0
        for length in lengths:
            tables.append(list(range(first, first - (-length // BLOCK_SIZE))))
            first = tables[-1][-1] + 1
        return list(self._forward(torch.cat(sequences), lengths, lengths, tables).split(lengths))

    def run_in_chunks(self, sequence: Tensor) -> Tensor:
        """Logits [length, vocab] of one sequence, computed chunk by chunk, with its blocks in reverse order."""
        table, start, logits = list(range(-(-len(sequence) // BLOCK_SIZE)))[::-1], 0, []
        for size in CHUNKS:
            chunk = sequence[start : start + size]
            if len(chunk):
                logits.append(self._forward(chunk, [len(chunk)], [start + len(chunk)], [table]))
            start += size
        return torch.cat(logits)

    def _forward(self, ids: Tensor, lengths: list[int], contexts: list[int], tables: list[list[int]]) -> Tensor:
        batch = AttentionBatch.build(lengths, contexts, tables, block_size=BLOCK_SIZE, device=self._device)
        with attention_context(PagedContext(batch, self._caches, self._windows)):
            output = self._module(input_ids=ids[None], position_ids=batch.positions[None], use_cache=False)
        logits: Tensor = output.logits[0]
        return logits
