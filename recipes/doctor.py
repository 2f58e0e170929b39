"""Loading a tokenizer by itself, and printing what was found of its chat template (`quintain doctor template`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quintain.recipes.loader import RecipeError

if TYPE_CHECKING:
    from quintain.agents.template_report import TemplateReport

_STYLES = {"ok": "green", "note": "yellow", "failed": "bold red"}


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a Hugging Face folder; nothing is fetched. Raises RecipeError with the remedy."""
    if not folder.is_dir():
        raise RecipeError(f"{folder} is no folder; give the folder of a model, which holds tokenizer.json")
    try:
        return transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RecipeError(
            f"{folder} holds no tokenizer that can be read ({first_line}); it needs tokenizer.json and "
            "tokenizer_config.json as `save_pretrained` writes them"
        ) from error


def print_report(title: str, report: TemplateReport) -> None:
    """The findings as a table."""
    table = Table(title=Text(title), title_justify="left")
    for column in ("", "", "found"):
        table.add_column(column, no_wrap=column != "found", overflow="fold")
    for finding in report.findings:
        table.add_row(finding.name, Text(finding.status, style=_STYLES[finding.status]), Text(finding.detail))
    Console().print(table)
