"""Models and tokenizers: a tiny one from scratch, or one from a Hugging Face folder or hub name.

The tiny tokenizer is a byte-level BPE in which every digit is a token of its own, with ChatML and Hermes tool marks as
special tokens and a chat template in Qwen's style. The template is append-only: rendering more messages never changes
what was rendered before. It does not write the tools' schemas into the prompt: a model this small learns its one tool
from demonstrations, and short prompts keep training quick.

Everything follows from the texts, the sizes and the seed. Weights are random: see `trainer/warm_start.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

from quintain.envs.message import Message
from quintain.recipes.config import ScratchModelConfig
from quintain.trainer.model_files import own_memory

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)

CHAT_TEMPLATE = """\
{#- ChatML with Hermes tool calls. Append-only; `tools` is ignored, so that prompts stay short for a tiny model. -#}
{%- for message in messages -%}
    {%- if message.role == 'tool' -%}
        {%- if loop.first or loop.previtem.role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
        {{ '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' -%}{{ '<|im_end|>\\n' }}{%- endif -%}
    {%- elif message.role == 'assistant' -%}
        {{ '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content -%}
            {{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif -%}
        {{ message.content or '' }}
        {%- for tool_call in message.tool_calls or [] -%}
            {%- set call = tool_call.function or tool_call -%}
            {%- if message.content or not loop.first -%}{{ '\\n' }}{%- endif -%}
            {{ '<tool_call>\\n{"name": ' + call.name | tojson + ', "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson -}}
            {{ '}\\n</tool_call>' }}
        {%- endfor -%}
        {{ '<|im_end|>\\n' }}
    {%- else -%}
        {{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

INIT_STD = 0.04
"""Of the random weights. The usual 0.02 suits wide models; at this width it delays the copying of digits by half."""

# What the template itself writes between special tokens: as frequent in training rows as the texts are.
SCAFFOLD = ("system\n", "user\n", "assistant\n", "\n", '\n{"name": "', '", "arguments": {"', '": "', '"}}\n')


def build_scratch(config: ScratchModelConfig, texts: Iterable[str], *, seed: int) -> tuple[Any, Any]:
    """A randomly initialised Qwen3 model and its tokenizer, trained on `texts` (what the model will read and write).

    Returns `(model, tokenizer)`; both save with `save_pretrained`. Raises ValueError where there is no text.
    """
    tokenizer = build_tokenizer(texts, vocab_size=config.vocab_size, max_tokens=config.max_positions)
    model_config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        initializer_range=INIT_STD,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.Qwen3ForCausalLM(model_config)
    return model.float(), tokenizer


def build_tokenizer(texts: Iterable[str], *, vocab_size: int, max_tokens: int) -> Any:
    """Train the byte-level BPE. Equal texts give equal tokenizers."""
    pieces = [piece for text in texts for piece in _between_special_tokens(text)]
    if not pieces:
        raise ValueError("the tokenizer needs texts to learn from, and the environment gave none")
    bpe = tokenizers.Tokenizer(models.BPE())
    split_digits = pre_tokenizers.Digits(individual_digits=True)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split_digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])  # type: ignore[assignment]
    bpe.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    bpe.train_from_iterator([*pieces, *(SCAFFOLD * len(pieces))], trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=[t for t in SPECIAL_TOKENS if t not in ("<|im_end|>", "<|endoftext|>")],
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_tokens,
        clean_up_tokenization_spaces=False,
    )


def conversation_texts(conversations: Iterable[Sequence[Message]]) -> Iterator[str]:
    """The texts of demonstrations, calls in their JSON form: what `build_scratch` learns its tokens from."""
    for conversation in conversations:
        for message in conversation:
            if message.content:
                yield message.content
            for call in message.tool_calls:
                yield f'\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n'


def load_model(path: str | Path) -> tuple[Any, Any]:
    """Model and tokenizer from a Hugging Face folder or hub name; fp32 on CPU.

    Raises FileNotFoundError, naming the path, where there is neither such a folder nor a model of that name.
    """
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(path))
        model = transformers.AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32)
    except OSError as error:
        raise FileNotFoundError(
            f"model.path = {str(path)!r} is neither a folder with a model and a tokenizer in Hugging Face's format nor "
            f"a name that the hub answers to ({error}); give a folder relative to the recipe, or leave model.path out "
            "to build a tiny model from scratch"
        ) from error
    own_memory(model)
    return model, tokenizer


def _between_special_tokens(text: str) -> list[str]:
    return [piece for piece in re.split("|".join(map(re.escape, SPECIAL_TOKENS)), text) if piece]
