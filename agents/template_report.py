"""What a chat template does, found by rendering probes, and what a run under each `rollout.history` makes of it.

Nothing is sampled; the tokenizer alone is enough. The proof of exactness builds a row of several rounds as a rollout
does (prompt, reply, delta, …) and compares its text with the template's own rendering of the whole conversation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

from quintain.agents.renderer import ChatRenderer
from quintain.agents.template import TemplateError, fill
from quintain.envs.message import Message, ToolCall, ToolSpec

Status = Literal["ok", "note", "failed"]

_TOOL = ToolSpec(
    name="probe_tool",
    description="Look something up: 北京.",
    parameters={
        "type": "object",
        "properties": {"probe_key": {"type": "string", "description": "What."}},
        "required": ["probe_key"],
        "additionalProperties": False,
    },
)
_ASK = Message(role="user", content="probe question")
_MORE = Message(role="user", content="another question")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
NUM_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFinding:
    """One line of the report.

    Example: ``TemplateFinding(name="end of turn", status="ok", detail="<|im_end|>")``
    """

    name: str
    status: Status
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateReport:
    """All that was found of one template."""

    family: str
    """Whose tool calls the replies are read as."""
    prefix_preserving: bool
    """A tool loop with reasoning never changes what was rendered before."""
    prefix_preserving_over_questions: bool
    """Nor does a further question of the user."""
    usable: bool
    """A run with `rollout.history: refuse` (the default) starts."""
    findings: tuple[TemplateFinding, ...]

    def to_json(self) -> dict[str, Any]:
        """The plain form that `--json` prints."""
        return asdict(self)


def examine_template(tokenizer: Any) -> TemplateReport:
    """Probe a tokenizer's chat template. Raises TemplateError where no run could use it at all."""
    chat = ChatRenderer(tokenizer)
    in_loop = chat.rewrites_reasoning()
    later = _rewritten_by_a_question(chat)
    return TemplateReport(
        family=chat.family,
        prefix_preserving=in_loop is None,
        prefix_preserving_over_questions=in_loop is None and later is None,
        usable=in_loop is None,
        findings=(*_forms(chat), _exactness(chat), *_consequences(in_loop, later)),
    )


def _forms(chat: ChatRenderer) -> Iterator[TemplateFinding]:
    template, tokens = chat.template, chat.tokenizer
    yield _ok("tool-call parser", chat.family)
    yield _ok("a reply ends with", ", ".join(chat.decode([i]) for i in chat.stop_token_ids))
    yield _beginning(chat)
    yield _doubled_ends(chat)
    yield _tool_schemas(chat)
    yield _ok("arguments of calls", "as JSON text" if template.arguments_as_text else "as a mapping")
    where = f"in the field {template.reasoning_field}" if template.reasoning_field else "between marks in the content"
    opened = "; the prompt opens it" if chat.opens_reasoning else ""
    yield _ok("reasoning", f"{where}{opened}")
    marked = _GENERATION.search(template.source) is not None
    yield _ok("generation markers", f"{'there' if marked else 'none'}; not needed, masks come from who made each token")
    yield _ok("earlier replies", "taken apart, with their calls" if chat.calls_in_history else "as they were sampled")
    if getattr(tokens, "add_bos_token", False):
        yield _ok("the tokenizer's own BOS", "switched off while rendering")


def _beginning(chat: ChatRenderer) -> TemplateFinding:
    bos = getattr(chat.tokenizer, "bos_token_id", None)
    if bos is None:
        return _ok("beginning of text", "the tokenizer has none")
    count = chat.prompt_ids([_ASK], ()).count(bos)
    detail = f"{chat.decode([bos])}, {count} in a prompt; no other is added"
    return TemplateFinding(name="beginning of text", status="note" if count > 1 else "ok", detail=detail)


def _doubled_ends(chat: ChatRenderer) -> TemplateFinding:
    reply = Message(role="assistant", content="answer")
    row = chat.encode_reply("answer")
    ids = (*row[-1:], *chat.delta_ids(row, reply, [_MORE], ()))
    twice = [chat.decode(pair) for pair in pairwise(ids) if set(pair) <= set(chat.stop_token_ids)]
    if twice:
        return TemplateFinding(name="doubled end of turn", status="note", detail=f"{twice[0]} stands in a row")
    return _ok("doubled end of turn", "none")


def _tool_schemas(chat: ChatRenderer) -> TemplateFinding:
    name = "tool schemas"
    without, text = (fill(*chat.template.frame([_ASK], tools, generation=True)) for tools in ((), (_TOOL,)))
    if text == without or _TOOL.name not in text:
        detail = "the template does not write them: the model learns its tools from demonstrations or the system prompt"
        return TemplateFinding(name=name, status="note", detail=detail)
    if "北京" not in text:
        return TemplateFinding(name=name, status="note", detail="text that is not ASCII is left out or escaped")
    as_json = '"probe_tool"' in text and re.search(r'"probe_key"\s*:', text) is not None
    return _ok(name, "as JSON" if as_json else "in a form of the template's own")


def _exactness(chat: ChatRenderer) -> TemplateFinding:
    """A row of several rounds of calls against the template's rendering of the same conversation."""
    name = f"a row of {NUM_ROUNDS} tool rounds"
    try:
        messages, row = _played(chat)
        whole = fill(*chat.template.frame(chat.dressed(messages), (_TOOL,), generation=True))
    except TemplateError as error:
        return TemplateFinding(name=name, status="note", detail=f"could not be built from demonstrations: {error}")
    text = chat.decode(row)
    if "probe_key" not in text.rpartition(_ASK.content)[2]:
        return TemplateFinding(name=name, status="note", detail="the template leaves calls out of replies")
    if text == whole:
        return _ok(name, "is the template's own rendering, to the character")
    at = next((i for i, (a, b) in enumerate(zip(text, whole, strict=False)) if a != b), min(len(text), len(whole)))
    return TemplateFinding(
        name=name,
        status="note",
        detail=f"has {text[max(0, at - 20) : at + 20]!r} where a rendering of the whole conversation has "
        f"{whole[max(0, at - 20) : at + 20]!r}",
    )


def _played(chat: ChatRenderer) -> tuple[list[Message], list[int]]:
    messages, row = [_ASK], [*chat.prompt_ids([_ASK], (_TOOL,))]
    for index in range(NUM_ROUNDS):
        call = ToolCall(id=f"call_{index}_0", name=_TOOL.name, arguments='{"probe_key": "北京"}')
        reply = Message(role="assistant", content="", tool_calls=(call,), reasoning="why" if _thinks(chat) else None)
        new = Message(role="tool", content="found", name=_TOOL.name, tool_call_id=call.id)
        row += chat.encode_reply(chat.assistant_text(reply))
        row += chat.delta_ids(row, reply, [new], (_TOOL,))
        messages += [reply, new]
    return messages, row


def _thinks(chat: ChatRenderer) -> bool:
    return chat.opens_reasoning or "think" in chat.template.source


def _rewritten_by_a_question(chat: ChatRenderer) -> str | None:
    """Why a further question changes an answered one."""
    if chat.calls_in_history:
        reply = Message(role="assistant", content="answer", reasoning="why" if _thinks(chat) else None)
    else:
        opening = "" if chat.opens_reasoning else "<think>\n"
        reply = Message(role="assistant", content=f"{opening}why\n</think>\n\nanswer")
    try:
        return chat.history_break([_ASK, reply], [_MORE], (_TOOL,))
    except TemplateError as error:
        return str(error)


def _consequences(in_loop: str | None, later: str | None) -> Sequence[TemplateFinding]:
    """What `rollout.history` does with it."""
    if in_loop is None and later is None:
        return (_ok("history", "append-only: every value of rollout.history gives one row a trajectory"),)
    if in_loop is None:
        detail = (
            "kept in a tool loop; a further question rewrites it: `refuse` ends the trajectory there, `append` keeps "
            f"what was sampled, `fork` begins another row. {later}"
        )
        return (TemplateFinding(name="history", status="note", detail=detail),)
    detail = f"`refuse` ends the run before it starts; choose `append` or `fork`. {in_loop}"
    return (TemplateFinding(name="history", status="failed", detail=detail),)


def _ok(name: str, detail: str) -> TemplateFinding:
    return TemplateFinding(name=name, status="ok", detail=detail)
