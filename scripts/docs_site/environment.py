"""The reference of environment variables that are not a flag's."""

from __future__ import annotations

from docs_site.tables import code, table
from kvferry.core.settings.environment import VARIABLES

HEAD = """# Environment variables

Every flag has an environment variable; the [command line](commands.md) reference says how it is named. These have no
flag:

"""


def page() -> str:
    return HEAD + table(("variable", "meaning"), [(code(name), meaning) for name, meaning in VARIABLES.items()])
