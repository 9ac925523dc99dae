"""Environment variables that do not belong to a flag. The documentation's reference lists them from here.

Every flag has a variable too (`--max-num-seqs`: `KVFERRY_MAX_NUM_SEQS`), which is derived from the flag.
"""

from __future__ import annotations

AUTH_TOKEN = "KVFERRY_AUTH_TOKEN"
CACHE_DIR = "KVFERRY_CACHE_DIR"
NATIVE = "KVFERRY_NATIVE"
ISA = "KVFERRY_ISA"
ALLOW_UNTESTED_VLLM = "KVFERRY_ALLOW_UNTESTED_VLLM"
CALM_VLLM = "KVFERRY_CALM_VLLM"
INSTANCE_NAME = "KVFERRY_INSTANCE_NAME"
STATE_DIR = "KVFERRY_STATE_DIR"

VARIABLES = {
    AUTH_TOKEN: "Secret of at least 16 characters that all instances and routers of a deployment share, and that is"
    " never sent. The keys of their connections, tickets and requests to each other are derived from it. Without it,"
    " connectors listen on loopback addresses only, and accept only tickets with such addresses; `kvferry serve`, and"
    " routers before operators on the same machine, use a token that is kept for each user in kvferry's cache folder.",
    CACHE_DIR: "Folder for compiled kernels and for the digests of checkpoint files. Default:"
    " `$XDG_CACHE_HOME/kvferry`, else `~/.cache/kvferry`; a private temporary folder where neither can be written. A"
    " named folder that cannot be used is refused.",
    NATIVE: "`0`: compile no kernels and use plain PyTorch on CPUs, which is slower.",
    ISA: "Compile the CPU kernels for this instruction set (`avx2`, `avx512`, `sse`, `amx-emulated`) instead of the one"
    " of the processor: for tests and comparisons.",
    ALLOW_UNTESTED_VLLM: "`1`: run kvferry's connectors inside a release of vLLM that they were not tested with.",
    CALM_VLLM: "`0`: leave vLLM's servers for CPUs as they are. Otherwise `--engine vllm` makes threads that wait in"
    " them sleep 50 µs at a time, where they would yield their core in a loop and starve others.",
    STATE_DIR: "Folder in which fleets of this user are kept (`kvferry fleet apply`). Default:"
    " `$XDG_STATE_HOME/kvferry`, else `~/.local/state/kvferry`.",
    INSTANCE_NAME: "Name of the instance in its log lines. `kvferry serve` sets it for each process that it starts.",
}
"""Name → meaning, in Markdown."""
