"""`meshloom report`: what a run leaves, as one page; looked at as a person would, in a browser
where there is one.
"""

from __future__ import annotations

import base64
import gzip
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.text import Text
from PIL import Image

from tests.support.commands import ROOT
from tests.support.messages import raises, shows
from trainer.command.report import main
from trainer.config import load
from trainer.config.sections.trainer import ProfileSection
from trainer.errors import ConfigError
from trainer.run.observers.timeline import StepProfiler, Timeline
from trainer.run.start.choose import _last_logged
from trainer.supervise.stall import Phase
from trainer.tools.report import page, run_record
from trainer.tools.report.history import FINISHED, KILLED, STOPPED, attempts
from trainer.tools.report.run_record import read
from trainer.tools.report.style import drawing
from trainer.trackers import JsonLines

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
NASTY = "<script>alert('$x$')</script>\x1b[31m"


def record_of(step: int, **more: Any) -> dict[str, Any]:
    plain = {
        "total_steps": 40,
        "loss": 5 - step / 20,
        "learning_rate": 1e-3 / step,
        "gradient_norm": 1 + 1 / step,
    }
    return {
        "step": step,
        **plain,
        "tokens_per_second": 900.0 + step,
        "memory_gib": 1.5,
        "data_wait": 0.01,
        **more,
    }


def write_run(folder: Path, rows: list[Any], **files: Any) -> Path:
    """A run's folder with these lines of metrics.jsonl, and other files by name: objects, lists of
    lines or text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "metrics.jsonl": rows,
        "environment.json": {"device": "cpu"},
        "config.json": {"gradient_clipping": 1.0},
        **files,
    }
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            content = "".join(
                row if isinstance(row, str) else json.dumps(row) + "\n" for row in content
            )
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def event(kind: str, step: int, at: float, **more: Any) -> dict[str, Any]:
    return {"event": kind, "step": step, "time": 1e9 + at, **more}


def logged(step: int, at: float) -> dict[str, Any]:
    return event(
        "logged", step, at, seconds={"waiting for data": 0.1, "training": 2.0, "logging": 0.2}
    )


TIMELINE = [
    event("start", 0, 0, steps=40, source=None), *(logged(step, 3.0 * step) for step in range(1, 24)),
    event("saved", 10, 32, seconds=2.0), event("saved", 20, 62, seconds=2.0), event("evaluated", 20, 63, seconds=1.0),
    event("start", 20, 200, steps=40, source="step-000020"), *(logged(n, 140 + 3.0 * n) for n in range(21, 31)),
    event("saved", 30, 232, seconds=2.0), event("end", 30, 233, error=None),
    event("start", 30, 300, steps=40, source="step-000030"), *(logged(n, 210 + 3.0 * n) for n in range(31, 41)),
    event("evaluated", 40, 331, seconds=1.0), event("saved", 40, 333, seconds=2.0), event("end", 40, 333, error=None),
]  # fmt: skip


def full(folder: Path) -> Path:
    """A run that has something for every section, twice interrupted, with names that are up to no
    good.
    """
    again = [record_of(step, loss=9.0) for step in range(21, 24)]
    rows = [*map(record_of, range(1, 21)), *again, *map(record_of, range(21, 41))]
    kept = [{"step": step, "evaluation_loss": 4.5 - step / 30} for step in (20, 40)]
    kinds = {
        "weights": 2**30,
        "optimizer": 2**31,
        NASTY: 2**28,
        "gradients": 2**29,
        "activations": 2**27,
    }
    kinds |= {
        "logits": 2**26,
        "communication buffers": 2**25,
        "temporaries": 2**24,
        "checkpoint copies": 2**20,
    }
    plan = {"memory": {"peak_bytes": 4 * 2**30, "by_kind": kinds}}
    files = {"plan.json": plan, "timeline.jsonl": TIMELINE}
    files |= {f"checkpoints/step-{step:06d}/manifest.json": {} for step in (30, 40)}
    return write_run(folder, rows + kept, **files)


class Elements(HTMLParser):
    """The tags of a page with their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    @property
    def images(self) -> list[bytes]:
        sources = [attributes["src"] or "" for tag, attributes in self.found if tag == "img"]
        return [
            base64.b64decode(source.removeprefix("data:image/png;base64,"), validate=True)
            for source in sources
        ]


def written(folder: Path, *arguments: str) -> Elements:
    assert main([str(folder), *arguments], "meshloom report") == 0
    return Elements((folder / "report.html").read_text())


@pytest.fixture(scope="module")
def reported(tmp_path_factory) -> tuple[Path, Elements]:
    """The report of a run that has all, in a folder of a name that is up to no good."""
    run = full(tmp_path_factory.mktemp("full") / "<script>alert(1)<")
    return run, written(run)


def ink(image: Image.Image) -> float:
    """The share of the pixels that are neither white nor of the page's grounds."""
    return float((np.asarray(image.convert("L")) < 200).mean())


ALL = {"loss", "learning-rate", "throughput", "time", "memory", "history"}


def test_a_page_with_every_picture(reported):
    run, elements = reported
    assert {attributes["id"] for tag, attributes in elements.found if tag == "section"} == ALL
    pictures = [Image.open(io.BytesIO(content)) for content in elements.images]
    assert len(pictures) == len(ALL) and all(ink(picture) > 0.003 for picture in pictures)
    beside = {path.stem: path.read_bytes() for path in (run / "report").glob("*.png")}
    assert beside.keys() == ALL and set(beside.values()) == set(elements.images)
    for words in (
        "The run was started 3 times; 3 steps were repeated",
        KILLED,
        STOPPED,
        FINISHED,
        "4.00 GiB at the peak",
    ):
        assert words in elements.text


def test_what_ended_a_run_is_text(tmp_path):
    lines = [event("start", 0, 0, steps=1), event("end", 0, 1, error=NASTY)]
    elements = written(write_run(tmp_path / "run", [record_of(1)], **{"timeline.jsonl": lines}))
    assert "failed: <script>alert('$x$')</script>\\x1b[31m" in elements.text
    assert "script" not in {tag for tag, _ in elements.found}
    with drawing():
        figure = page.history.history(read(tmp_path / "run")).figure
    assert figure is not None
    labels = [label for axes in figure.axes for label in axes.get_legend_handles_labels()[1]]
    assert "failed: <script>alert('$x$')</script>\\x1b[31m" in labels


def test_nothing_comes_from_elsewhere_and_nothing_runs(reported):
    run, elements = reported
    text = (run / "report.html").read_text()
    assert "http" not in re.sub(r"http-equiv", "", text) and "\x1b" not in text
    tags = {tag for tag, _ in elements.found}
    assert not tags & {"script", "link", "iframe", "object", "svg", "base", "a"}
    assert all(
        attributes.get("src", "data:").startswith("data:") for _, attributes in elements.found
    )
    assert not any(name.startswith("on") for _, attributes in elements.found for name in attributes)
    assert "<script>alert(1)<" in elements.text


def overlaps(figure: Any) -> list[tuple[str, str]]:
    """Pairs of words of a picture that lie on one another, and words that leave it."""
    with drawing():
        figure.canvas.draw()
    renderer, outer = figure.canvas.get_renderer(), figure.bbox
    hidden = set()  # ticks beyond the ends of an axis, which are not drawn
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        hidden |= {tick.label1 for tick in ticks if not low <= tick.get_loc() <= high}
    visible = [
        text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()
    ]
    words = [text for text in visible if text not in hidden]
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in words]
    inside = [(name, box) for name, box in boxes if box.width > 0]
    wrong = [
        (name, "the border")
        for name, box in inside
        if not (outer.x0 - 1 <= box.x0 and box.x1 <= outer.x1 + 1)
    ]
    wrong += [
        (name, "the border")
        for name, box in inside
        if not (outer.y0 - 1 <= box.y0 and box.y1 <= outer.y1 + 1)
    ]
    for (one, first), (two, second) in itertools.combinations(inside, 2):
        if first.padded(-1).overlaps(second.padded(-1)):
            wrong.append((one, two))
    return wrong


@pytest.mark.parametrize("steps", [40, 1])
def test_no_words_lie_on_one_another(tmp_path, steps):
    run = (
        full(tmp_path / "job")
        if steps == 40
        else write_run(tmp_path / "job", [record_of(1, total_steps=1)])
    )
    for section in page.sections(read(run)):
        if section.figure is not None:
            assert overlaps(section.figure) == [], section.key


def test_dollars_are_no_mathematics(tmp_path):
    sections = {section.key: section.figure for section in page.sections(read(full(tmp_path)))}
    names = [text for text in sections["memory"].findobj(Text) if "$" in text.get_text()]
    assert len({text.get_text() for text in names}) == 1 and not any(
        text.get_parse_math() for text in names
    )


# What is missing or broken


def test_a_run_that_never_logged_says_so_of_each_picture(tmp_path):
    run = write_run(tmp_path / "job", [], **{"environment.json": {}, "config.json": {}})
    elements = written(run)
    assert elements.images == [] and not list((run / "report").iterdir())
    for words in (
        "has logged no step yet", "no phases", "no memory", "no starts and saves",
    ):  # fmt: skip
        assert words in elements.text
    rows = [section.text for section in page.sections(read(run))]
    assert len(rows) == len(ALL) and all(text.endswith(".") for text in rows)


def test_a_prediction_or_a_timeline_alone_is_drawn(tmp_path):
    plan = {"memory": {"peak_bytes": 2**30}}
    run = write_run(
        tmp_path, [], **{"environment.json": {}, "plan.json": plan, "timeline.jsonl": TIMELINE}
    )
    shows(written(run).text, "Predicted (plan.json): 1.00 GiB")
    assert {path.stem for path in (run / "report").glob("*.png")} == {"memory", "time", "history"}


def test_an_earlier_reports_pictures_go(tmp_path):
    run = write_run(tmp_path, [], **{"environment.json": {}, "timeline.jsonl": TIMELINE})
    for kept in ({"time", "history"}, set()):
        written(run)
        assert {path.stem for path in (run / "report").glob("*.png")} == kept
        (run / "timeline.jsonl").unlink(missing_ok=True)


def test_an_event_that_is_no_text_is_left_out(tmp_path):
    lines = [*TIMELINE, event(["logged"], 2, 3), event({}, 2, 3)]
    run = write_run(tmp_path / "job", [record_of(1)], **{"timeline.jsonl": lines})
    assert written(run).text and read(run).timeline == sorted(TIMELINE, key=lambda row: row["time"])


def test_a_torn_last_line_and_other_rubbish(tmp_path):
    rows = [record_of(1), "[1, 2]\n", "\x00\x00\n", record_of(2), '{"step": 3, "lo']
    run = write_run(
        tmp_path / "job", rows, **{"timeline.jsonl": '{"event": "sta', "plan.json": '{"memory": 3}'}
    )
    text = written(run).text
    shows(text, "metrics.jsonl: 3 of 5", "lines can't")
    shows(text, "timeline.jsonl: 1 of 1", "lines")
    shows(text, "plan.json", "memory can't")
    assert [row["step"] for row in read(run).steps] == [1, 2]


@pytest.mark.parametrize("loss", ["2.1.3", "1e-", "1e-5e", "2-3"])
def test_a_line_with_a_damaged_number_is_left_out(tmp_path, loss):
    """It looks like a line that a run writes, and is not parsed as JSON first."""
    damaged = f'{{"step": 2, "samples": 8, "loss": {loss}}}\n'
    record = read(write_run(tmp_path / "job", [record_of(1), damaged, record_of(3)]))
    assert [row["step"] for row in record.steps] == [1, 3] and record.logged == 2
    (note,) = record.notes
    shows(note, "metrics.jsonl: 1 of 3 lines", "can't be read", "left out")


@pytest.mark.parametrize("name", ["environment.json", "config.json", "plan.json", "status.json"])
@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"layout": {"schedule": 1}, "memory": [], "trainer": 1}',
        "[" * 100_000,
    ],
)
def test_a_broken_file_costs_its_own_section_alone(tmp_path, name, content):
    run = write_run(tmp_path / "job", [record_of(1)], **{name: content})
    read(run)
    assert all(section.text for section in page.sections(read(run)))


def test_losses_that_are_not_finite(tmp_path):
    odd = {
        "loss": None,
        "gradient_norm": None,
        "non_finite": {"loss": "nan", "gradient_norm": "inf"},
    }
    some = written(write_run(tmp_path / "some", [record_of(1), record_of(2, **odd), record_of(3)]))
    shows(some.text, "1 logged losses", "step 2")
    none = written(write_run(tmp_path / "none", [record_of(1, **odd)]))
    shows(none.text, "first", "step 1")
    assert "No finite norm" in none.text
    assert "not finite" in none.text


@pytest.mark.parametrize("kind", ["nothing", "empty", "a model", "runs", "a file"])
def test_what_is_no_run(tmp_path, capsys, kind):
    folder = tmp_path / "given"
    if kind == "a file":
        folder.write_text("")
    elif kind != "nothing":
        folder.mkdir()
    if kind == "a model":
        (folder / "config.json").write_text("{}")
    if kind == "runs":
        write_run(folder / "inner", [])
    assert main([str(folder)], "meshloom report") == ConfigError.exit_code == 64
    message = capsys.readouterr().err
    shows(message, "begun")
    assert ("in it: inner" in message) == (kind == "runs")
    assert not (folder / "report.html").exists()


def test_where_it_can_not_be_written(tmp_path, capsys):
    run = write_run(tmp_path / "job", [])
    (tmp_path / "file").write_text("")
    assert main([str(run), "--output", str(tmp_path / "file" / "x.html")], "meshloom report") == 74
    assert "disk error" in capsys.readouterr().err
    assert main([str(run), "--output", str(tmp_path / "new" / "x.html")], "meshloom report") == 0
    assert (tmp_path / "new" / "x.html").is_file() and not (run / "report.html").exists()


def test_without_matplotlib_it_says_how_to_get_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("trainer.storage.installed", lambda name: False)
    assert main([str(write_run(tmp_path, []))], "meshloom report") == 64
    assert "pip install matplotlib" in capsys.readouterr().err


# What the pictures say


def test_starts_and_ends(tmp_path):
    result = attempts(read(full(tmp_path)))
    assert [(one.first, one.last, one.how) for one in result] == [
        (0, 23, KILLED),
        (20, 30, STOPPED),
        (30, 40, FINISHED),
    ]
    failed = [*TIMELINE[:5], event("end", 4, 14, error="NumericsError")]
    assert (
        attempts(read(write_run(tmp_path, [], **{"timeline.jsonl": failed})))[0].how
        == "failed: NumericsError"
    )


# What a run records


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "timeline.jsonl").read_text().splitlines()]


def step_through(timeline: Timeline, last: int, saves: int = 0) -> None:
    for step in range(1, last + 1):
        for phase in (
            Phase.TRAINING,
            Phase.LOGGING,
            *((Phase.EVALUATING, Phase.SAVING) if step == saves else ()),
        ):
            timeline.at(phase, step)
        timeline.at(Phase.WAITING, step + 1)


def test_the_timeline_of_a_start_and_of_the_next(tmp_path):
    with pytest.raises(KeyError), Timeline(tmp_path, 5, 0, None) as timeline:
        timeline.at(Phase.WAITING, 1)
        step_through(timeline, 3, saves=2)
        raise KeyError
    with Timeline(tmp_path, 5, 2, tmp_path / "step-000002") as timeline:
        timeline.at(Phase.SAVING, 5)
    messages = [(row["event"], row["step"]) for row in lines(tmp_path)]
    first = [
        ("start", 0),
        ("logged", 1),
        ("logged", 2),
        ("evaluated", 2),
        ("saved", 2),
        ("logged", 3),
        ("end", 3),
    ]
    assert messages == [*first, ("start", 2), ("saved", 5), ("end", 5)]
    result = lines(tmp_path)
    assert [row["error"] for row in result if row["event"] == "end"] == ["KeyError", None]
    assert result[1]["seconds"].keys() == {"waiting for data", "training", "logging"}
    assert result[7]["source"] == "step-000002" and result[4]["seconds"] >= 0
    assert all(one["time"] <= other["time"] for one, other in itertools.pairwise(result))


def test_other_ranks_write_no_timeline(tmp_path):
    with Timeline(None, 5, 0, None) as timeline:
        step_through(timeline, 3, saves=2)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_does_not_hide_what_was_raised(tmp_path, monkeypatch):
    with pytest.raises(KeyError), Timeline(tmp_path, 5, 0, None):
        monkeypatch.setattr("trainer.trackers.jsonl.json.dumps", lambda line: raising())
        raise KeyError


def raising() -> str:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(("first", "recorded"), [(1, [3, 4]), (4, [4]), (5, None)])
def test_the_steps_that_are_profiled(tmp_path, first, recorded):
    """Also where a run resumes in the midst of them; after them nothing is written over."""
    profiler = StepProfiler(ProfileSection(start=3, steps=2), tmp_path, torch.device("cpu"))
    for step in range(first, 7):
        for phase in (Phase.WAITING, Phase.TRAINING, Phase.LOGGING):
            profiler.at(phase, step)
            torch.ones(2, 2) @ torch.ones(2, 2)
    profiler.close()
    if recorded is None:
        assert not list(tmp_path.iterdir())
        return
    events = json.loads(
        gzip.decompress((tmp_path / "profile" / "trace-rank-0.json.gz").read_bytes())
    )["traceEvents"]
    names = [
        event["name"]
        for event in events
        if event["ph"] == "X" and event["cat"] != "gpu_user_annotation"
    ]
    assert names.count("meshloom: training") == len(recorded)
    assert names.count("aten::mm") == 3 * len(recorded)


# From a real run


REAL = """
import sys, torch, trainer
from torch import nn
from torch.nn.functional import cross_entropy

data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.arange(64) % 2)
config = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "trainer": {
    "device": "cpu", "engine": "mesh", "log": {"every": 1}, "checkpoint": {"every": 2}, "evaluation": {"every": 2},
    "steps": 6, "run": {"folder": sys.argv[1], "name": "job"}}}
for more in (["trainer.run.name=plain"], ['trainer.profile={"start": 2, "steps": 2}']):
    trainer.train(config, overrides=more, data=data, evaluation_data=data, blocks="*",
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2)),
        loss=lambda output, target: (cross_entropy(output, target, reduction="sum"), len(target)))
"""


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("real")
    environment = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
    }
    command = [sys.executable, "-c", REAL, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "job"


@pytest.mark.more
def test_a_real_run_leaves_what_is_drawn(real):
    result = read(real)
    assert result.notes == [] and [row["step"] for row in result.steps] == [1, 2, 3, 4, 5, 6]
    kinds = [row["event"] for row in result.timeline]
    assert kinds[0] == "start" and kinds[-1] == "end" and kinds.count("logged") == 6
    assert kinds.count("saved") == kinds.count("evaluated") == 3
    assert [(one.first, one.last, one.how) for one in attempts(result)] == [(0, 6, FINISHED)]
    seconds = [row["seconds"] for row in result.timeline if row["event"] == "logged"]
    assert all({"waiting for data", "training", "logging"} <= set(one) for one in seconds)
    assert result.device == "cpu"
    plain = read(real.with_name("plain"))
    assert [row["loss"] for row in plain.steps] == [row["loss"] for row in result.steps]
    assert (real / "profile" / "trace-rank-0.json.gz").stat().st_size > 1000
    elements = written(real)
    assert {Path(path).stem for path in (real / "report").glob("*.png")} == ALL
    assert (
        len(elements.images) == len(ALL)
        and "profile/trace-rank-0.json.gz has the steps" in elements.text
    )


@pytest.mark.parametrize(
    ("given", "keys"),
    [
        ({"start": 9}, ("trainer.profile.start: saw 9", "8 steps")),
        ({"start": 0}, ("trainer.profile.start",)),
        ({"steps": 101}, ("trainer.profile.steps",)),
        ({"step": 1}, ('Did you mean "steps"',)),
    ],
)
def test_a_profile_that_can_not_be_made(tmp_path, given, keys):
    (tmp_path / "own.json").write_text(
        json.dumps({"train_batch_size": 8, "trainer": {"steps": 8, "profile": given}})
    )
    with raises(ConfigError, *keys):
        load(str(tmp_path / "own.json"), [])


# In a browser


PROBE = """<script>
addEventListener("load", () => {
  const box = element => { const r = element.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom] }
  const found = {wide: document.documentElement.scrollWidth, boxes: {}, images: [], failed: 0}
  for (const e of document.querySelectorAll("h1, section, footer")) {
    const words = e.id || e.className || e.textContent
    found.boxes[words] = box(e)
    for (const inner of e.querySelectorAll("h2, p, img, .table")) found.boxes[words + "/" + inner.tagName] = box(inner)
  }
  for (const i of document.images) {
    found.images.push([i.alt, ...box(i)])
    if (!i.complete || !i.naturalWidth) found.failed++
  }
  document.body.dataset.found = JSON.stringify(found)
})
</script>"""


def browse(
    folder: Path, page_file: Path, *arguments: str, width: int = 1100
) -> subprocess.CompletedProcess[str]:
    assert BROWSER is not None
    own = folder / "profile-of-the-browser"
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--enable-logging=stderr",
    ]
    command += [
        f"--user-data-dir={own}",
        f"--window-size={width},9000",
        *arguments,
        page_file.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    return done


@pytest.mark.skipif(
    BROWSER is None, reason="no Chromium on this machine: apt-get install chromium-headless-shell"
)
@pytest.mark.parametrize("width", [1100, pytest.param(480, marks=pytest.mark.more)])
def test_in_a_browser(tmp_path, reported, width):
    run, _ = reported
    probed = tmp_path / "probed.html"
    text = (run / "report.html").read_text()
    (policy,) = re.findall('<meta http-equiv="Content-Security-Policy" content="[^"]+">', text)
    probed.write_text(text.replace(policy, "").replace("</body>", f"{PROBE}</body>"))
    elements = Elements(browse(tmp_path, probed, "--dump-dom", width=width).stdout)
    result = json.loads(
        next(
            attributes["data-found"] or ""
            for tag, attributes in elements.found
            if "data-found" in attributes
        )
    )
    assert result["failed"] == 0 and result["wide"] <= width and len(result["images"]) == len(ALL)
    for (one, first), (two, second) in itertools.combinations(result["boxes"].items(), 2):
        within = one.startswith(f"{two}/") or two.startswith(f"{one}/")
        apart = (
            first[2] <= second[0]
            or second[2] <= first[0]
            or first[3] <= second[1]
            or second[3] <= first[1]
        )
        assert within or apart, (one, first, two, second)
    shot = tmp_path / "shot.png"
    browse(tmp_path, run / "report.html", f"--screenshot={shot}", width=width)
    with Image.open(shot) as picture:
        for alt, *box in result["images"]:
            assert ink(picture.crop(tuple(map(int, box)))) > 0.003, alt
        for name, box in result["boxes"].items():
            assert ink(picture.crop(tuple(map(int, box)))) > 0, name


def test_numbers_of_hundreds_of_digits_are_left_out(tmp_path):
    huge = "9" * 400
    rows = [
        record_of(1),
        f'{{"step": 2, "loss": {huge}}}\n',
        f'{{"step": {huge}, "loss": 1}}\n',
        "9" * 5000 + "\n",
    ]
    plan = f'{{"memory": {{"peak_bytes": {huge}}}}}'
    config = f'{{"gradient_clipping": {huge}}}'
    folder = write_run(tmp_path / "run", rows, **{"plan.json": plan, "config.json": config})
    assert main([str(folder)], "meshloom report") == 0


@pytest.mark.parametrize("name", ["metrics.jsonl", "timeline.jsonl", "config.json", "plan.json"])
def test_a_pipe_in_the_folder_is_not_waited_for(tmp_path, name):
    folder = full(tmp_path / "run")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert main([str(folder)], "meshloom report") == 0


def test_held_out_accuracy_is_drawn(tmp_path):
    kept = [
        {"step": step, "evaluation_loss": 4.0, "evaluation_accuracy": step / 50}
        for step in (20, 40)
    ]
    record = read(write_run(tmp_path / "run", [*map(record_of, range(1, 41)), *kept]))
    with drawing():
        section = page.curves.losses(record)
    assert section.figure is not None and section.key == "loss"
    labels = [text for axes in section.figure.axes for text in axes.get_legend_handles_labels()[1]]
    assert labels == ["training", "held-out", "held-out accuracy"]


def test_of_very_many_lines_few_are_parsed_and_all_are_counted(tmp_path, monkeypatch):
    """A million took 34 s: what is not drawn is not parsed, and nothing of it is kept."""
    parsed = []
    real = run_record.parse_json
    monkeypatch.setattr(run_record, "parse_json", lambda text: parsed.append(1) or real(text))
    metrics = JsonLines(tmp_path / "metrics.jsonl")
    for step in range(1, 40_001):
        metrics.write(
            {"step": step, "samples": step, "loss": 2.0 - (step == 31_234), "gradient_norm": 1.0}
        )
    metrics.write({"step": 40_000, "evaluation_loss": 2.5, "evaluation_targets": 4})
    result = read(tmp_path)
    assert result.logged == 40_000 and [row["evaluation_loss"] for row in result.evaluations] == [
        2.5
    ]
    assert {"step": 31_234, "samples": 31_234, "loss": 1.0, "gradient_norm": 1.0} in result.steps
    assert result.steps[0]["step"] == 1 and result.steps[-1]["step"] == 40_000
    assert len(parsed) < 10_000


def test_many_log_lines_of_a_timeline_add_up(tmp_path):
    lines = JsonLines(tmp_path / "timeline.jsonl")
    lines.write({"event": "start", "step": 0, "time": 0.0, "steps": 30_000})
    for step in range(1, 30_001):
        odd = (
            {"seconds": {"training": "much"}}
            if step == 7
            else {"seconds": {"training": 0.5, "saving": 0.25}}
        )
        lines.write({"event": "logged", "step": step, "time": float(step), **odd})
    (tmp_path / "metrics.jsonl").touch()
    rows = read(tmp_path).timeline
    assert len(rows) < 20_000 and rows[-1]["step"] == 30_000
    results = [row["seconds"] for row in rows[1:]]
    assert sum(one.get("saving", 0.0) for one in results) == 0.25 * 29_999
    assert (
        sum(one["training"] for one in results if isinstance(one["training"], float))
        == 0.5 * 29_999
    )


def test_a_report_needs_no_torch():
    script = "import sys, trainer.tools.report.page; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 0


def test_what_goes_on_reads_the_end_of_its_lines_alone(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' * 200_000 + b'{"step": 7}\n' + b"{" * (3 << 20))
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} is read whole"))
    JsonLines(path).close()
    assert path.stat().st_size == 12 * 200_001 and _last_logged(path) == 7
