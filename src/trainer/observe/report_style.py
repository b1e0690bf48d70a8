"""The style sheet of a report, which adapts to the reader's light or dark mode and to the width of the window."""

from trainer.observe.chart import COLOURS

_RULES = """
:root { color-scheme: light dark; --text: #1d1d1f; --back: #fff; --faint: #6b6b70; --grid: #e3e3e6;
  --c0: #1f5fbf; --c1: #c2410c; --c2: #15803d; --c3: #9333ea; --c4: #0e7490; --c5: #a16207; }
@media (prefers-color-scheme: dark) { :root { --text: #e8e8ea; --back: #17181a; --faint: #9b9ba1; --grid: #33353a;
  --c0: #7ab0ff; --c1: #ff9b6a; --c2: #6fd694; --c3: #c99bff; --c4: #67d4ea; --c5: #e6c15c; } }
body { margin: 0 auto; max-width: 1240px; padding: 1rem; font: 15px/1.45 system-ui, sans-serif;
  color: var(--text); background: var(--back); }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.charts { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 380px), 1fr)); }
summary { cursor: pointer; } figure { margin: 0; break-inside: avoid; }
figcaption { font-weight: 600; } .unit { font-weight: 400; color: var(--faint); }
svg { width: 100%; height: auto; } svg text { font-size: 11px; fill: var(--faint); }
polyline { fill: none; stroke-width: 1.5; } .area { fill-opacity: .15; } .grid { stroke: var(--grid); }
.mark { stroke-width: 1; stroke-dasharray: 4 3; opacity: .6; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; padding: .6rem .8rem; border: 1px solid var(--grid); }
.wide { overflow-x: auto; } table { border-collapse: collapse; }
th, td { text-align: left; padding: .15rem .9rem .15rem 0; border-bottom: 1px solid var(--grid); vertical-align: top; }
td { font-variant-numeric: tabular-nums; max-width: min(40rem, 60vw); overflow-wrap: break-word; }
.bar { display: flex; height: 1.4rem; margin: .6rem 0; } .bar span, .swatch { background: var(--c0); }
.swatch { display: inline-block; width: .8em; height: .8em; }
.texts td { white-space: pre-wrap; } .fixed td { max-width: none; white-space: nowrap; }
"""
_OF_LINES = "".join(
    f"polyline.c{n}, line.c{n} {{ stroke: var(--c{n}); }} polyline.c{n}.area, circle.c{n} {{ fill: var(--c{n}); }} "
    f".name.c{n} {{ color: var(--c{n}); font-weight: 600; }}\n"
    for n in range(COLOURS)
)

STYLE = _RULES + _OF_LINES
