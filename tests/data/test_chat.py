"""Chats: found from the rows, rendered by templates of the field's shapes, and only answers
learnt.
"""

from __future__ import annotations

import copy
import json
import resource
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.messages import raises, shows
from trainer.config import DataSection
from trainer.data.sources.location import locate
from trainer.data.text.chats.chat import PLAIN, Template
from trainer.data.text.chats.turns import Chat
from trainer.data.text.preparation import open_data
from trainer.data.text.records import RowsRead, read_documents
from trainer.distributed.ranks import Ranks
from trainer.errors import ConfigError, DataError
from trainer.tasks.task import IGNORED

SPECIAL = [
    "<eos>",
    "<bos>",
    "<|im_start|>",
    "<|im_end|>",
    "<|header|>",
    "<|/header|>",
    "<|eot|>",
    "<turn>",
    "</turn>",
]
SPECIAL += ["[INST]", "[/INST]", "<|user|>", "<|assistant|>", "<|end|>"]

# Templates of the same shape as those of the families: what stands between turns, ends them and
# prompts an answer.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|header|>{{ m.role }}<|/header|>\n\n{{ m.content | "
    "trim }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|header|>assistant<|/header|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not "
    "supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}</turn>\n{% "
    "endfor %}"
    "{% if add_generation_prompt %}<turn>model\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
# one of a reasoning model: an answer is begun with an empty thought, which later turns take away
REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content "
    "}}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = CHATML.replace(
    "{{ m.role }}\n{{ m.content }}<|im_end|>\n",
    "{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% "
    "endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n",
)
ENDS = {
    "chatml": "<|im_end|>",
    "llama3": "<|eot|>",
    "gemma": "</turn>",
    "mistral": "<eos>",
    "phi": "<|end|>",
}
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "mistral": MISTRAL, "phi": PHI}

TURNS = [
    ("user", "What is 2+2?"),
    ("assistant", "It is 4."),
    ("user", "Sure? "),
    ("assistant", "Yes: ünd so."),
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One token a byte, and the templates' own tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", bos_token="<bos>")


def messages(turns: list[tuple[str, str]] = TURNS) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


def learned(tokenizer: Any, template: str, chat: Chat, loss_on: str = "assistant") -> list[str]:
    """The runs of targets, as text."""
    result = next(Template(tokenizer, template, "", loss_on).encode([chat]))
    runs, run = [], list[int]()
    for token, counts in [*zip(result.tokens, result.counted, strict=True), (0, False)]:
        if counts:
            run.append(token)
        elif run:
            runs.append(tokenizer.decode(run))
            run = []
    return runs


@pytest.mark.parametrize("family", TEMPLATES)
def test_answers_and_the_ends_of_their_turns_are_learned(tokenizer: Any, family: str) -> None:
    space, end = " " if family == "mistral" else "", ENDS[family]
    expected = [f"{space}It is 4.{end}", f"{space}Yes: ünd so.{end}"]
    assert learned(tokenizer, TEMPLATES[family], Chat(messages())) == expected
    assert (
        learned(tokenizer, TEMPLATES[family], Chat(messages()), loss_on="last_assistant")
        == expected[1:]
    )
    tokens = next(Template(tokenizer, TEMPLATES[family], "").encode([Chat(messages())])).tokens
    whole = tokenizer.apply_chat_template(
        messages(), chat_template=TEMPLATES[family], tokenize=True
    )
    assert tokens == (whole["input_ids"] if not isinstance(whole, list) else whole)


@pytest.mark.parametrize("family", TEMPLATES)
def test_every_token_of_a_chat_is_learned_where_that_is_asked_for(
    tokenizer: Any, family: str
) -> None:
    """As TRL does where nothing is said; of a prompt with a completion only the completion, as it
    does.
    """
    encoded = next(Template(tokenizer, TEMPLATES[family], "", "all").encode([Chat(messages())]))
    assert (
        all(encoded.counted)
        and encoded.tokens
        == next(Template(tokenizer, TEMPLATES[family], "").encode([Chat(messages())])).tokens
    )
    prompted = Chat(messages(), None, len(messages()) - 1)
    last = learned(tokenizer, TEMPLATES[family], prompted)
    assert learned(tokenizer, TEMPLATES[family], prompted, "all") == last and len(last) == 1


@pytest.mark.parametrize("end_is_eos", [False, True])
@pytest.mark.parametrize("family", TEMPLATES)
def test_an_empty_answer_learns_its_end_alone(
    tokenizer: Any, family: str, end_is_eos: bool
) -> None:
    """Also where the token that ends a turn is the tokenizer's end-of-text, as Llama-3's <|eot_id|>
    is.
    """
    own = copy.deepcopy(tokenizer)
    if end_is_eos:
        own.eos_token = ENDS[family]
    turns = [TURNS[0], ("assistant", ""), *TURNS[2:]]
    space = " " if family == "mistral" else ""
    assert learned(own, TEMPLATES[family], Chat(messages(turns))) == [
        f"{space}{ENDS[family]}",
        f"{space}Yes: ünd so.{ENDS[family]}",
    ]
    last = learned(own, TEMPLATES[family], Chat(messages([*TURNS[:3], ("assistant", "")])))
    assert last == [f"{space}It is 4.{ENDS[family]}", f"{space}{ENDS[family]}"]


def test_a_marked_template_gives_the_mask_that_transformers_gives(tokenizer: Any) -> None:
    theirs = tokenizer.apply_chat_template(
        messages(), chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
    )
    result = next(Template(tokenizer, MARKED, "").encode([Chat(messages())]))
    assert (list(result.tokens), result.counted.tolist()) == (  # type: ignore[union-attr]
        theirs["input_ids"],
        [bool(x) for x in theirs["assistant_masks"]],
    )
    assert learned(tokenizer, MARKED, Chat(messages())) == learned(
        tokenizer, CHATML, Chat(messages())
    )


def test_a_mark_that_leaves_the_end_of_the_turn_out_gets_it(tokenizer: Any) -> None:
    short = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    assert learned(tokenizer, short, Chat(messages())) == learned(
        tokenizer, MARKED, Chat(messages())
    )


def test_a_template_that_rewrites_its_past_is_refused_with_the_turn(tokenizer: Any) -> None:
    with raises(DataError, "rows:7", "template rewrites", "1 once"):
        learned(tokenizer, REASONING, Chat(messages(), place="rows:7"))
    assert learned(tokenizer, REASONING, Chat(messages()), loss_on="last_assistant") == [
        "<think>\n\n</think>\n\nYes: ünd so.<|im_end|>"
    ]
    empty = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    requested = REASONING.replace("assistant\n{% endif %}", "assistant\n" + empty + "{% endif %}")
    assert learned(tokenizer, requested, Chat(messages()), loss_on="last_assistant") == [
        "Yes: ünd so.<|im_end|>"
    ]
    thinks = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
    with raises(DataError, "1 once", "answered"):
        learned(tokenizer, thinks, Chat(messages()))


def test_a_turn_that_the_template_leaves_out_is_an_error(tokenizer: Any) -> None:
    tool = Chat(
        [*messages(TURNS[:1]), {"role": "tool", "content": "four"}, *messages(TURNS[1:2])],
        place="a:1",
    )
    with raises(DataError, "a:1", "1 of", "template renders"):
        learned(tokenizer, MISTRAL, tool)
    with raises(DataError, "Conversation roles", "assis"):
        learned(tokenizer, GEMMA, tool)


def test_a_chat_whose_template_ends_no_turn_gets_an_end(tokenizer: Any) -> None:
    bare = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    bare += "{% if add_generation_prompt %}assistant: {% endif %}"
    assert learned(tokenizer, bare, Chat(messages()))[-1] == "Yes: ünd so.\n<eos>"
    assert learned(tokenizer, PLAIN, Chat(messages())) == ["It is 4.<eos>", "Yes: ünd so.<eos>"]


def test_the_data_may_say_what_counts(tokenizer: Any) -> None:
    text = [dict(message) for message in messages()]
    text[1]["counts"] = False
    assert learned(tokenizer, CHATML, Chat(text)) == ["Yes: ünd so.<|im_end|>"]
    assert learned(tokenizer, CHATML, Chat(messages(), None, 2)) == ["Yes: ünd so.<|im_end|>"]
    assert learned(tokenizer, CHATML, Chat(messages(TURNS[:1]))) == []


# Rows

OPTIONS = {
    "text_column": "text",
    "prompt_column": None,
    "completion_column": None,
    "name": None,
    "split": "train",
}
OPTIONS |= {"records": "auto", "chat_column": "messages", "corrupt": "error", "max_rows": None}
SHARED = [
    {"from": "system", "value": "Be brief."},
    {"from": "human", "value": "2+2?"},
    {"from": "gpt", "value": "4"},
]
OPEN = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
]
ROWS: dict[str, dict[str, Any]] = {
    "messages": {"messages": OPEN, "id": 3},
    "conversations": {"conversations": SHARED},
    "alpaca": {"instruction": "2+2?", "input": "", "output": "4", "system": "Be brief."},
    "prompt of messages": {"prompt": OPEN[:2], "completion": OPEN[2:]},
    "system apart": {"conversations": SHARED[1:], "system": "Be brief."},
    "as text": {"messages": json.dumps(OPEN)},
}


def read(
    path: Path, *rows: dict[str, Any], found: RowsRead | None = None, **options: Any
) -> list[Any]:
    file = path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(read_documents(locate(str(file)), SimpleNamespace(**{**OPTIONS, **options}), found))


@pytest.mark.parametrize("name", ROWS)
def test_each_format_is_found_from_its_rows(tmp_path: Path, name: str) -> None:
    result = RowsRead()
    (chat,) = read(tmp_path, ROWS[name], found=result)
    assert chat.messages == OPEN
    shows(result.describe(), "3 roles", "3 turns", "most")


def test_chats_in_parquet_and_in_what_datasets_saved(tmp_path: Path) -> None:
    import datasets

    rows = {"messages": [OPEN, OPEN[1:]], "other": [1, 2]}
    pq.write_table(pa.table(rows), tmp_path / "a.parquet")
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "saved")
    for path in (tmp_path / "a.parquet", tmp_path / "saved"):
        results = list(read_documents(locate(str(path)), SimpleNamespace(**OPTIONS)))
        assert [chat.messages for chat in results] == [OPEN, OPEN[1:]], path
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows)}).save_to_disk(
        tmp_path / "both"
    )
    with raises(DataError, "parts train"):
        locate(str(tmp_path / "both"))


def test_zstd(tmp_path: Path) -> None:
    with pa.CompressedOutputStream(str(tmp_path / "a.jsonl.zst"), "zstd") as file:
        file.write(b"".join(json.dumps({"text": text}).encode() + b"\n" for text in "xyz"))
    assert [
        text.text for text in read_documents(locate(str(tmp_path)), SimpleNamespace(**OPTIONS))
    ] == list("xyz")


def test_tool_calls_and_parts_are_as_templates_expect_them(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]
    turns = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    (chat,) = read(
        tmp_path,
        {"messages": [*turns, {"role": "tool", "content": "4"}], "tools": json.dumps(tools)},
    )
    assert chat.messages[0]["content"] == "2+2?"
    assert chat.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 2}
    assert chat.tools == tools


WRONG = {
    "empty": (
        {"messages": []},
        ("rows.jsonl:1: messages: an empty chat", "one message"),
    ),
    "no text": (
        {"messages": [{"role": "user", "content": 7}]},
        ("messages[0]: int 7", "expected text"),
    ),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        ("messages[0]: a part of type image_url", "expected text"),
    ),
    "two answers": ({"messages": [*OPEN, OPEN[2]]}, ("the turns 2 and 3", "both the assistant's")),
    "no role": ({"messages": [{"content": "x"}]}, ("keys content", 'expected "role"')),
    "a string": ({"messages": "hello"}, ("'hello'", "expected a list of messages")),
    "weight": (
        {"messages": [{"role": "user", "content": "x", "weight": 0.5}]},
        ("weight 0.5", "expected 0 or 1"),
    ),
    "doubt": (
        {"messages": OPEN, "text": "x"},
        (
            "text (text) and chats (messages)",
            "expected one of them",
            "trainer.data.records",
        ),
    ),
    "surrogate": (
        {"messages": [{"role": "user", "content": "\ud800"}]},
        ("half of a surrogate pair",),
    ),
    "no list of calls": (
        {"messages": [{"role": "user", "content": "x", "tool_calls": 5}]},
        ("messages[0].tool_calls: 5", "expected a list of calls"),
    ),
    "a list for a weight": (
        {"messages": [{"role": "user", "content": "x", "weight": [1]}]},
        ("weight [1]", "expected 0 or 1"),
    ),
    "a number for a role": ({"messages": [{"role": 3, "content": "x"}]}, ("the role 3; expected",)),
    "a history that is no list": (
        {"instruction": "a", "output": "b", "history": 7},
        ('column "history" holds 7', "pairs of texts"),
    ),
    "nothing known": (
        {"dialog": OPEN},
        ('no column "text"', 'expected one of "dialog"', "trainer.data.text_column"),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rows_are_named(tmp_path: Path, name: str) -> None:
    row, keys = WRONG[name]
    with raises(DataError, *keys):
        read(tmp_path, row)


HALVES = {
    "a system text": {"conversations": SHARED[1:], "system": "\ud83d"},
    "a history": {"instruction": "a", "output": "b", "history": [["a", "\ud83d"]]},
    "a tool": {"messages": OPEN, "tools": [{"name": "\ud83d"}]},
}


@pytest.mark.parametrize("name", HALVES)
def test_half_of_a_surrogate_pair_is_named_wherever_it_is(
    tmp_path: Path, tokenizer: Any, name: str
) -> None:
    tools = "{% for tool in tools or [] %}{{ tool.name }}{% endfor %}"
    text = tools + "{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}"
    template = Template(tokenizer, text, "a template")
    [chat] = read(tmp_path, HALVES[name])
    with raises(DataError, "rows.jsonl:1", "surrogate pair"):
        list(template.encode([chat]))


def test_a_mixture_of_kinds_names_both_rows(tmp_path: Path) -> None:
    rows = [{"messages": OPEN}, {"messages": OPEN}, {"instruction": "a", "output": "b"}]
    expected = (
        r"rows.jsonl:3: instructions \(instruction, output\), where .*rows.jsonl:1 has "
        r"chats \(messages\)"
    )
    with pytest.raises(DataError, match=expected):
        read(tmp_path, *rows)
    assert len(read(tmp_path, {"messages": OPEN, "text": "x"}, records="chat")) == 1


# Prepared


def test_chats_become_samples(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "template.jinja").write_text(CHATML)
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [ROWS["messages"]] * 3)
    )
    template = str(tmp_path / "template.jinja")
    shape: Any = {"path": str(tmp_path / "rows.jsonl"), "sequence_length": 400, "documents": "pad"}
    options = DataSection(**shape, evaluation_fraction=0, chat_template=template)
    data = open_data(options, tokenizer, tmp_path / "cache", Ranks())
    sample = data.train[0]
    assert (
        tokenizer.decode(sample["targets"][sample["targets"] != IGNORED].tolist()) == "4<|im_end|>"
    )
    shows(data.describe(), "chats, 3 roles", "3 turns")
    assert data.summary.origin.chats
    options = options.model_copy(update={"chat_template": str(tmp_path / "none.jinja")})
    with pytest.raises(ConfigError, match="No such file"):
        open_data(options, tokenizer, tmp_path / "cache", Ranks())
    (tmp_path / "none.jinja").write_text("{% for %}")
    with raises(ConfigError, "none.jinja:1", "Jinja template"):
        open_data(options, tokenizer, tmp_path / "cache", Ranks())


def test_a_sample_begins_as_the_data_does(tmp_path: Path, tokenizer: Any) -> None:
    """A chat's up to its first answer, with the header that prompts it; a text's with its first
    tokens.
    """
    from trainer.recipes.causal_lm.continuation import FEW, beginning

    template = tmp_path / "template.jinja"
    template.write_text(CHATML)
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": messages()}) + "\n")
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "def f(x): return x + 1"}) + "\n")
    results = {}
    for name in ("chats", "texts"):
        options = DataSection(
            path=str(tmp_path / f"{name}.jsonl"),
            chat_template=str(template),
            documents="pad",
            sequence_length=128,
            evaluation_fraction=0.0,
        )
        source = open_data(options, tokenizer, tmp_path / "cache", Ranks()).train
        results[name] = tokenizer.decode(beginning(source, 100))
        assert len(beginning(source, 5)) == 5
    function = "def f(x): return x + 1"
    assert results == {
        "chats": "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n",
        "texts": function[:FEW],
    }


def test_no_shipped_config_begins_its_sample_with_code() -> None:
    for path in (Path(__file__).parent.parent.parent / "ds_configs").glob("*.json"):
        assert json.loads(path.read_text())["trainer"]["generate"]["prompt"] == "auto", path


HOSTILE = {
    "joined": "{{ (['a' * 100000] * 100000) | join }}",
    "a product": "{{ messages[0].content * 10**10 }}",
    "a constant product": "{{ 'a' * 10**10 }}",
    "a long constant": "{{ 'a' * 30000000 }}",
    "a power": "{{ 9**(9**9) }}",
    "centred": "{{ messages[0].content | center(10**10) }}",
    "indented": "{{ messages | tojson(indent=10**10) }}",
    "formatted": "{{ '%10000000000d' % 1 }}",
    "formatted by a filter": "{{ '%10000000000d' | format(1) }}",
    "doubled": (
        "{% set n = namespace(s='aaaaaaaa') %}{% for i in range(99) %}{% set n.s = n.s ~ "
        "n.s %}{% endfor %}"
    ),
    "a list doubled": (
        "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = n.s + "
        "n.s %}{% endfor %}"
    ),
    "nested loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}"
    ),
    "loops of nothing": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    ),
    "many words": "{{ lipsum(n=100000) }}",
    "batches": "{% for b in [1] | batch(10**10, 'a') %}{{ b }}{% endfor %}",
    "a macro": "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_takes_no_more_than_it_may(tokenizer: Any, tmp_path: Path, name: str) -> None:
    path = tmp_path / "hostile.jinja"
    path.write_text(HOSTILE[name])
    limits = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGVTALRM)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with patch.multiple("trainer.data.text.chats.chat", MEMORY=1 << 27, SECONDS=0.5):
        template = Template.of(tokenizer, str(path))
        with pytest.raises(DataError) as caught:
            list(template.encode([Chat(messages(), place="a:1")]))
    refused = "the chat template rejects it: maximum recursion depth"
    named = refused if name == "a macro" else f"the template of {path} makes more than "
    assert f"a:1: {named}" in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 19  # KiB
    assert (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGVTALRM)) == limits


def test_a_long_chat_is_no_hostile_one(tokenizer: Any) -> None:
    turns = [("user", "What? " * 100), ("assistant", "That. " * 100)] * 50
    with patch.multiple("trainer.data.text.chats.chat", MEMORY=1 << 25):
        [result] = Template(tokenizer, CHATML, "").encode([Chat(messages(turns), place="a:1")])
    assert len(result.tokens) > 60_000
