"""Messages to token ids and back, under the token law: what was sampled is never encoded again.

    turn 0      prompt_ids(messages)                     system, user, generation point
    turn n > 0  row + sampled ids + delta_ids(new ones)  delta = what the template writes between the last sampled token
                                                         and the next generation point

Invariants:
- Template text is encoded with control tokens on; text of users, tools and the system as plain text, so that the
  control ids of a row are those that the template itself wrote (and those that the policy sampled).
- Nothing is added that the template does not write: no second BOS.
- A turn-end token that the policy did not sample is part of the delta, hence not trained.

It works with every template that a fast tokenizer carries. Templates that rewrite earlier turns are found by
`history_break`; what to do then is the recipe's choice, not this module's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import Encoding, Tokenizer

from quintain.agents.completion import FinishReason
from quintain.agents.template import ChatTemplate, Hole, Shape, TemplateError, Value, fill, plan, skeleton
from quintain.agents.tool_calls import THINK_CLOSE, THINK_OPEN, ParsedReply, detect_family, parser_for
from quintain.agents.tool_output import cut_to_tokens
from quintain.envs.message import Message, ToolCall, ToolSpec

__all__ = ["ChatRenderer", "ParsedReply", "TemplateError"]

_USER = Message(role="user", content="x")
_MAX_CACHED = 65536


class ChatRenderer:
    """Renders through one tokenizer's chat template. Cheap to call, used by one thread at a time."""

    def __init__(self, tokenizer: Any) -> None:
        """Raises TemplateError where the tokenizer has no chat template, is not a fast one, or loses text."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise TemplateError(f"{type(tokenizer).__name__} is not a fast tokenizer: use one with a tokenizer.json")
        self.tokenizer = tokenizer
        self._backend = backend
        self._plain = _without_added_tokens(backend)
        self._added_ids = frozenset(backend.get_added_tokens_decoder())
        self._template = ChatTemplate(tokenizer)
        self._piece_ids: dict[str, tuple[int, ...]] = {}
        self._breaks: dict[Shape, str | None] = {}
        self._turn_end_id = self._find_turn_end()
        ends = (self._turn_end_id, getattr(tokenizer, "eos_token_id", None))
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(end for end in ends if end is not None))
        """Tokens that end a reply: the template's end of turn, then the tokenizer's end of text."""
        if not self.stop_token_ids:
            raise TemplateError("the template writes no token at the end of a turn, and the tokenizer has no EOS token")
        self._opens_reasoning = self._text([_USER], (), generation=True).rstrip().endswith(THINK_OPEN)
        added = [token.content for token in backend.get_added_tokens_decoder().values()]
        self._parser = parser_for(detect_family(str(getattr(tokenizer, "chat_template", "")), added))
        self._check_round_trip()

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> tuple[int, ...]:
        """The whole conversation up to the generation point."""
        frame, values = self._template.frame(self._with_opened_reasoning(messages), tools, generation=True)
        return self._encode_frame(frame, values)

    def delta_ids(
        self,
        row_ids: Sequence[int],
        finish_reason: FinishReason,
        new_messages: Sequence[Message],
        tools: Sequence[ToolSpec],
    ) -> tuple[int, ...]:
        """What follows `row_ids` (which end with a sampled reply) up to the next generation point.

        Begins with the end of the turn where the policy did not sample it itself: it was cut, or stopped by a string.
        """
        del finish_reason  # the ids tell it: an engine may report a cut on the very token that ends the turn
        messages = (_USER, Message(role="assistant", content="x"), *new_messages)
        frame, values = self._template.frame(messages, tools, generation=True)
        after = frame[_last_index(frame, Hole(1)) + 1 :]
        ids = self._encode_frame(after, values)
        last = row_ids[-1] if row_ids else None
        opening = self._piece(after[0]) if after and isinstance(after[0], str) else ()
        if last in self.stop_token_ids and last in opening:
            return ids[opening.index(last) + 1 :]
        return ids

    def history_break(
        self, history: Sequence[Message], new_messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> str | None:
        """Why the template's next prompt does not start with this turn's prompt and reply; None if it does.

        `history` ends with the last reply; replies stand in it as sampled text (`Message.content`, no parsed calls).
        White space does not count: the row keeps what was sampled, whatever spaces the template would put there.
        """
        opened = self._with_opened_reasoning(history)
        shapes = [plan(message)[0] for message in (*opened, *new_messages)]
        key = (self._template.tools_key(tools), len(history), *shapes)
        if key not in self._breaks:
            if len(self._breaks) >= _MAX_CACHED:
                self._breaks.clear()
            reply, _ = plan(history[-1])
            self._breaks[key] = self._find_break(shapes, len(history), reply, tools)
        return self._breaks[key]

    def rewrites_reasoning(self) -> str | None:
        """Why tool calls with reasoning would break the prefix rule; None for append-only templates."""
        prefix = "" if self._opens_reasoning else f"{THINK_OPEN}\n"
        history = [_USER]
        for index in range(3):
            history.append(Message(role="assistant", content=f"{prefix}why\n{THINK_CLOSE}\n\nanswer"))
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
            reasoning_open=self._opens_reasoning,
            cut=finish_reason != "stop" and not ended,
            end_token=self.decode(token_ids[-1:]) if ended else None,
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a span, control tokens written out."""
        return self._backend.decode(list(token_ids), skip_special_tokens=False)

    def encode_reply(self, text: str) -> tuple[int, ...]:
        """A reply as a policy would sample it: control tokens on, the end of the turn last."""
        return (*self._piece(text), self.stop_token_ids[0])

    def encode_plain(self, text: str) -> tuple[int, ...]:
        """Text of others: control tokens in it are spelled out letter by letter, never control ids."""
        ids = tuple(self._plain_encoding(text).ids)
        if self._added_ids.isdisjoint(ids):
            return ids
        # Some vocabularies hold their control tokens as ordinary words too; single characters never match those.
        return tuple(i for char in text for i in self._plain_encoding(char).ids if i not in self._added_ids)

    def cut_tokens(self, text: str, max_tokens: int) -> tuple[str, int]:
        """`text` within `max_tokens`, and the number of tokens left out (see `cut_to_tokens`)."""
        if len(text.encode(errors="replace")) <= max_tokens:  # a token is at least one byte
            return text, 0
        return cut_to_tokens(_encodable(text), max_tokens, lambda part: self._plain_encoding(part).offsets)

    def assistant_text(self, message: Message) -> str:
        """What the template writes for an assistant message, calls included, without the end of the turn.

        Raises TemplateError where the template's rendering does not continue its own generation prompt.
        """
        before = self._text([_USER], (), generation=True)
        text = self._text([_USER, message], (), generation=False)
        if not text.startswith(before):
            raise TemplateError(
                f"the template does not write an assistant message after its generation prompt {before[-40:]!r}; "
                "give demonstrations the reasoning that the prompt opens, or use another template"
            )
        text = text[len(before) :]
        mark = None if self._turn_end_id is None else self._backend.id_to_token(self._turn_end_id)
        end = text.rfind(mark) if mark else -1
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
                delta = self.delta_ids(reply, "stop", messages[index + 1 : following], tools)
                ids += delta
                trained += [False] * len(delta)
        return tuple(ids), tuple(trained)

    def _with_opened_reasoning(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Sampled replies as the template would know them: with the `<think>` that the prompt wrote for them."""
        if not self._opens_reasoning:
            return messages
        return [
            Message(role="assistant", content=f"{THINK_OPEN}\n{message.content}")
            if message.role == "assistant" and not message.tool_calls and message.reasoning is None
            else message
            for message in messages
        ]

    def _find_break(
        self, shapes: Sequence[Shape], num_history: int, reply: Shape, tools: Sequence[ToolSpec]
    ) -> str | None:
        before = self._template.frame_of(shapes[: num_history - 1], tools, generation=True)
        num_holes = sum(_num_holes(shape) for shape in shapes[: num_history - 1])
        holes = iter(range(num_holes, num_holes + _num_holes(reply)))
        sampled = [segment if segment is not None else Hole(next(holes)) for segment in reply[1]]
        expected = skeleton([*before, *sampled])
        rendered = skeleton(self._template.frame_of(shapes, tools, generation=True))
        if rendered.startswith(expected):
            return None
        at = next((i for i, (a, b) in enumerate(zip(expected, rendered, strict=False)) if a != b), len(rendered))
        return (
            f"the chat template rewrites earlier turns: the row has {expected[max(0, at - 20) : at + 20]!r} where the "
            f"template now writes {rendered[max(0, at - 20) : at + 20]!r}; set rollout.history to `append` (keep the "
            "sampled tokens) or `fork` (one row a turn)"
        )

    def _text(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, generation: bool) -> str:
        return fill(*self._template.frame(messages, tools, generation=generation))

    def _encode_frame(self, frame: Sequence[str | Hole], values: Sequence[Value]) -> tuple[int, ...]:
        ids: list[int] = []
        for part in frame:
            if isinstance(part, str):
                ids += self._piece(part)
            else:
                value = values[part.index]
                ids += self._piece(value.text) if value.by_policy else self.encode_plain(value.text)
        return tuple(ids)

    def _piece(self, text: str) -> tuple[int, ...]:
        """Ids of text that may hold control tokens; cached."""
        ids = self._piece_ids.get(text)
        if ids is None:
            if len(self._piece_ids) >= _MAX_CACHED:
                self._piece_ids.clear()
            encoding = self._backend.encode(_encodable(text), add_special_tokens=False)
            ids = self._piece_ids[text] = tuple(encoding.ids)
        return ids

    def _plain_encoding(self, text: str) -> Encoding:
        return self._plain.encode(_encodable(text), add_special_tokens=False)

    def _find_turn_end(self) -> int | None:
        frame, _ = self._template.frame([_USER, Message(role="assistant", content="x"), _USER], (), generation=False)
        after = frame[_last_index(frame, Hole(1)) + 1 :]
        ids = self._piece(after[0]) if after and isinstance(after[0], str) else ()
        return next((i for i in ids if i in self._added_ids), None)

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
        conversation = (_USER, Message(role="assistant", content="x"), _USER)
        frame, values = self._template.frame(conversation, (), generation=True)
        text, back = fill(frame, values), self.decode(self._encode_frame(frame, values))
        if back in (text, self.decode(self._piece(text))):
            return
        at = next((i for i, (a, b) in enumerate(zip(text, back, strict=False)) if a != b), min(len(text), len(back)))
        raise TemplateError(
            f"the tokenizer changes the conversation where its pieces meet (one that puts a space before every text, "
            f"say): the template writes {text[max(0, at - 20) : at + 20]!r}, the prompt's tokens say "
            f"{back[max(0, at - 20) : at + 20]!r}; use a tokenizer without a prefix space"
        )


def _without_added_tokens(backend: Tokenizer) -> Tokenizer:
    """The same vocabulary and merges, but control and other added tokens are ordinary text to it."""
    state = json.loads(backend.to_str())
    state.update(added_tokens=[], post_processor=None, truncation=None, padding=None)
    return Tokenizer.from_str(json.dumps(state))


def _last_index(frame: Sequence[str | Hole], part: Hole) -> int:
    for index in range(len(frame) - 1, -1, -1):
        if frame[index] == part:
            return index
    raise TemplateError("the chat template leaves out the text of an assistant message")


def _num_holes(shape: Shape) -> int:
    return sum(segment is None for segment in shape[1]) + bool(shape[2])


def _encodable(text: str) -> str:
    """Lone surrogates (a model can write them as JSON escapes) have no UTF-8 form; they become `?`."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="replace").decode()
    return text
