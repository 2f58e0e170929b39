"""Toy tokenizers, templates and an environment for the tests of the agent layer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from quintain.agents.config import RolloutConfig
from quintain.agents.env_threads import EnvThreads, ThreadedEnv
from quintain.agents.renderer import ChatRenderer
from quintain.agents.rollout import Assignment, RolloutSetup, run_trajectory
from quintain.agents.scripted_policy import Script, ScriptedPolicy
from quintain.agents.trajectory import Trajectory
from quintain.envs import Message, Task, ToolCall, ToolEnv, reward, tool

CONTROL = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
THINK = ("<think>", "</think>")

CHATML = """\
{%- if tools -%}
{{ '<|im_start|>system\\n# Tools\\n' + (tools | map('tojson') | join('\\n')) + '<|im_end|>\\n' }}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{%- if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif -%}
{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif -%}
{%- else -%}
{{ '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for call in m.tool_calls or [] -%}
{{ '\\n' if m.content or not loop.first else '' }}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""

DROPS_REASONING = """\
{%- for m in messages -%}
{%- set text = m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last else m.content -%}
{{ '<|im_start|>' + m.role + '\\n' + text + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""

OPENS_REASONING = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif -%}
"""

TEXT = (
    "having a quick brown fox 0 1 2 3 4 5 6 7 8 9",
    "user system assistant\n",
    "the answer is thinking of tools",
) * 6


@cache
def tokenizer(template: str = CHATML, *, bos: bool = False, byte_only: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on `TEXT`; `bos`: adds `<s>` by itself; `byte_only`: no merges."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    bpe.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=256 if byte_only else 600,
        min_frequency=1,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(TEXT, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=template)
    fast.add_special_tokens({"eos_token": "<|im_end|>", "bos_token": "<s>", "pad_token": "<|endoftext|>"})
    fast.add_tokens([*CONTROL, *THINK])  # not all "special" to the tokenizer, as in published ones
    if bos:
        backend = fast.backend_tokenizer
        bos_id = backend.token_to_id("<s>")
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos_id)])
    return fast


@cache
def renderer(template: str = CHATML) -> ChatRenderer:
    return ChatRenderer(tokenizer(template))


def call_text(name: str = "say", arguments: str = '{"text": "hello"}') -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def as_dicts(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """The plain form that `apply_chat_template` takes."""

    def calls(message: Message) -> list[dict[str, Any]]:
        return [
            {"type": "function", "function": {"name": c.name, "arguments": json.loads(c.arguments)}}
            for c in message.tool_calls
        ]

    return [{"role": m.role, "content": m.content, "tool_calls": calls(m)} for m in messages]


def assistant(content: str = "", *calls: ToolCall, reasoning: str | None = None) -> Message:
    return Message(role="assistant", content=content, tool_calls=calls, reasoning=reasoning)


class Parrot(ToolEnv):
    """`say` gives back `reply` (the text itself unless a test sets it); right is the answer in the row."""

    needs_isolation = False
    max_turns = 8
    reply: str | None = None

    def rows(self, split: str) -> list[Mapping[str, Any]]:
        return [{"prompt": "say it", "answer": "done"}]

    @tool
    def say(self, text: str) -> str:
        """Say something.

        Args:
            text: What to say.
        """
        return text if type(self).reply is None else str(type(self).reply)

    @reward
    def right(self) -> float:
        return float(self.answer == self.task.data["answer"])

    @reward(weight=0)
    def num_words(self) -> float:
        return float(len(self.answer.split()))


LARGE: dict[str, Any] = {"max_new_tokens": 512, "max_trajectory_tokens": 8192}
TASK = Task(id="t", prompt="say it", data={"answer": "done"})


def roll(
    script: Script,
    *,
    env: type[ToolEnv] | Callable[[], ToolEnv] = Parrot,
    template: str = CHATML,
    policy: ScriptedPolicy | None = None,
    task: Task = TASK,
    **config: Any,
) -> Trajectory:
    """One trajectory of a scripted policy, from start to end."""
    chat = renderer(template)
    setup = RolloutSetup(
        policy=policy or ScriptedPolicy(script, renderer=chat), renderer=chat, config=RolloutConfig(**LARGE | config)
    )

    async def run() -> Trajectory:
        threads = EnvThreads(2)
        threaded = ThreadedEnv(env(), threads)
        try:
            return await run_trajectory(setup, Assignment(task=task, draw=0), threaded)
        finally:
            await threaded.close()
            threads.close()

    return asyncio.run(run())


def sampled_texts(trajectory: Trajectory, chat: ChatRenderer) -> list[str]:
    """The decoded sampled spans of the trajectory's only row."""
    (row,) = trajectory.rows
    spans: list[list[int]] = []
    for index, (token, flag) in enumerate(zip(row.token_ids, row.sampled, strict=True)):
        if flag and (index == 0 or not row.sampled[index - 1]):
            spans.append([])
        if flag:
            spans[-1].append(token)
    return [chat.decode(span) for span in spans]


def count_control(ids: Sequence[int], chat: ChatRenderer) -> int:
    return sum(i in chat.tokenizer.get_added_vocab().values() for i in ids)
