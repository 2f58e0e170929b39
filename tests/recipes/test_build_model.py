"""The tiny model and tokenizer made on the spot: template, digits, special tokens, repeatability, saving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quintain.envs.message import Message, ToolCall
from quintain.recipes.build_model import SPECIAL_TOKENS, build_scratch, conversation_texts, load_model
from quintain.recipes.config import ScratchModelConfig

CONFIG = ScratchModelConfig(hidden_size=32, head_dim=8, intermediate_size=64)
CALL = ToolCall(id="call_0", name="calculator", arguments='{"expression": "37+48"}')


def texts() -> list[str]:
    demo = [
        Message(role="user", content="What is 37 plus 48?"),
        Message(role="assistant", content="", tool_calls=(CALL,)),
        Message(role="tool", content="85", tool_call_id="call_0", name="calculator"),
        Message(role="assistant", content="The answer is 85."),
    ]
    return list(conversation_texts([demo] * 40))


@pytest.fixture(scope="module")
def built() -> tuple[Any, Any]:
    return build_scratch(CONFIG, texts(), seed=0)


def chat(arguments: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "id": "call_0", "function": {"name": "calculator", "arguments": arguments}}
    return [
        {"role": "system", "content": "Use the tool."},
        {"role": "user", "content": "What is 37 plus 48?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "85"},
        {"role": "assistant", "content": "The answer is 85."},
    ]


RENDERED = (
    "<|im_start|>system\nUse the tool.<|im_end|>\n"
    "<|im_start|>user\nWhat is 37 plus 48?<|im_end|>\n"
    '<|im_start|>assistant\n<tool_call>\n{"name": "calculator", "arguments": {"expression": "37+48"}}\n</tool_call>'
    "<|im_end|>\n"
    "<|im_start|>user\n<tool_response>\n85\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\nThe answer is 85.<|im_end|>\n"
)


@pytest.mark.parametrize("arguments", [{"expression": "37+48"}, '{"expression": "37+48"}'])
def test_the_template_writes_chatml_with_hermes_calls_from_a_mapping_and_from_json_text(
    built: tuple[Any, Any], arguments: Any
) -> None:
    assert built[1].apply_chat_template(chat(arguments), tokenize=False) == RENDERED


def test_the_template_is_append_only(built: tuple[Any, Any]) -> None:
    """Every shorter conversation is a prefix of the longer one; a generation prompt is how the next reply begins."""
    messages = chat({"expression": "37+48"})
    for n in (1, 2, 3, 4):
        assert RENDERED.startswith(built[1].apply_chat_template(messages[:n], tokenize=False))
    prompt = built[1].apply_chat_template(messages[:4], tokenize=False, add_generation_prompt=True)
    assert RENDERED.startswith(prompt) and prompt.endswith("<|im_start|>assistant\n")


def test_several_calls_their_results_and_reasoning(built: tuple[Any, Any]) -> None:
    calls = [{"name": "f", "arguments": {"q": "naïve – 雪"}}, {"name": "g", "arguments": {}}]
    messages = [
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": "Two.", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    text = built[1].apply_chat_template(messages, tokenize=False)
    assert text.endswith(
        "<|im_start|>assistant\n<think>\nhm\n</think>\n\nTwo.\n"
        '<tool_call>\n{"name": "f", "arguments": {"q": "naïve – 雪"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
    )


def test_digits_are_single_tokens_and_special_tokens_are_one_token_each(built: tuple[Any, Any]) -> None:
    _, tokenizer = built
    assert [tokenizer.decode([i]) for i in tokenizer.encode("3748")] == ["3", "7", "4", "8"]
    for token in SPECIAL_TOKENS:
        assert tokenizer.encode(token) == [tokenizer.convert_tokens_to_ids(token)], token
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert len(tokenizer) <= CONFIG.vocab_size


def test_every_text_comes_back_from_its_tokens(built: tuple[Any, Any]) -> None:
    _, tokenizer = built
    for text in (RENDERED, "naïve – 雪 \t 12 3\n\n", ' \\" {"a": [1, 2]} '):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_marks_in_plain_text_can_be_encoded_as_text(built: tuple[Any, Any]) -> None:
    """B02: what a tool prints must not become a control token."""
    _, tokenizer = built
    ids = tokenizer.encode("a</tool_response><|im_end|>", split_special_tokens=True)
    marks = set(tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)))
    assert not marks & set(ids) and tokenizer.decode(ids) == "a</tool_response><|im_end|>"


def test_a_seed_gives_the_same_model_and_tokenizer_and_another_seed_other_weights(built: tuple[Any, Any]) -> None:
    model, tokenizer = built
    torch.manual_seed(99)
    state = torch.random.get_rng_state()
    again, same_tokenizer = build_scratch(CONFIG, texts(), seed=0)
    assert torch.equal(torch.random.get_rng_state(), state)
    other, _ = build_scratch(CONFIG, texts(), seed=1)
    assert same_tokenizer.get_vocab() == tokenizer.get_vocab()
    first, second, third = (m.model.embed_tokens.weight for m in (model, again, other))
    assert torch.equal(first, second) and not torch.equal(first, third)


def test_model_and_tokenizer_survive_saving_and_loading(built: tuple[Any, Any], tmp_path: Path) -> None:
    for part in built:
        part.save_pretrained(tmp_path / "m")
    model, tokenizer = load_model(tmp_path / "m")
    ids = built[1].encode(RENDERED)
    assert tokenizer.encode(RENDERED) == ids and model.dtype == torch.float32
    assert tokenizer.encode("</tool_call>", split_special_tokens=True) == built[1].encode(
        "</tool_call>", split_special_tokens=True
    )
    assert tokenizer.apply_chat_template(chat("{}"), tokenize=False).count("<|im_start|>") == 5
    with torch.no_grad():
        assert torch.equal(model(torch.tensor([ids])).logits, built[0](torch.tensor([ids])).logits)


def test_a_loaded_models_weights_lie_aligned_in_memory_as_a_built_ones(built: tuple[Any, Any], tmp_path: Path) -> None:
    """What a run computes must not depend on where its weights came from."""
    for part in built:
        part.save_pretrained(tmp_path / "m")
    model, _ = load_model(tmp_path / "m")
    assert all(tensor.data_ptr() % 64 == 0 for tensor in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_path_without_a_model_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"model\.path = .*absent.*relative to the recipe"):
        load_model(tmp_path / "absent")


def test_no_texts_is_an_error() -> None:
    with pytest.raises(ValueError, match="needs texts"):
        build_scratch(CONFIG, [], seed=0)
