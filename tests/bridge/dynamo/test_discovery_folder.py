"""The folder of a member that was killed is removed by the next one, and no other folder is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kvferry.bridge.dynamo.member import discovery_folder

HOLD = """
import sys
from pathlib import Path
from kvferry.bridge.dynamo.member import discovery_folder
with discovery_folder(Path(sys.argv[1])) as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


def started(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process with a folder of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_the_folder_of_a_killed_process_is_removed_and_that_of_a_running_one_stays(tmp_path: Path) -> None:
    killed, abandoned = started(tmp_path)
    running, used = started(tmp_path)
    half_made, strange = tmp_path / "kvferry-dynamo-new", tmp_path / "kvferry-dynamo-link"
    half_made.mkdir()
    strange.symlink_to(tmp_path, target_is_directory=True)
    killed.kill()
    killed.wait(timeout=10)
    assert abandoned.is_dir()
    with discovery_folder(tmp_path) as own:
        assert not abandoned.exists()
        assert used.is_dir()
        assert half_made.is_dir()
        assert strange.is_symlink()
        assert Path(own).is_dir()
    assert not Path(own).exists()
    with discovery_folder(tmp_path, min_age_s=-1.0):
        assert not half_made.exists()
        assert used.is_dir()
    running.communicate("", timeout=10)
    assert sorted(path.name for path in tmp_path.iterdir()) == [strange.name]
