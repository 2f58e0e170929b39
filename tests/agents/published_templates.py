"""Chat templates as published, read from wheels that are downloaded once and never installed, and tokenizers for them.

`trl` ships templates and their training variants (with generation marks), `xinference` one for nearly every model. The
wheels lie in `.cache/test-wheels`; nothing of them is in this repository.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from quintain.agents.renderer import ChatRenderer

WHEELS = Path(__file__).parents[2] / ".cache" / "test-wheels"
VERSIONS = {"trl": "1.16.0", "xinference": "4.1.0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Where a family's template is, and the tokens that its tokenizers treat as control tokens."""

    trl: str | None = None
    """File name in trl, without `.jinja`."""
    xinference: str | None = None
    """File name in xinference's model list, without `.json`."""
    own: str | None = None
    """A template of our own, where no package carries one."""
    control: tuple[str, ...]
    bos: str | None = None
    eos: str
    family: str
    """What `quintain` takes it for."""


CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
QWEN = (*CHATML, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
LLAMA = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|start_header_id|>", "<|python_tag|>")
DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")
DEEPSEEK_CALLS = tuple(
    f"<｜tool▁{what}｜>"
    for what in (
        "calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep",
        "outputs▁begin", "outputs▁end", "output▁begin", "output▁end",
    )
)  # fmt: skip
GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")
HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
KIMI = (
    "[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>",
)  # fmt: skip
MISTRAL = (
    "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
    "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
)  # fmt: skip
# DeepSeek-V3.2 is published with a Python encoder and no template. In its form a call is XML in ｜DSML｜ tags.
DSML = """\
{{- bos_token -}}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{{ m.content }}
{%- elif m.role == 'user' -%}{{ '<｜User｜>' + m.content + '<｜Assistant｜><think>' }}
{%- elif m.role == 'tool' -%}
{%- if loop.previtem.role != 'tool' %}{{ '\\n\\n<function_results>' }}{% endif -%}
{{ '\\n<result>' + m.content + '</result>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '\\n</function_results>\\n\\n<think>' }}{% endif -%}
{%- else -%}
{{ (m.reasoning_content or '') + '</think>' + m.content }}
{%- if m.tool_calls %}{{ '\\n\\n<｜DSML｜function_calls>' }}
{%- for call in m.tool_calls -%}
{{ '\\n<｜DSML｜invoke name="' + call.function.name + '">' }}
{%- for key, value in call.function.arguments | items -%}
{{ '\\n<｜DSML｜parameter name="' + key + '" string="' + ('true' if value is string else 'false') + '">' }}
{{- value if value is string else value | tojson }}{{ '</｜DSML｜parameter>' }}
{%- endfor %}{{ '\\n</｜DSML｜invoke>' }}
{%- endfor %}{{ '\\n</｜DSML｜function_calls>' }}{% endif -%}
{{ eos_token }}
{%- endif -%}
{%- endfor -%}
"""
GLM_ALL = (*GLM, *QWEN[3:], "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

TEMPLATES = {
    "qwen2.5": Published(trl="qwen2_5", control=QWEN, eos="<|im_end|>", family="hermes"),
    "qwen3": Published(trl="qwen3", control=QWEN, eos="<|im_end|>", family="hermes"),
    "qwen3-2507": Published(trl="qwen3_instruct_2507", control=QWEN, eos="<|im_end|>", family="hermes"),
    "qwen3-coder": Published(xinference="Qwen3-Coder", control=QWEN, eos="<|im_end|>", family="qwen3_coder"),
    "llama3": Published(trl="llama3", control=LLAMA, bos=LLAMA[0], eos="<|eot_id|>", family="llama3"),
    "llama3.1": Published(trl="llama3_1", control=LLAMA, bos=LLAMA[0], eos="<|eot_id|>", family="llama3"),
    "mistral": Published(xinference="mistral-nemo-instruct", control=MISTRAL, bos="<s>", eos="</s>", family="mistral"),
    "glm-4.5": Published(trl="glm4moe", control=GLM_ALL, eos="<|endoftext|>", family="glm"),
    "glm-4.7": Published(xinference="GLM-4.7", control=GLM_ALL, eos="<|endoftext|>", family="glm"),
    "deepseek-v3": Published(
        trl="deepseekv3", control=(*DEEPSEEK, *DEEPSEEK_CALLS), bos=DEEPSEEK[0], eos=DEEPSEEK[1], family="deepseek_v3"
    ),
    "deepseek-v3.1": Published(
        xinference="Deepseek-V3.1",
        control=(*DEEPSEEK, *DEEPSEEK_CALLS),
        bos=DEEPSEEK[0],
        eos=DEEPSEEK[1],
        family="deepseek_v31",
    ),
    "deepseek-v3.2-exp": Published(
        xinference="DeepSeek-V3.2",
        control=(*DEEPSEEK, *DEEPSEEK_CALLS),
        bos=DEEPSEEK[0],
        eos=DEEPSEEK[1],
        family="deepseek_v31",
    ),
    "deepseek-v3.2": Published(
        own=DSML, control=(*DEEPSEEK, "｜DSML｜"), bos=DEEPSEEK[0], eos=DEEPSEEK[1], family="deepseek_v32"
    ),
    "kimi-k2": Published(xinference="Kimi-K2.5", control=(*KIMI, "<think>", "</think>"), eos="[EOS]", family="kimi_k2"),
    "gpt-oss": Published(trl="gptoss", control=HARMONY, eos="<|return|>", family="harmony"),
}


@cache
def wheel(project: str) -> zipfile.ZipFile:
    """The pinned wheel, downloaded without dependencies where it is not there yet."""
    pattern = f"{project}-{VERSIONS[project]}-*.whl"
    if not [*WHEELS.glob(pattern)]:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps"]
        subprocess.run([*pip, "--dest", WHEELS, f"{project}=={VERSIONS[project]}"], check=True, timeout=280)
    return zipfile.ZipFile(next(WHEELS.glob(pattern)))


@cache
def template(name: str, *, training: bool = False) -> str:
    """The text of a published template; `training`: trl's variant with generation marks."""
    published = TEMPLATES[name]
    if published.own is not None:
        return published.own
    if published.trl is not None:
        path = f"trl/chat_templates/{published.trl}{'_training' if training else ''}.jinja"
        return wheel("trl").read(path).decode()
    models_of = json.loads(wheel("xinference").read(f"xinference/model/llm/models/{published.xinference}.json"))
    text = (models_of[0] if isinstance(models_of, list) else models_of)["chat_template"]
    # The copies of DeepSeek's one-line templates have blanks between the tags that the originals do not have.
    return re.sub(r"(?<=[%}]\}) +(?=\{[%{])", "", text) if name.startswith("deepseek") else text


@cache
def tokenizer(name: str, *, training: bool = False) -> PreTrainedTokenizerFast:
    """A small byte-level BPE with the family's control tokens and template."""
    published = TEMPLATES[name]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    bpe.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, min_frequency=1, show_progress=False, initial_alphabet=alphabet)
    bpe.train_from_iterator(["the answer is a tool call of the user\n"] * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=template(name, training=training))
    fast.add_special_tokens({"eos_token": published.eos})
    if published.bos:
        fast.add_special_tokens({"bos_token": published.bos})
    fast.add_tokens([token for token in published.control if token not in (published.eos, published.bos)])
    return fast


@cache
def renderer(name: str) -> ChatRenderer:
    return ChatRenderer(tokenizer(name))
