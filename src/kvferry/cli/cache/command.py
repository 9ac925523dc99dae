"""`kvferry cache`: commands for KV that is kept for reuse."""

from __future__ import annotations

from cyclopts import App

from kvferry.cli.cache.folder import add_to
from kvferry.cli.cache.simulate import simulate
from kvferry.cli.cache.warm import warm

cache = App(name="cache", sort_key=6, help="Show and manage KV that is kept for reuse.")
cache.command(warm)
cache.command(simulate)
add_to(cache)
