"""Drawings of boxes, arrows and bars over time as SVG, in the colours of the page, light or dark.

In the site a drawing is part of the page, whose style sheet sets the variables; by itself it follows the system.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

LIGHT = {
    "text": "#1b2430", "dim": "#55606e", "line": "#8a94a3", "card": "#ffffff", "soft": "#eef1f5",
    "queue": "#7a5195", "prefill": "#0b6bcb", "kv": "#b45309", "decode": "#1a7f4b", "bad": "#b3261e",
}  # fmt: skip
DARK = {
    "text": "#e8edf3", "dim": "#a7b2c0", "line": "#7b8797", "card": "#1a212b", "soft": "#232c38",
    "queue": "#c79be0", "prefill": "#6db1f7", "kv": "#f0a95b", "decode": "#63cf94", "bad": "#ff8a80",
}  # fmt: skip
CHARACTER_WIDTH, LINE_HEIGHT = 6.9, 17
"""Width of a character and height of a line of text, about, in the units of a drawing."""
CHARACTER_WIDTHS = {"bold": 7.7, "code": 7.3}


def variables(colours: dict[str, str]) -> str:
    """The colours as declarations of CSS."""
    return "".join(f"--kv-{name}:{colour};" for name, colour in colours.items())


_STYLE = (
    f".kv-drawing{{{variables(LIGHT)}}}@media (prefers-color-scheme:dark){{.kv-drawing{{{variables(DARK)}}}}}"
    ".kv-drawing text{font:13px system-ui,'Segoe UI',Roboto,'Noto Sans','DejaVu Sans',sans-serif;fill:var(--kv-text)}"
    ".kv-drawing .code{font-family:ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace;font-size:12px}"
    ".kv-drawing .bold{font-weight:600}.kv-drawing .dim{fill:var(--kv-dim)}.kv-drawing text.on{fill:var(--kv-card)}"
    ".kv-drawing .box{fill:var(--kv-card);stroke:var(--kv-line);stroke-width:1.2}"
    ".kv-drawing .area{fill:var(--kv-soft);stroke:none}"
    ".kv-drawing .wire{fill:none;stroke:var(--kv-line);stroke-width:1.4}.kv-drawing .dashed{stroke-dasharray:5 4}"
    + "".join(
        f".kv-drawing .{name}{{stroke:var(--kv-{name})}}.kv-drawing .bar.{name}{{fill:var(--kv-{name});stroke:none}}"
        f".kv-drawing text.{name}{{fill:var(--kv-{name});stroke:none}}"
        for name in ("queue", "prefill", "kv", "decode", "bad", "line")
    )
    + ".kv-drawing .thick{stroke-width:4}.kv-drawing .strong{stroke-width:2.2}"
)


@dataclass(frozen=True)
class Box:
    """The place of a box."""

    x: float
    y: float
    width: float
    height: float

    @property
    def left(self) -> tuple[float, float]:
        """Middle of the left side."""
        return self.x, self.y + self.height / 2

    @property
    def right(self) -> tuple[float, float]:
        """Middle of the right side."""
        return self.x + self.width, self.y + self.height / 2

    @property
    def top(self) -> tuple[float, float]:
        """Middle of the upper side."""
        return self.x + self.width / 2, self.y

    @property
    def bottom(self) -> tuple[float, float]:
        """Middle of the lower side."""
        return self.x + self.width / 2, self.y + self.height


Point = tuple[float, float]


@dataclass
class Drawing:
    """One drawing; `title` describes it for who cannot see it. Text that leaves its box or the drawing is an error."""

    title: str
    height: float
    width: float = 720
    _parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        """A line of text, whose middle is at `y`. `anchor`: "start", "middle" or "end", as in SVG."""
        length = len(text) * CHARACTER_WIDTHS.get(kind.split(" ")[-1], CHARACTER_WIDTH)
        begin = x - {"start": 0.0, "middle": length / 2, "end": length}[anchor]
        if begin < 0 or begin + length > self.width + 1 or not 0 < y < self.height:
            raise ValueError(f"{text!r} at {x}, {y} leaves the drawing")
        self._parts.append(
            f'<text class="{kind}" x="{x:g}" y="{y + 4.5:g}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, *lines: str, kind: str = "") -> Box:
        """A box with lines of text in its middle: the first one bold, those that begin with ` in a typewriter's."""
        self._parts.append(
            f'<rect class="box {kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>'
        )
        first = y + height / 2 - (len(lines) - 1) * LINE_HEIGHT / 2
        for number, line in enumerate(lines):
            style = "code" if line.startswith("`") else "bold" if number == 0 else "dim"
            if len(line.strip("`")) * CHARACTER_WIDTHS.get(style, CHARACTER_WIDTH) > width - 4:
                raise ValueError(f"{line!r} is wider than its box of {width}")
            self.text(x + width / 2, first + number * LINE_HEIGHT, line.strip("`"), style, "middle")
        return Box(x, y, width, height)

    def area(self, x: float, y: float, width: float, height: float, label: str = "") -> Box:
        """A region with a label in its upper left corner, such as a machine. Draw it before what is in it."""
        self._parts.append(f'<rect class="area" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8"/>')
        if label:
            self.text(x + 12, y + 16, label, "dim")
        return Box(x, y, width, height)

    def bar(self, x: float, y: float, width: float, height: float, kind: str, label: str = "") -> None:
        """A stretch of time; its label stands above."""
        self._parts.append(
            f'<rect class="bar {kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2"/>'
        )
        if label:
            self.text(x, y - 10, label, kind)

    def ticks(self, begin: float, end: float, y: float, height: float, step: float, kind: str = "decode") -> None:
        """Tokens of an answer: a tick each."""
        x = begin
        while x < end:
            self._parts.append(f'<rect class="bar {kind}" x="{x:g}" y="{y:g}" width="4" height="{height:g}"/>')
            x += step

    def arrow(self, *points: Point, kind: str = "line", label: str = "", at: Point | None = None) -> None:
        """A line through these points with a head at its end. `at`: the middle of its label."""
        self.wire(*points, kind=kind)
        (x0, y0), (x1, y1) = points[-2:]
        length = max(((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5, 1.0)
        dx, dy = (x1 - x0) / length, (y1 - y0) / length
        size = 10 if "thick" in kind else 8
        corners = [
            (x1, y1),
            *((x1 - size * dx - s * size * dy / 2, y1 - size * dy + s * size * dx / 2) for s in (1, -1)),
        ]
        shape = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        colour = next(name for name in kind.split() if name in ("queue", "prefill", "kv", "decode", "bad", "line"))
        self._parts.append(f'<polygon class="bar {colour}" points="{shape}"/>')
        if label:
            x, y = at or ((points[0][0] + x1) / 2, (points[0][1] + y1) / 2 - 11)
            self.text(x, y, label, "" if colour == "line" else colour, "middle")

    def wire(self, *points: Point, kind: str = "line") -> None:
        """A line without a head."""
        shape = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._parts.append(f'<polyline class="wire {kind}" points="{shape}"/>')

    def svg(self) -> str:
        """The file."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="kv-drawing" viewBox="0 0 {self.width:g} {self.height:g}"'
            f' role="img" aria-label="{escape(self.title)}"><style>{_STYLE}</style>\n'
            + "\n".join(self._parts)
            + "\n</svg>\n"
        )
