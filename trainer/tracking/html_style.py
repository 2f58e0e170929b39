"""The look of a trajectory: a scoped style sheet that reads well on Aim's light page."""

from __future__ import annotations

PROBABILITY_STEPS: tuple[tuple[float, str, str], ...] = (
    (0.95, "#eaf6ec", "≥.95"),
    (0.7, "#fff3cd", "≥.7"),
    (0.3, "#ffdfa6", "≥.3"),
    (0.05, "#ffbd80", "≥.05"),
    (0.0, "#ff8f70", "rare"),
)
"""(least probability, background, name in the legend): the rarer a sampled token, the darker, also without colour
vision."""

_VERSION_COLOURS = ("#2563eb", "#15803d", "#9333ea", "#0e7490", "#be185d", "#854d0e")
NUM_VERSION_COLOURS = len(_VERSION_COLOURS)
"""Underlines repeat after this many policy versions; the legend and the tooltip name the version."""

_RULES = """
.qn{font:13px/1.5 system-ui,sans-serif;color:#1f2328;white-space:normal;min-width:260px;text-align:left}
.qn .badges{display:flex;flex-wrap:wrap;gap:4px}
.qn .badges span{background:#eef0f3;border-radius:9px;padding:0 8px;font-size:12px;font-weight:600;white-space:nowrap}
.qn .badges .good{background:#d3f0da;color:#11562a}
.qn .badges .poor{background:#fbe3d6;color:#8a3a10}
.qn .badges .bad{background:#f8d0d4;color:#8b1220}
.qn .badges .warn{background:#fdeebd;color:#6d4f00}
.qn .facts,.qn .legend{font-size:11px;color:#667080;margin:4px 0}
.qn .error{font:12px/1.4 ui-monospace,monospace;white-space:pre-wrap;background:#fdecee;color:#8b1220;padding:4px 8px}
.qn h5{margin:8px 0 0;font-size:12px}
.qn details{border-left:3px solid #c3c9d2;margin:6px 0;padding:0 0 0 8px}
.qn .assistant{border-color:#2563eb}.qn .tool{border-color:#0e7490}.qn .user{border-color:#854d0e}
.qn summary{font-size:11px;font-weight:600;color:#667080;cursor:pointer}
.qn summary em{font-weight:400;margin-left:8px}
.qn pre{font:12px/1.75 ui-monospace,Menlo,monospace;white-space:pre-wrap;overflow-wrap:anywhere;margin:0;padding:0}
.qn pre,.qn pre *{background-color:transparent;letter-spacing:0}
.qn i{font-style:normal;color:#9aa3ae}
.qn b{font-weight:400;color:#1f2328}
.qn s{text-decoration:none;color:#111;border-bottom:2px solid transparent;border-radius:2px}
.qn s.n::before,.qn i.n:first-child::before{content:"\\21b5";color:#8a93a0}
.qn i.n:first-child{white-space:normal}
.qn .legend s{padding:0 4px;margin:0 2px}
"""


def _style() -> str:
    rules = [line for line in _RULES.strip().splitlines()]
    rules += [f".qn s.p{i}{{background-color:{colour}}}" for i, (_, colour, _) in enumerate(PROBABILITY_STEPS)]
    rules += [f".qn s.v{i}{{border-bottom-color:{colour}}}" for i, colour in enumerate(_VERSION_COLOURS)]
    rules.append(".qn s.x{border-bottom-style:dotted;opacity:.6}")
    return f"<style>{''.join(rules)}</style>"


STYLE = _style()
