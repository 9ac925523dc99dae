"""How a package shows that its backend does what a backend must: `pytest examples`."""

import pytest

from kvferry.testing.backends import BackendContract


@pytest.mark.processes
class TestProcessBackend(BackendContract):
    kind = "process_backend:ProcessBackend"
