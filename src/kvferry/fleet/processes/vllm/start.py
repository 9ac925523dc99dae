"""Reads the progress of vLLM's start from its log. Taken from vLLM 0.32; unknown lines are ignored."""

from __future__ import annotations

import re

from kvferry.fleet.processes.ready import StartProgress

START = tuple(
    (re.compile(pattern), StartProgress(fraction, what))
    for pattern, fraction, what in (
        (r"non-default args", 0.10, "reading the model's configuration"),
        (r"Initializing a V1 LLM engine", 0.30, "starting the engine"),
        (r"Starting to load model", 0.50, "loading weights"),
        (r"Loading weights took|Model loading took", 0.65, "weights loaded"),
        (r"KV cache size", 0.75, "making the KV cache"),
        (r"Capturing (CUDA|cuda) graph|Dynamo bytecode transform", 0.80, "compiling"),
        (r"init engine .* took", 0.90, "starting the server"),
        (r"Starting vLLM server", 0.97, "almost there"),
    )
)
