"""Addresses of Aim's pages with the query, the grouping and the renderer already set.

Aim's page keeps its state in query parameters, each `O-` + base64 of the URI-encoded JSON. What the state means was
read off the page of Aim 3.29: `texts.name`, `metric.name` and `run.hash` are its query language; columns are the
records of one step, rows the steps. The page remembers its box size itself (in the browser), so a link can't set
that.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from quintain.trainer.tracking.aim import HTML_SERIES

_MOST_COLUMNS = 64
_URI_SAFE = ";,/?:@&=+$-_.!~*'()#"  # what JavaScript's encodeURI leaves as it is


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepLinks:
    """Where to click."""

    trajectories: str
    """The run's trajectories: a group's members side by side, the newest step on top."""
    reward: str
    """The reward curve."""


def deep_links(base_url: str, run_hash: str, *, metric: str = "reward/mean") -> DeepLinks:
    """Links into the page at `base_url` (no trailing slash) that show this run only."""
    texts = _encode(
        {
            "form": {
                "simpleInput": "",
                "advancedInput": f"texts.name == '{HTML_SERIES}' and run.hash == '{run_hash}'",
                "selections": [],
                "advancedModeOn": True,
                "isInitial": False,
            },
            "ranges": {
                "isApplyButtonDisabled": True,
                "isValid": True,
                "isInitial": True,
                "index": {"slice": [0, _MOST_COLUMNS - 1], "density": _MOST_COLUMNS},
            },
        }
    )
    grouping = _encode(
        {
            "columns": {"orders": ["asc"], "fields": ["record.index"]},
            "rows": {"orders": ["desc"], "fields": ["record.step"]},
            "color": {"orders": [], "fields": []},
        }
    )
    renderer = _encode({"type": "html"})
    caption = _encode({"displayBoxCaption": False, "selectedFields": ["run.name"]})
    curve = _encode(
        {
            "options": [],
            "query": "",
            "advancedMode": True,
            "advancedQuery": f"metric.name == '{metric}' and run.hash == '{run_hash}'",
        }
    )
    controls = f"&vis1-c-textRenderer={renderer}&vis1-c-captionProperties={caption}"
    return DeepLinks(
        trajectories=f"{base_url}/text?query={texts}&groupings={grouping}{controls}",
        reward=f"{base_url}/metrics?select={curve}",
    )


def _encode(state: Any) -> str:
    """Aim's encoding of one query parameter; the `=` of base64 must stay as it is."""
    text = quote(json.dumps(state, separators=(",", ":")), safe=_URI_SAFE)
    return "O-" + base64.b64encode(text.encode()).decode()
