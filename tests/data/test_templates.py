"""The shipped chat templates against each family's own rendering, which row contents a rendering
must show, and which token ends a turn.

`renderings/` has fifteen chats and, for each family, what its own template renders of them, with
⟦ ⟧ around what is learned; null where the family can't take the chat. Where the family's template
leaves a last answer without an end (GLM-4) or places the system text by the prompt (Mistral), it is
the rendering of the prompt with the answer and its end. DeepSeek-R1's drops all reasoning and tool
calls; here the last answers have them, as the model writes them after its prompt.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.data.templates import tokenizer_of
from tests.support.messages import raises
from trainer.data.text.chats import shipped
from trainer.data.text.chats.chat import Template
from trainer.data.text.chats.turns import Chat
from trainer.errors import ConfigError, DataError

FOLDER = Path(__file__).parent / "renderings"
CHATS = json.loads((FOLDER / "chats.json").read_text())
CHATML, DEEPSEEK, BOS = "<|im_end|>", "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"
ENDS = {
    "chatml": CHATML,
    "deepseek": DEEPSEEK,
    "deepseek-r1": DEEPSEEK,
    "gemma3": "<end_of_turn>",
    "glm4": "<|endoftext|>",
    "gpt-oss": "<|return|>",
    "llama3": "<|eot_id|>",
    "mistral": "</s>",
    "phi4": CHATML,
    "qwen3": CHATML,
    "qwen3.5": CHATML,
}
BEGINS = {
    "deepseek": BOS,
    "deepseek-r1": BOS,
    "gemma3": "<bos>",
    "llama3": "<|begin_of_text|>",
    "mistral": "<s>",
}


def chat_of(name: str) -> Chat:
    return Chat(CHATS[name]["messages"], CHATS[name].get("tools"), place="rows:1")


def marked(
    tokenizer: Any,
    template: str | None,
    chat: Chat,
    loss_on: str = "assistant",
    generation_prompt: Any = "score",
) -> str:
    """The text of a chat's tokens, with ⟦ ⟧ around the label tokens."""
    result = next(Template(tokenizer, template, "", loss_on, generation_prompt).encode([chat]))
    runs: list[tuple[bool, list[int]]] = []
    for token, counts in zip(result.tokens, result.counted, strict=True):
        if not runs or runs[-1][0] != bool(counts):
            runs.append((bool(counts), []))
        runs[-1][1].append(token)
    texts = ((counts, tokenizer.decode(run)) for counts, run in runs)
    return "".join(f"⟦{text}⟧" if counts else text for counts, text in texts)


def renderings() -> Iterator[Any]:
    for name in shipped.NAMES:
        for chat, expected in json.loads((FOLDER / f"{name}.json").read_text()).items():
            yield pytest.param(name, chat, expected, id=f"{name}: {chat}")


@pytest.mark.parametrize(("name", "chat", "expected"), renderings())
def test_a_shipped_template_renders_as_the_family_does(name: str, chat: str, expected: Any) -> None:
    tokenizer = tokenizer_of(ENDS[name], BEGINS.get(name, "<bos>"))
    template = Template.of(tokenizer, name)
    if expected is None:
        with pytest.raises(DataError, match="rows:1: "):
            list(template.encode([chat_of(chat)]))
        return
    text = expected if isinstance(expected, str) else expected["text"]
    today = datetime.date.today().isoformat()  # GPT-OSS tells the model the date
    result = marked(tokenizer, template.text, chat_of(chat))
    assert result.replace(today, "2026-01-02") == text
    unseen = {} if isinstance(expected, str) else expected["unrendered"]
    assert next(template.encode([chat_of(chat)])).unrendered == unseen


def test_each_family_has_fifteen_chats() -> None:
    assert len(CHATS) == 15
    assert {path.stem for path in FOLDER.glob("*.json")} == {"chats", *shipped.NAMES}
    assert {path.stem for path in shipped.FOLDER.glob("*.jinja")} == set(shipped.NAMES)
    for name in shipped.NAMES:
        known = json.loads((FOLDER / f"{name}.json").read_text())
        assert list(known) == list(CHATS)
        assert sum(one is not None for one in known.values()) >= 12


@pytest.mark.parametrize("name", shipped.NAMES)
def test_a_shipped_templates_prompt_is_where_its_answer_begins(name: str) -> None:
    """The model is asked as it was trained, but for the reasoning that its prompt may open."""
    tokenizer = tokenizer_of(ENDS[name], BEGINS.get(name, "<bos>"))
    template = Template.of(tokenizer, name)
    chat = chat_of("system and three turns")
    requested, _ = template._rendered(chat, len(chat.messages) - 1, prompts=True)
    answered = marked(tokenizer, template.text, chat, "last_assistant")
    assert requested.removesuffix("<think>\n") == answered.partition("⟦")[0]


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "glm4"])
def test_what_a_prompt_has_written_is_not_learned(name: str) -> None:
    """An empty thought is left out whole; of a thought, what the prompt begins it with."""
    tokenizer = tokenizer_of(ENDS[name], BEGINS.get(name, "<bos>"))
    template = Template.of(tokenizer, name)

    def learned(chat: str, generation_prompt: str) -> str:
        shown = marked(tokenizer, template.text, chat_of(chat), "last_assistant", generation_prompt)
        return shown.partition("⟦")[2].partition("⟧")[0]

    for chat in ("one turn", "system and three turns"):
        answer = chat_of(chat).messages[-1]["content"].strip()
        assert "</think>" in learned(chat, "score")
        assert "think>" not in learned(chat, "mask")
        assert learned(chat, "mask").strip().startswith(answer)
    assert "</think>" in learned("reasoning", "mask")
    assert ("<think>" in learned("reasoning", "mask")) == (name != "qwen3.5")
    assert template.key != Template.of(tokenizer, name, generation_prompt="score").key


def test_an_unknown_name_is_told_the_names() -> None:
    tokenizer = tokenizer_of("<eos>")
    for name, near in (("qwen-3", '"qwen3"'), ("lama3", '"llama3"'), ("zephyr", "Shipped are")):
        with pytest.raises(ConfigError, match="no such file") as caught:
            Template.of(tokenizer, name)
        assert near in str(caught.value) and "gpt-oss" in str(caught.value)


THINKING = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% else %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}"
    "<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REFUSED = {
    "deepseek-r1": (THINKING, DEEPSEEK, "one turn", "assistant"),
    "qwen3": (QWEN, CHATML, "two turns", "assistant"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_that_rewrites_is_told_the_shipped_one_to_take(name: str) -> None:
    text, end, chat, loss_on = REFUSED[name]
    tokenizer = tokenizer_of(end, BOS)
    with pytest.raises(DataError, match=f'chat_template to "{name}"') as caught:
        marked(tokenizer, text, chat_of(chat), loss_on)
    assert ("last_assistant" in str(caught.value)) is (name == "qwen3")
    assert marked(tokenizer, shipped.read(name), chat_of(chat))
    with pytest.raises(DataError) as again:  # what is set already is no advice
        marked(tokenizer, THINKING, chat_of("one turn"), "last_assistant")
    assert "last_assistant" not in str(again.value)


RECOGNISED = {
    "chatml": ("<|im_start|>", []),
    "qwen3": ("<|im_start|> <think>", []),
    "qwen3.5": ("<|im_start|> <think> <function=", []),
    "llama3": ("<|start_header_id|>", []),
    "gemma3": ("<start_of_turn>", []),
    "gpt-oss": ("<|start|>user<|channel|>", []),
    "mistral": ("[INST] ", []),
    "glm4": ("[gMASK]<|user|><|assistant|><|observation|>", []),
    "deepseek": ("<｜User｜>", []),
    "deepseek-r1": ("<｜User｜><｜Assistant｜><think>", []),
    "phi4": ("{{ messages }}", ["<|im_start|>", "<|im_sep|>", "<eos>"]),
    None: ("{{ messages }}", ["<eos>"]),
}


@pytest.mark.parametrize("name", RECOGNISED)
def test_a_family_is_recognised_by_its_template_or_tokens(name: str | None) -> None:
    assert shipped.recognised(*RECOGNISED[name]) == name


# The token that ends a turn

INSIDE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
)
GLM = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}</tool_call>{% endfor %}"
    "{% elif m.role == 'tool' %}<|observation|>\n{{ m.content }}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
COHERE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{% generation %}"
    "{{ m.content }}<|END_RESPONSE|>{% endgeneration %}<|END_OF_TURN_TOKEN|>"
    "{% else %}<|user|>{{ m.content }}<|END_OF_TURN_TOKEN|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
UNMARKED = COHERE.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def answers(tokenizer: Any, text: str, chat: str) -> list[str]:
    return [
        part.partition("⟧")[0] for part in marked(tokenizer, text, chat_of(chat)).split("⟦")[1:]
    ]


def test_a_mark_with_the_line_break_after_the_end_gets_no_second_end() -> None:
    tokenizer = tokenizer_of(CHATML)
    assert answers(tokenizer, INSIDE, "two turns") == ["It is 4.<|im_end|>\n", "Yes.<|im_end|>\n"]
    assert answers(tokenizer, INSIDE, "empty answer") == ["<|im_end|>\n"]


def test_a_turn_that_the_next_header_ends_learns_that_header() -> None:
    """Also after a tool call, whose own last token is no end of a turn."""
    tokenizer = tokenizer_of("<|endoftext|>")
    assert answers(tokenizer, GLM, "two turns") == ["It is 4.<|user|>", "Yes.<|endoftext|>"]
    call, answer = answers(tokenizer, GLM, "a tool")
    assert call.endswith("}</tool_call><|observation|>") and answer == "It is 4.<|endoftext|>"
    [last] = answers(tokenizer, GLM, "a tool call last")
    assert last.endswith("</tool_call><|endoftext|>")


@pytest.mark.parametrize("template", [COHERE, UNMARKED])
@pytest.mark.parametrize("eos", ["<|END_OF_TURN_TOKEN|>", "<eos>"])
def test_a_special_token_before_the_end_of_a_turn_does_not_hide_it(template: str, eos: str) -> None:
    end = "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"
    result = answers(tokenizer_of(eos), template, "two turns")
    assert result == [f"It is 4.{end}", f"Yes.{end}"]


# What a chat holds, and no rendered character shows

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + PLAIN
CALLS = PLAIN.replace("<|im_end|>", "{{ m.tool_calls[0].function.name if m.tool_calls }}<|im_end|>")
NAMED = PLAIN.replace("{{ m.content }}", "{{ m.name }}{{ m.content }}")


@pytest.mark.parametrize("template", [PLAIN, TOOLS])
def test_a_tool_call_that_is_not_rendered_is_an_error(template: str) -> None:
    tokenizer = tokenizer_of(CHATML)
    for name in ("a tool", "a tool call last", "two calls and a later question"):
        with raises(DataError, "rows:1: turn", "tool call 0"):
            marked(tokenizer, template, chat_of(name))


def test_a_second_tool_call_or_arguments_that_are_not_rendered_are_an_error() -> None:
    tokenizer = tokenizer_of(CHATML)
    with pytest.raises(DataError, match="tool call 0"):  # the name alone is rendered
        marked(tokenizer, CALLS, chat_of("a tool"))
    named = CALLS.replace("function.name", "function")
    assert "zwei ü" in marked(tokenizer, named, chat_of("a tool"))
    with pytest.raises(DataError, match="tool call 1"):
        marked(tokenizer, named, chat_of("two calls and a later question"))


EARLIER_REASONING = "reasoning before the last question"
"""What a count of reasoning is called that the template is right to leave out."""


def unseen(template: str, messages: list[dict[str, Any]], tools: Any = None) -> Any:
    chat = Chat(messages, tools, place="rows:1")
    return next(Template(tokenizer_of(CHATML), template, "").encode([chat])).unrendered


def test_reasoning_and_other_keys_that_are_not_rendered_are_counted() -> None:
    first = {"role": "user", "content": "Hi", "id": 7, "name": "Ann"}
    answer = {"role": "assistant", "content": "Hello", "reasoning_content": "Hm."}
    assert unseen(PLAIN, [first, answer]) == {"id": 1, "name": 1, "reasoning_content": 1}
    assert unseen(NAMED, [first, answer]) == {"id": 1, "reasoning_content": 1}
    assert unseen(PLAIN, [first, answer, first, answer]) == {
        "id": 2,
        "name": 2,
        "reasoning_content": 1,
        EARLIER_REASONING: 1,
    }
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert unseen(PLAIN, [first, answer], tools)["tools"] == 1
    assert "tools" not in unseen(TOOLS, [first, answer], tools)
    assert unseen(PLAIN, [{**first, "id": None, "name": ""}, {**answer, "counts": True}]) == {
        "reasoning_content": 1
    }


def test_a_turn_that_is_left_out_is_found_where_its_words_are_elsewhere_too() -> None:
    """A search for its words alone would find those of another turn."""
    known = "{% for m in messages if m.role != 'tool' %}<|im_start|>{{ m.content }}<|im_end|>"
    known += "{% endfor %}"
    turns = [("user", "4?"), ("tool", "4"), ("assistant", "It is 4.")]
    chat = Chat([{"role": role, "content": content} for role, content in turns], place="rows:1")
    with raises(DataError, "turn 1", '"tool"', "not in"):
        marked(tokenizer_of(CHATML), known, chat)


def test_reasoning_of_the_last_answer_that_is_dropped_is_an_error() -> None:
    dropping = PLAIN.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
    tokenizer = tokenizer_of(CHATML)
    with pytest.raises(DataError, match="turn 3: its reasoning"):
        marked(tokenizer, dropping, chat_of("reasoning in the content"))
    past = Chat(CHATS["reasoning in the content"]["messages"][:-1])
    encoded = next(Template(tokenizer, dropping, "").encode([past]))
    assert encoded.unrendered == {EARLIER_REASONING: 1}
