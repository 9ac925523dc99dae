"""The pages of `--help`, which has the flags that most users set, and of `--help-all`, which has every flag. Examples
are on separate lines, so that they can be pasted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cyclopts import Group
from cyclopts.help import ColumnSpec, DefaultFormatter, NameRenderer
from cyclopts.help.specs import get_default_command_columns, get_default_parameter_columns

from kvferry.core.settings.model import Settings, settings_fields

if TYPE_CHECKING:
    from cyclopts.help import HelpEntry, HelpPanel
    from rich.console import Console, ConsoleOptions

ALL = "--help-all"


def _columns(console: Console, options: ConsoleOptions, entries: list[HelpEntry]) -> tuple[ColumnSpec, ...]:
    """The columns of a group of commands or flags. The longest flag fits in one line, because a broken one cannot be
    copied."""
    longest = max((len(name) for entry in entries for name in entry.names), default=0)
    if not any(name.startswith("-") for entry in entries for name in entry.names):
        return get_default_command_columns(console, options, entries)
    *marks, names, descriptions = get_default_parameter_columns(console, options, entries)
    width = max(longest, names.max_width or 0)
    return (*marks, names.copy(renderer=NameRenderer(width), max_width=width), descriptions)


class HelpPages(DefaultFormatter):
    """Formatter of the help of all commands. Knows which of the two pages is printed, and counts the flags that are
    left out."""

    def __init__(self) -> None:
        super().__init__(column_specs=_columns)
        self._has_all = False
        self._num_hidden = 0

    def begin(self, arguments: list[str]) -> list[str]:
        """Replace `--help-all`, which chooses the longer page, by `--help` in the arguments."""
        self._has_all, self._num_hidden = ALL in arguments, 0
        return ["--help" if argument == ALL else argument for argument in arguments]

    def end(self, arguments: list[str]) -> str:
        """The number of flags that the page has left out, and the command that shows them; empty if there are none."""
        if not self._num_hidden:
            return ""
        command = " ".join(argument for argument in arguments if argument not in ("--help", "-h"))
        return f"{self._num_hidden} more flags: kvferry {command} {ALL}\n"

    def render_description(self, console: Console, options: ConsoleOptions, description: Any) -> None:
        """Print the text without padding and colours, so that it can be copied unchanged."""
        if not description:
            return
        is_blank = False
        for line in console.render_lines(description, options, pad=False):
            text = "".join(segment.text for segment in line).rstrip()
            if text or not is_blank:
                console.print(text, markup=False, highlight=False, no_wrap=True, soft_wrap=True)
            is_blank = not text

    def panel_of(self, console: Console, options: ConsoleOptions, panel: HelpPanel, common: frozenset[str]) -> None:
        """Print a group of flags; on the short page, only the `common` ones."""
        entries = [entry for entry in panel.entries if self._has_all or entry.required or common & {*entry.names}]
        self._num_hidden += len(panel.entries) - len(entries)
        if entries:
            self(console, options, panel.copy(entries=entries))


PAGES = HelpPages()


def settings_group(title: str, sort_key: float, *kinds: type[Settings]) -> Group:
    """A group of flags that are fields of `kinds`."""
    fields = (field for kind in kinds for field in settings_fields(kind) if field.common)
    common = frozenset(f"--{field.name.replace('_', '-')}" for field in fields)
    return Group(
        title,
        sort_key=sort_key,
        help_formatter=lambda console, options, panel: PAGES.panel_of(console, options, panel, common),
    )
