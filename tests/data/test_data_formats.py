"""Where documents come from, and what is said of each kind of broken input."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.messages import raises, shows
from trainer.config.sections.model_and_data import DataSection
from trainer.data.sources.location import Location, locate
from trainer.data.text.chats.chat import Template
from trainer.data.text.chats.turns import Chat
from trainer.data.text.cutting import Cut
from trainer.data.text.encode import Chunk, Tokenising
from trainer.data.text.records import Text, read_documents
from trainer.data.text.token_files import Encoded
from trainer.errors import DataError, Problem

COLUMNS = {
    "text_column": "text",
    "prompt_column": None,
    "completion_column": None,
    "name": None,
    "split": "train",
}
COLUMNS |= {"records": "auto", "chat_column": "messages", "corrupt": "error", "max_rows": None}
TEXTS = ["one", "zwei ü", 'a, "quoted"\nline']


def read(path: Any, format: str = "auto", **columns: Any) -> list[Any]:
    """The documents, without the rows that they are from."""
    result = read_documents(locate(path, format), SimpleNamespace(**{**COLUMNS, **columns}))
    return [document and document._replace(place="") for document in result]


def message(path: Any, format: str = "auto", **columns: Any) -> str:
    with pytest.raises(DataError) as caught:
        read(path, format, **columns)
    text = str(caught.value)
    assert "\n" not in text
    return text


def write(folder: Path, name: str, texts: list[str]) -> Path:
    """`texts` as the column `text` of a file of the format that the name tells."""
    path, rows = folder / name, [{"text": text} for text in texts]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    table = "text\n" + "".join('"' + text.replace('"', '""') + '"\n' for text in texts)
    match name.split(".", 1)[1]:
        case "parquet":
            pq.write_table(pa.table({"text": texts, "other": [1] * len(texts)}), path)
        case "jsonl":
            path.write_text(lines, encoding="utf-8")
        case "jsonl.gz":
            path.write_bytes(gzip.compress(lines.encode()))
        case "json":
            path.write_text(json.dumps(rows, indent=1))
        case "csv":
            path.write_text(table, encoding="utf-8-sig")
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.csv", "a.parquet"])
def test_each_format_gives_its_texts(tmp_path: Path, name: str) -> None:
    assert read(str(write(tmp_path, name, TEXTS))) == [Text(text) for text in TEXTS]


def test_a_long_csv_field_is_read(tmp_path: Path) -> None:
    text = "x" * 200_000
    assert read(str(write(tmp_path, "a.csv", [text]))) == [Text(text)]


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes("ü\r\nsecond".encode())
    (tmp_path / "a.txt").write_text("first\n")
    assert read(str(tmp_path)) == [Text("first\n"), Text("ü\r\nsecond")]


def test_folders_globs_and_lists(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.jsonl", "a.jsonl", "deep/c.jsonl", "_meta.jsonl", ".hidden.jsonl"):
        write(tmp_path, name, [name]) if not name.startswith(".") else (tmp_path / name).write_text(
            "{}"
        )
    (tmp_path / "README.md").write_text("not data")
    names = lambda found: [Path(file).name for file in found.files]  # noqa: E731
    assert names(locate(str(tmp_path))) == ["a.jsonl", "b.jsonl", "c.jsonl"]
    assert names(locate(f"{tmp_path}/**/[bc].jsonl")) == ["b.jsonl", "c.jsonl"]
    both = [f"{tmp_path}/b.jsonl", f"{tmp_path}/?.jsonl"]
    assert names(locate(both)) == ["b.jsonl", "a.jsonl"]
    assert "README.md" in names(locate(str(tmp_path), "text"))
    assert locate(None) == Location()


def test_prompts_and_completions(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"q": "2+2=", "a": "4"}\n\n{"q": null, "a": "5"}\n{"q": "3", "a": " "}\n')
    documents = read(str(path), prompt_column="q", completion_column="a")
    assert documents == [Text("4", "2+2="), Text("5", ""), None]


def test_alpacas_own_prompt_is_axolotls(tmp_path: Path) -> None:
    rows = [
        {"instruction": "Add.", "input": "1, 2", "output": "3"},
        {"instruction": "Hi", "output": "Ho"},
    ]
    rows += [
        {"instruction": "Hi", "input": "", "output": " "},
        {"instruction": "Hi", "input": "", "output": "!"},
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    first, second, third, fourth = read(str(path), records="alpaca")
    assert (first.text, third, fourth.text) == ("3", None, "!") and fourth.prompt == second.prompt
    shows(first.prompt, "### Input:", "1, 2", "### Instruction:", "Add.")
    shows(second.prompt, "### Instruction:", "Hi", "### Response:")
    assert "### Input:" not in second.prompt


def test_only_the_first_rows_are_read_where_that_is_asked_for(tmp_path: Path) -> None:
    paths = [write(tmp_path, f"{name}.jsonl", [f"{name}1", f"{name}2"]) for name in "ab"]
    assert [result.text for result in read(list(map(str, paths)), max_rows=3)] == ["a1", "a2", "b1"]


def test_rows_without_text_are_marked(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": ""}\n{"text": null}\n{"text": " \\n"}\n{"text": "x"}\n')
    assert read(str(path)) == [None, None, None, Text("x")]


def test_strings_that_look_like_dates_stay_text(tmp_path: Path) -> None:
    assert read(str(write(tmp_path, "a.jsonl", ["2024-01-01T00:00:00"]))) == [
        Text("2024-01-01T00:00:00")
    ]


def test_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(path: str, name: str | None, split: str) -> datasets.Dataset:
        assert (path, name, split) == ("owner/set", "subset", "train[:1%]")
        return datasets.Dataset.from_dict({"body": ["x", ""], "n": [1, 2]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    requests = {"name": "subset", "split": "train[:1%]"}
    assert read("owner/set", text_column="body", **requests) == [Text("x"), None]
    shows(message("owner/set", **requests), "owner/set: row 0", 'column "text"')


def test_a_hub_id_that_the_hub_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: Any, **options: Any) -> None:
        raise ConnectionError("Couldn't reach\nthe hub")

    monkeypatch.setattr(datasets, "load_dataset", load)
    shows(message("owner/set"), "owner/set", "Couldn't reach", "trainer.data")


WANTED = "glob or a hub id"


def test_paths_that_match_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing, glob = tmp_path / "missing", str(tmp_path / "*.jsonl")
    shows(message(str(missing)), f"{missing}", "such file", WANTED)
    shows(message("missing.jsonl"), "missing.jsonl", "such file", WANTED)
    shows(message(glob), f"{glob}: matches", WANTED)
    shows(message([]), "trainer.data", "glob")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    shows(message("texts/missing"), "texts/missing: no such file", "format=hub")
    shows(message(str(tmp_path)), f"{tmp_path}", "arrow", "trainer.data")


def test_endings(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.csv"):
        write(tmp_path, name, ["x"])
    shows(
        message(str(tmp_path)), f"{tmp_path}: {tmp_path}/b.csv", f"{tmp_path}/a.jsonl", "glob such"
    )
    (tmp_path / "a.docx").write_text("x")
    shows(message(f"{tmp_path}/a.docx"), f"{tmp_path}/a.docx", "arrow", "trainer.data.format")
    assert read(f"{tmp_path}/a.docx", "text") == [Text("x")]


BROKEN: dict[str, tuple[str, bytes, tuple[str, ...]]] = {
    "not JSON": (
        "a.jsonl",
        b'{"text": "ok"}\n\n{"text": broken, and then a long rest of the line that is not '
        b"shown in full\n",
        (':3: not JSON: {"text"', "that is no; expected", "on each line"),
    ),
    "cut JSON": ("a.jsonl", b'{"text": "ok"}\n{"te', (':2: not JSON: {"te', "on each line")),
    "cut array": (
        "a.jsonl",
        b'[{"text": "ok"},\n{"text": "o',
        (':2: not JSON: {"text": "o', "on each line"),
    ),
    "not an object": (
        "a.jsonl",
        b'{"text": "ok"}\n[1]\n',
        (":2: not a JSON object: [1]", "with named columns"),
    ),
    "array of texts": (
        "a.jsonl",
        b'["a"]',
        (': item 0: not a JSON object: "a"', "with named columns"),
    ),
    "missing column": (
        "a.jsonl",
        b'{"texts": "x", "id": 1}\n',
        (':1: no column "text"', 'expected one of "texts", "id"', '"texts"?'),
    ),
    "later missing column": (
        "a.jsonl",
        b'{"text": "x"}\n{"id": 1}\n',
        (':2: no column "text"', 'expected one of "id"', "trainer.data.text_column"),
    ),
    "not text": (
        "a.jsonl",
        b'{"text": ["a", "b"]}\n',
        (":1: column \"text\" holds list ['a', 'b']", "expected text"),
    ),
    "surrogate": (
        "a.jsonl",
        b'{"text": "ab\\ud83d"}\n',
        (':1: column "text"', "at character 2", "expected valid Unicode"),
    ),
    "latin-1": (
        "a.jsonl",
        b'{"text": "ok"}\n{"text": "caf\xe9"}\n',
        (": byte 28: ", "is not UTF-8", "expected text in UTF-8", "iconv"),
    ),
    "CSV, missing column": (
        "a.csv",
        b"body\nx\n",
        (':2: no column "text"', 'expected one of "body"', "trainer.data.text_column"),
    ),
    "CSV, more fields": (
        "a.csv",
        b"text,id\nx,1\ny,2,3\n",
        (":3: a row", "or fewer fields", "expected 2"),
    ),
    "CSV, fewer fields": ("a.csv", b"text,id\nx\n", (":2: a row", "or fewer fields", "expected 2")),
    "CSV, open quote": (
        "a.csv",
        b'text\n"x\n',
        (":2: not CSV", "end of data", "expected comma-separated fields"),
    ),
    "not parquet": ("a.parquet", b"not parquet at all", ("", "parquet file")),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_files(tmp_path: Path, kind: str) -> None:
    name, content, keys = BROKEN[kind]
    path = tmp_path / name
    path.write_bytes(content)
    assert message(str(path)).startswith(f"{path}{keys[0]}")
    shows(message(str(path)), *keys)


def test_wrong_columns_of_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": ["x"], "n": [3]}), path)
    shows(message(str(path)), f"{path}: row 0", 'column "text"', "trainer.data.text_column")
    shows(message(str(path), text_column="n"), f"{path}: row 0", '"n" holds int 3')


def test_broken_gzip(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl.gz", ["x" * 100, "y" * 100])
    path.write_bytes(path.read_bytes()[:-9])
    shows(message(str(path)), f"{path}", "end-of-stream marker")


GOOD = [{"text": f"the text number {number}"} for number in range(6)]
BAD = {
    "not JSON": (b'{"text": "half\n', "not JSON"),
    "no object": (b"[1, 2]\n", "not a JSON object"),
    "no such column": (b'{"txt": "x"}\n', 'no column "text"'),
    "another type": (b'{"text": 7}\n', "holds int 7"),
    "not UTF-8": ('{"text": "naïve"}\n'.encode("latin-1"), "not UTF-8"),
    "half a pair": (b'{"text": "\\ud800"}\n', "half of a surrogate pair"),
    "another kind": (b'{"messages": [{"role": "user", "content": "x"}]}\n', "where"),
}


@pytest.mark.first("not JSON", "no such column", "half a pair")
@pytest.mark.parametrize("kind", BAD)
def test_a_corrupt_row_is_an_error_or_skipped_and_counted(tmp_path: Path, kind: str) -> None:
    from trainer.config import DataSection
    from trainer.data.text.preparation import open_data
    from trainer.data.text.tokenizer import embedded_tokenizer
    from trainer.distributed.ranks import Ranks

    line, message = BAD[kind]
    rows = [json.dumps(row).encode() + b"\n" for row in GOOD]
    (tmp_path / "good.jsonl").write_bytes(b"".join(rows))
    (tmp_path / "bad.jsonl").write_bytes(b"".join([*rows[:2], line, *rows[2:], line]))
    (tmp_path / "worst.jsonl").write_bytes(line)
    tokenizer = embedded_tokenizer(tmp_path / "cache")

    def opened(name: str, **more: Any) -> Any:
        known = {
            "path": str(tmp_path / name),
            "evaluation_fraction": 0.0,
            "documents": "pad",
            "sequence_length": 32,
        }
        return open_data(DataSection(**known, **more), tokenizer, tmp_path / "cache", Ranks())

    with pytest.raises(DataError, match=message):
        opened("bad.jsonl")
    with pytest.raises(DataError):  # nothing else is there
        opened("worst.jsonl", corrupt="skip")
    good, result = opened("good.jsonl"), opened("bad.jsonl", corrupt="skip")
    assert result.fingerprint == good.fingerprint
    assert result.summary.counts.corrupt == 2 and message in result.describe()
    shows(result.describe(), "6 documents (2 corrupt")


def test_a_row_of_csv_with_other_fields_and_a_chat_that_no_template_takes_are_skipped(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.csv").write_text("text,more\none,1\ntwo\nthree,3\n")
    with pytest.raises(DataError, match="more or fewer fields"):
        read(str(tmp_path / "a.csv"))
    first, bad, last = read_documents(
        locate(str(tmp_path / "a.csv")), SimpleNamespace(**COLUMNS | {"corrupt": "skip"})
    )
    assert isinstance(bad, DataError) and (first, last) == (
        Text("one", None, f"{tmp_path}/a.csv:2"),
        Text("three", None, f"{tmp_path}/a.csv:4"),
    )

    class Refuses(Template):
        def encode(self, chats: Any) -> Any:
            for chat in chats:
                if chat.place == "bad":
                    raise DataError(Problem("bad", "a role that it does not know", "another"))
                yield Encoded([1, 2], [False, True], chat.place)

    template, chats = (
        Refuses(None, None, ""),
        [Chat([], None, 0, place) for place in ("a", "bad", "b")],
    )
    done = Tokenising(template, Cut(8, "pad"), 0.0, skips=True)(Chunk(0, list(chats)))
    assert done.error is None and (done.train.counts.documents, done.train.counts.corrupt) == (2, 1)
    shows(done.train.counts.first_corrupt, "know")
    stopped = Tokenising(template, Cut(8, "pad"), 0.0)(Chunk(0, list(chats)))
    assert stopped.error is not None and stopped.train.counts.documents == 1


@pytest.mark.parametrize("name", ["state.json", "dataset_dict.json"])
@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "7",
        "{}",
        '{"_data_files": 7, "splits": 7}',
        "9" * 5000,
        # fmt: skip
        '{"_data_files": [7], "splits": [7]}',
        ('{"_data_files": [{"filename": "../x"}], "splits": ["../x"]}'),
    ],
)
def test_a_saved_data_set_that_is_damaged_is_a_data_error(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    (tmp_path / "data-0.arrow").touch()
    with pytest.raises(DataError, match="what Dataset.save_to_disk writes"):
        locate(str(tmp_path))


@pytest.mark.parametrize(
    "row", ['{"text": "a", "id": NUMBER}', '{"prompt": "a", "completion": "b", "x": [NUMBER]}']
)
def test_a_number_of_5000_digits_is_a_data_error(tmp_path, row):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a"}\n' + row.replace("NUMBER", "9" * 5000) + "\n")
    with raises(DataError, "data.jsonl:2", "more", "4,300 digits"):
        list(read_documents(locate(str(path)), DataSection(path=str(path))))


@pytest.mark.parametrize("tools", ["[" + "9" * 5000 + "]", "[" * 10**5])
def test_text_that_only_looks_like_json_is_a_data_error(tmp_path, tools):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}], "tools": tools}))
    with raises(DataError, "JSON schemas"):
        list(read_documents(locate(str(path)), DataSection(path=str(path))))
