"""Messages to token ids and back, under the token law: what was sampled is never encoded again.

    turn 0      prompt_ids(messages)                     system, user, generation point
    turn n > 0  row + sampled ids + delta_ids(new ones)  delta = what the template writes between the last sampled token
                                                         and the next generation point

Invariants:
- Template text is encoded with control tokens on; text of users, tools and the system as plain text, so that the
  control ids of a row are those that the template itself wrote (and those that the policy sampled).
- Nothing is added that the template does not write: no second BOS.
- A turn-end token that the policy did not sample is part of the delta, hence not trained.

It works with every template that a fast tokenizer carries; what a template cannot say of its model family is in
`chat_families.py`. Earlier replies stand in history as they were sampled. Templates that treat such a reply as a final
answer (they refuse tool results behind it, or drop its reasoning) get its calls instead (`calls_in_history`).
What rewrites earlier turns is found by `history_break`; what to do then is the recipe's choice, not this module's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tokenizers import Tokenizer

from quintain.agents.chat_families import facts_of, placeholder_calls, with_family_ids
from quintain.agents.completion import FinishReason
from quintain.agents.history import HistoryCheck, last_hole, sampled_after
from quintain.agents.template import ChatTemplate, Frame, Hole, TemplateError, Value, fill
from quintain.agents.token_text import TokenText
from quintain.agents.tool_calls import THINK_CLOSE, THINK_OPEN, ParsedReply, detect_family, parser_for
from quintain.envs.message import Message, ToolCall, ToolSpec

__all__ = ["ChatRenderer", "ParsedReply", "TemplateError"]

_USER = Message(role="user", content="x")
_REPLY = Message(role="assistant", content="x")
_MARK = "Xq7arguments"
_MAX_PROMPTS = 64


class ChatRenderer:
    """Renders through one tokenizer's chat template. Cheap to call, used by one thread at a time."""

    def __init__(self, tokenizer: Any) -> None:
        """Raises TemplateError where the tokenizer has no chat template, is not a fast one, or loses text."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise TemplateError(f"{type(tokenizer).__name__} is not a fast tokenizer: use one with a tokenizer.json")
        self.tokenizer = tokenizer
        self._text = TokenText(backend)
        self._prompts: dict[tuple[str | Message, ...], tuple[int, ...]] = {}
        self.template = ChatTemplate(tokenizer)
        added = [token.content for token in backend.get_added_tokens_decoder().values()]
        self._parser = parser_for(detect_family(self.template.source, added))
        self.family = self._parser.family
        """The model family, by the calls that its template or its vocabulary knows."""
        self._facts = facts_of(self.family, self.template.source)
        self._history_end_id = self._find_history_end()
        self.stop_token_ids = self._find_stop_ids()
        """Tokens that end a reply; the first is the end of an answer."""
        self._ends = tuple(
            self._text.text_of(i) for i in dict.fromkeys((*self.stop_token_ids, self._history_end_id or -1))
        )
        self.opens_reasoning = self._rendered([_USER], (), generation=True).rstrip().endswith(THINK_OPEN)
        self._history = HistoryCheck(self.template)
        self.calls_in_history = False
        """Whether the template needs earlier replies taken apart, calls and all, instead of as sampled text."""
        self.calls_in_history = self._needs_calls_in_history()
        self._check_round_trip()

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> tuple[int, ...]:
        """The whole conversation up to the generation point. The members of a group get the same tuple: a long prompt
        is encoded, and held in memory, once for all of them."""
        key = (self.template.tools_key(tools), *messages)
        ids = self._prompts.pop(key, None)
        if ids is None:
            frame, values = self._frame(self._with_opened_reasoning(messages), tools, generation=True)
            ids = self._encode_frame(frame, values)
            if len(self._prompts) >= _MAX_PROMPTS:
                del self._prompts[next(iter(self._prompts))]
        self._prompts[key] = ids  # last in the dict: the oldest is dropped first
        return ids

    def delta_ids(
        self, row_ids: Sequence[int], reply: Message, new_messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> tuple[int, ...]:
        """What follows `row_ids` (which end with the sampled `reply`) up to the next generation point.

        Begins with the end of the turn where the policy did not sample it itself: it was cut, or stopped by a string.
        """
        after, values = self._after_reply(reply, new_messages, tools)
        ids = self._encode_frame(after, values)
        last = row_ids[-1] if row_ids else None
        opening = self._text.piece(after[0]) if after and isinstance(after[0], str) else ()
        if last not in self.stop_token_ids:
            return ids
        if last in opening:
            return ids[opening.index(last) + 1 :]
        if self._ended_otherwise(last, opening):
            return ids[opening.index(self._history_end_id) + 1 :]
        return ids

    def history_message(self, reply: ParsedReply) -> Message:
        """A reply as it stands in the history that `prompt_ids` and `history_break` take."""
        return reply.message if self.calls_in_history else Message(role="assistant", content=reply.text)

    def history_break(
        self, history: Sequence[Message], new_messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> str | None:
        """Why the template's next prompt does not start with this turn's prompt and reply; None if it does.

        `history` ends with the last reply; replies stand in it as `history_message` gives them.
        White space does not count: the row keeps what was sampled, whatever spaces the template would put there.
        """
        opened = self.dressed(self._with_opened_reasoning(history))
        new = self.dressed(new_messages)
        return self._history.find_break(opened, history[-1], new, tools, as_sampled=not self.calls_in_history)

    def rewrites_reasoning(self) -> str | None:
        """Why tool calls with reasoning would break the prefix rule; None for append-only templates."""
        history = [_USER]
        for index in range(3):
            history.append(self._probe_reply(index, reasoning="why"))
            tool = Message(role="tool", content="result", name="probe", tool_call_id=f"call_{index}_0")
            reason = self.history_break(history, [tool], ())
            if reason:
                return reason
            history.append(tool)
        return None

    def parse(
        self,
        token_ids: Sequence[int],
        finish_reason: FinishReason,
        *,
        call_id_prefix: str,
        tools: Sequence[ToolSpec] = (),
    ) -> ParsedReply:
        """The reply as a message; decoded over its whole span, so that characters of several tokens stay whole."""
        ended = bool(token_ids) and token_ids[-1] in self.stop_token_ids
        return self._parser.parse(
            self.decode(token_ids[:-1] if ended else token_ids),
            tools=tools,
            call_id_prefix=call_id_prefix,
            reasoning_open=self.opens_reasoning,
            cut=finish_reason != "stop" and not ended,
            end_token=self.decode(token_ids[-1:]) if ended else None,
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a span, control tokens written out."""
        return self._text.decode(list(token_ids))

    def encode_reply(self, text: str) -> tuple[int, ...]:
        """A reply as a policy would sample it: control tokens on, the end of the turn last."""
        end = self.stop_token_ids[0]
        if self._facts.end_of_call and any(mark in text for mark in self._facts.call_marks):
            end = self._text.control_id(self._facts.end_of_call) or end
        return (*self._text.piece(text), end)

    def encode_plain(self, text: str) -> tuple[int, ...]:
        """Text of others: control tokens in it are spelled out letter by letter, never control ids."""
        return self._text.plain(text)

    def cut_tokens(self, text: str, max_tokens: int) -> tuple[str, int]:
        """`text` within `max_tokens`, and the number of tokens left out (see `cut_to_tokens`)."""
        return self._text.cut(text, max_tokens)

    def assistant_text(self, message: Message) -> str:
        """What the template writes for an assistant message, calls included, without the end of the turn.

        Raises TemplateError where the template's rendering does not continue its own generation prompt.
        """
        before = self._rendered([_USER], (), generation=True)
        text = self._rendered([_USER, message], (), generation=False)
        if not text.startswith(before):
            raise TemplateError(
                f"the template does not write an assistant message after its generation prompt {before[-40:]!r}; "
                "give demonstrations the reasoning that the prompt opens, or use another template"
            )
        text = text[len(before) :]
        end = max((text.rfind(mark) for mark in self._ends if mark), default=-1)
        return text[:end] if end >= 0 else text

    def demonstration_row(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """A conversation as one row, and which of its tokens are trained: the assistant's and the ends of its turns.

        It is laid out as a rollout with the same replies would be. It ends with the last assistant message.
        """
        replies = [index for index, message in enumerate(messages) if message.role == "assistant"]
        if not replies:
            raise ValueError("a demonstration needs an assistant message")
        ids = list(self.prompt_ids(messages[: replies[0]], tools))
        trained = [False] * len(ids)
        for index, following in zip(replies, [*replies[1:], None], strict=True):
            reply = self.encode_reply(self.assistant_text(messages[index]))
            ids += reply
            trained += [True] * len(reply)
            if following is not None:
                delta = self.delta_ids(reply, messages[index], messages[index + 1 : following], tools)
                ids += delta
                trained += [False] * len(delta)
        return tuple(ids), tuple(trained)

    def _after_reply(
        self, reply: Message, new: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> tuple[Frame, list[Value]]:
        """The template's frame behind the text of a reply, its end of turn first."""
        if not (self.calls_in_history and reply.tool_calls):
            frame, values = self._frame((_USER, _REPLY, *new), tools, generation=True)
            return frame[last_hole(frame, 1) + 1 :], values
        calls = placeholder_calls(reply.tool_calls, json.dumps({_MARK: ""}))
        stand_in = replace(_REPLY, content="", tool_calls=calls)
        frame, values = self._frame((_USER, stand_in, *new), tools, generation=True)
        return sampled_after(frame, _MARK, self._ends), values

    def _ended_otherwise(self, last: int, opening: Sequence[int]) -> bool:
        """The family has several ends, and the template writes another one here: two in a row would be wrong."""
        family_ends = (self._facts.end_of_answer, self._facts.end_of_call, *self._facts.other_ends)
        return (
            self._text.text_of(last) in family_ends
            and not self._facts.ends_are_roles
            and self._history_end_id in opening
        )

    def _frame(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, generation: bool
    ) -> tuple[Frame, list[Value]]:
        return self.template.frame(self.dressed(messages), tools, generation=generation)

    def dressed(self, messages: Sequence[Message]) -> list[Message]:
        return [with_family_ids(self._facts, message) for message in messages]

    def _probe_reply(self, index: int, *, reasoning: str) -> Message:
        if self.calls_in_history:
            call = ToolCall(id=f"call_{index}_0", name="probe", arguments='{"a": "b"}')
            thinks = "think" in self.template.source
            return Message(role="assistant", content="", tool_calls=(call,), reasoning=reasoning if thinks else None)
        prefix = "" if self.opens_reasoning else f"{THINK_OPEN}\n"
        return Message(role="assistant", content=f"{prefix}{reasoning}\n{THINK_CLOSE}\n\nanswer")

    def _with_opened_reasoning(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Sampled replies as the template would know them: with the `<think>` that the prompt wrote for them."""
        if not self.opens_reasoning or self.calls_in_history:
            return messages
        return [
            Message(role="assistant", content=f"{THINK_OPEN}\n{message.content}")
            if message.role == "assistant" and not message.tool_calls and message.reasoning is None
            else message
            for message in messages
        ]

    def _rendered(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, generation: bool) -> str:
        return fill(*self._frame(messages, tools, generation=generation))

    def _encode_frame(self, frame: Sequence[str | Hole], values: Sequence[Value]) -> tuple[int, ...]:
        ids: list[int] = []
        for part in frame:
            if isinstance(part, str):
                ids += self._text.piece(part)
            else:
                value = values[part.index]
                text = part.written(value.text)
                ids += self._text.piece(text) if value.by_policy else self._text.plain(text)
        return tuple(ids)

    def _find_history_end(self) -> int | None:
        """The control token that the template writes after an assistant message that others follow."""
        frame, _ = self.template.frame([_USER, _REPLY, _USER], (), generation=False)
        after = frame[last_hole(frame, 1) + 1 :]
        ids = self._text.piece(after[0]) if after and isinstance(after[0], str) else ()
        return next((i for i in ids if i in self._text.control_ids), None)

    def _find_stop_ids(self) -> tuple[int, ...]:
        facts = self._facts
        named = (facts.end_of_answer, facts.end_of_call, *facts.other_ends)
        ends = [self._text.control_id(token) for token in named if token]
        if not any(end is not None for end in ends):
            ends = [self._history_end_id]
        ends.append(getattr(self.tokenizer, "eos_token_id", None))
        found = tuple(dict.fromkeys(end for end in ends if end is not None))
        if not found:
            raise TemplateError("the template writes no token at the end of a turn, and the tokenizer has no EOS token")
        return found

    def _needs_calls_in_history(self) -> bool:
        tool = Message(role="tool", content="x", name="probe", tool_call_id="call_0_0")
        try:
            self._frame([_USER, _REPLY, tool, _REPLY, tool], (), generation=True)
        except TemplateError:
            return True
        if self.rewrites_reasoning() is None:
            return False
        self.calls_in_history = True
        try:
            return self.rewrites_reasoning() is None
        except TemplateError:
            return False

    def _check_round_trip(self) -> None:
        call = ToolCall(id="call_0", name="probe", arguments='{"a": "b"}')
        text = f"A  b\n{{}} é 😀 {json.dumps(call.arguments)}"
        if (back := self.decode(self.encode_plain(text))) != text:
            raise TemplateError(f"the tokenizer does not give back what it encoded: {text!r} became {back!r}")
        self._check_pieces()

    def _check_pieces(self) -> None:
        """Prompts are encoded piece by piece; that must give the template's text, or what it gives when encoded whole.

        (Whole: some control tokens swallow the white space beside them, wherever they are encoded.)
        """
        frame, values = self._frame((_USER, _REPLY, _USER), (), generation=True)
        text, back = fill(frame, values), self.decode(self._encode_frame(frame, values))
        if back in (text, self.decode(self._text.piece(text))):
            return
        at = next((i for i, (a, b) in enumerate(zip(text, back, strict=False)) if a != b), min(len(text), len(back)))
        raise TemplateError(
            f"the tokenizer changes the conversation where its pieces meet (one that puts a space before every text, "
            f"say): the template writes {text[max(0, at - 20) : at + 20]!r}, the prompt's tokens say "
            f"{back[max(0, at - 20) : at + 20]!r}; use a tokenizer without a prefix space"
        )
