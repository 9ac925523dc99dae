"""`make gpu`: runs the steps on the GPUs of this machine, and writes `build/gpu/report.md` and `report.json`.

With KVFERRY_GPU=fake it runs without a GPU: small sizes on the CPU, with stand-ins for the driver and its tools, and
Triton's interpreter. That shows that the code runs, and nothing of a GPU. Exits with 0 if all that ran held.
"""

from __future__ import annotations

import argparse
import os
import shutil
import site
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import kvferry
from gpu import report
from gpu.card import Card, NoCard, find_cards
from gpu.context import ROOT
from gpu.double import driver
from gpu.plan import Step, UnknownStep, choose_steps
from gpu.runner import Outcome, run_step

PATIENCE = 10.0
"""How much longer a step may take without a GPU, on a machine that others use too."""
MAX_SOCKET_FOLDER = 60
"""Characters; a socket's path has at most 107, of which some programs use 40 for its name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="make gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", default="", help="only these, with commas or spaces between them")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "gpu", help="where everything is written")
    options = parser.parse_args(arguments)
    mode = os.environ.get("KVFERRY_GPU", "")
    if mode not in ("", "fake"):
        parser.error(f"KVFERRY_GPU={mode}: the only value is fake")
    fake = mode == "fake"
    try:
        if fake:
            os.environ["PATH"] = os.pathsep.join([str(driver.FOLDER), os.environ["PATH"]])
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        cards = find_cards()
        steps = choose_steps(options.steps.replace(",", " ").split(), 2 if fake else len(cards))
    except NoCard as reason:
        parser.error(f"{reason}. KVFERRY_GPU=fake make gpu runs what can run without")
    except UnknownStep as reason:
        parser.error(str(reason))
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "picture.svg").unlink(missing_ok=True)
    shutil.rmtree(folder / "tmp", ignore_errors=True)
    outcomes = run_steps(steps, folder, cards, fake=fake)
    path = report.write(report.make_run(cards, outcomes, fake=fake), steps, folder)
    print(f"\n{path}")
    for line in report.summary_lines(outcomes):
        print(f"  {line}")
    if not fake and len(outcomes) == len(steps):
        saved = report.RESULTS / f"{cards[0].slug}.json"
        print(f"to keep the results of this card: cp {folder / 'report.json'} {saved.relative_to(ROOT)}")
    return 0 if len(outcomes) == len(steps) and all(outcome.is_good for outcome in outcomes) else 1


def run_steps(steps: Sequence[Step], folder: Path, cards: Sequence[Card], *, fake: bool) -> list[Outcome]:
    """Run the steps, one after the other, and print a line for each. Ctrl-C ends the step that runs, and the run."""
    outcomes: list[Outcome] = []
    total = sum(step.limit_s for step in steps)
    end = time.monotonic() + total  # ending a step takes some seconds, which later steps then lack
    print(f"{len(cards)} × {cards[0].name}; {len(steps)} steps, at most {total:.0f} s", flush=True)
    for step in steps:
        print(f"  {step.name:10s} {step.question}", end=" ", flush=True)
        limit_s = step.limit_s * PATIENCE if fake else min(step.limit_s, max(0.0, end - time.monotonic()))
        limited = replace(step, limit_s=limit_s)
        device = "cpu" if fake else "cuda"
        environment = environment_of(step, folder, fake=fake)
        try:
            outcome = run_step(limited, folder, device=device, num_gpus=len(cards), environment=environment)
        except KeyboardInterrupt:
            print("ended")
            break
        outcomes.append(outcome)
        print(f"{outcome.state} ({outcome.seconds:.0f} s){f': {outcome.line}' if outcome.line else ''}", flush=True)
    return outcomes


def environment_of(step: Step, folder: Path, *, fake: bool) -> dict[str, str]:
    """The variables of a step's process beside this environment."""
    added = [ROOT / "benchmarks", ROOT / "src", describe_package(folder / "metadata")]
    paths = [*map(str, added), *filter(None, [os.environ.get("PYTHONPATH")])]
    common = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    common |= private_folders(folder)
    if not fake:
        if step.name == "right":  # its CPU computes a few tokens, and need not compile kernels for that
            common |= {"KVFERRY_NATIVE": "0"}
        return common
    common |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if step.name == "offload":  # the only step whose own process calls the driver
        common |= driver.environment(driver.build(folder / "double"), folder / "double" / "calls")
    return common


def describe_package(folder: Path) -> Path:
    """Write the metadata of an installed kvferry, by which an interpreter that has vLLM and takes kvferry from this
    checkout knows kvferry's plugin for vLLM. Returns the folder."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    metadata = folder / "kvferry.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kvferry\nVersion: {kvferry.__version__}\n")
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


def private_folders(folder: Path) -> dict[str, str]:
    """Environment with which a program writes its caches, settings, sockets and temporary files below `folder`.

    Sockets need short paths: below a long one, temporary files are where they usually are.
    """
    home, temporary = folder / "home", folder / "tmp"
    cache = home / ".cache"
    # The home directory for programs that take no other way; then what may be set in this process's environment.
    environment = {"HOME": home, "PYTHONUSERBASE": site.getuserbase(), "XDG_CACHE_HOME": cache}
    environment |= {"XDG_CONFIG_HOME": home / ".config", "XDG_DATA_HOME": home / ".local/share"}
    environment |= {"XDG_STATE_HOME": home / ".local/state", "HF_HOME": cache / "huggingface"}
    environment |= {"KVFERRY_CACHE_DIR": cache / "kvferry", "VLLM_CACHE_ROOT": cache / "vllm"}
    environment |= {"TRITON_CACHE_DIR": cache / "triton", "TORCHINDUCTOR_CACHE_DIR": cache / "inductor"}
    environment |= {"MPLCONFIGDIR": cache / "matplotlib", "CUDA_CACHE_PATH": cache / "cuda"}
    environment |= {"FLASHINFER_WORKSPACE_BASE": home}
    if len(str(temporary)) <= MAX_SOCKET_FOLDER:
        environment |= {"TMPDIR": temporary, "XDG_RUNTIME_DIR": temporary, "VLLM_RPC_BASE_PATH": temporary}
        temporary.mkdir(mode=0o700, parents=True, exist_ok=True)
    home.mkdir(parents=True, exist_ok=True)
    return {name: str(value) for name, value in environment.items()}


if __name__ == "__main__":
    sys.exit(main())
