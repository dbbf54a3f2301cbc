"""The diagrams of the pages, as SVG.

python docs/diagrams.py            # writes docs/*.svg
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
INK, BLUE, GREEN, SAND, GREY = "#1f2933", "#dbeafe", "#d9f2e3", "#fdf0d5", "#eef0f3"
SIZE = 13
"""Of the text, in pixels; a line of it takes 17."""


@dataclass
class Drawing:
    """An SVG with boxes, arrows and text, on a white ground that is legible in a dark page."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, anchor: str = "middle", bold: bool = False):
        """Write lines around the height `y`."""
        lines = words.split("\n")
        weight = ' font-weight="600"' if bold else ""
        for number, line in enumerate(lines):
            at = y + 4.5 + 17 * (number - (len(lines) - 1) / 2)
            place = f'x="{x:g}" y="{at:g}" text-anchor="{anchor}"'
            self.parts.append(f"<text {place}{weight}>{escape(line)}</text>")

    def box(self, x: float, y: float, size: tuple[float, float], words: str = "", fill: str = GREY):
        width, height = size
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self.parts.append(f'<rect {place} rx="5" fill="{fill}" stroke="{INK}"/>')
        self.text(x + width / 2, y + height / 2, words)

    def arrow(self, start: tuple[float, float], end: tuple[float, float], words: str = ""):
        """Draw an arrow, with a word above its middle, or at the right of one that falls."""
        (x1, y1), (x2, y2) = start, end
        line = f'x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"'
        self.parts.append(f'<line {line} stroke="{INK}" marker-end="url(#head)"/>')
        if words and x1 == x2:
            self.text(x1 + 8, (y1 + y2) / 2, words, anchor="start")
        elif words:
            self.text((x1 + x2) / 2, (y1 + y2) / 2 - 11, words)

    def svg(self) -> str:
        body = "\n".join(self.parts)
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}"'
        font = f'font-family="system-ui, sans-serif" font-size="{SIZE}" fill="{INK}"'
        head = (
            '<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" '
            f'markerHeight="8" orient="auto"><path d="M0 0L10 5L0 10z" fill="{INK}"/></marker>'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" {font}>\n'
            f"<title>{escape(self.title)}</title>\n<defs>{head}</defs>\n"
            f'<rect width="{self.width}" height="{self.height}" rx="8" fill="#ffffff"/>\n'
            f"{body}\n</svg>\n"
        )


def one_json() -> Drawing:
    """One JSON, and meshes on which it trains alike."""
    drawing = Drawing(656, 330, "One JSON, any mesh")
    drawing.box(16, 44, (244, 206), fill="#ffffff")
    drawing.text(138, 24, "one JSON: a line for each axis", bold=True)
    lines = (
        '"train_batch_size": 256,',
        '"zero_optimization": {"stage": 3},',
        '"pipeline": {"stages": 2},',
        '"tensor_parallel":',
        '    {"autotp_size": 2},',
        '"trainer": {"model": ...}',
    )
    for number, words in enumerate(lines):
        drawing.text(28, 68 + 30 * number, words, "start")
    meshes = (
        ("one process", 1, 1, GREY),
        ("8: shard 8 (ZeRO-3, FSDP)", 8, 1, BLUE),
        ("16: pipeline 2 x shard 8", 8, 2, GREEN),
        ("32: pipeline 2 x shard 8 x tensor 2", 16, 2, SAND),
    )
    for number, (words, across, down, fill) in enumerate(meshes):
        top = 44 + 58 * number
        drawing.arrow((262, 147), (312, top + 22))
        drawing.text(320, top, words, "start")
        for place in range(across * down):
            at = (320 + 20 * (place % across), top + 12 + 15 * (place // across))
            drawing.box(*at, (17, 12), fill=fill)
    drawing.box(16, 272, (624, 42), fill=GREY)
    words = "each compared with one process: losses, gradients, norm, updates;"
    drawing.text(328, 293, f"{words}\na checkpoint of one resumes under any other")
    return drawing


def mesh() -> Drawing:
    """Eight processes as pipeline 2 x shard 2 x tensor 2, and what an axis does."""
    drawing = Drawing(720, 330, "Eight processes as a mesh: pipeline 2 x shard 2 x tensor 2")
    for stage in range(2):
        left = 20 + 260 * stage
        drawing.box(left, 44, (230, 196), fill="#ffffff")
        drawing.text(left + 115, 28, f"stage {stage}: half of the blocks", bold=True)
        for shard in range(2):
            for tensor in range(2):
                rank = 4 * stage + 2 * shard + tensor
                x, y = left + 12 + 109 * tensor, 56 + 92 * shard
                words = f"rank {rank}\nsamples {'AB'[shard]}\nmatrix half {tensor}"
                drawing.box(x, y, (97, 80), words, fill=(BLUE, GREEN)[shard])
    drawing.arrow((252, 142), (278, 142))
    drawing.text(
        20, 262, "tensor, left and right: the halves of each matrix. Links: the fastest.", "start"
    )
    drawing.text(
        20, 284, "shard, top and bottom: other samples, and a part of each weight.", "start"
    )
    drawing.text(20, 306, "pipeline, from box to box: activations of the blocks before.", "start")
    drawing.box(530, 56, (170, 56), "replicate: the whole\nmesh again, with other\nsamples", SAND)
    drawing.text(615, 160, "gradients are summed\nover shard and replicate", bold=False)
    return drawing


def step() -> Drawing:
    """What a rank sends in a step, by technique."""
    drawing = Drawing(720, 300, "Who sends what in a step")
    columns = (130, 280, 430, 590)
    heads = ("forward", "backward", "after the last\nmicro-batch", "update")
    for x, words in zip(columns, heads, strict=True):
        drawing.text(x + 60, 26, words, bold=True)
    rows = {
        "DDP": ("", "", "all-reduce\ngradients", ""),
        "ZeRO-2": ("", "reduce-scatter\ngradients", "", "all-gather\nweights"),
        "ZeRO-3": ("all-gather\nweights", "all-gather weights,\nreduce-scatter", "", ""),
        "pipeline": ("send\nactivations", "send their\ngradients", "", ""),
        "tensor": ("all-reduce\nactivations", "all-reduce\ngradients of them", "", ""),
    }
    for number, (name, cells) in enumerate(rows.items()):
        y = 50 + 48 * number
        drawing.text(16, y + 20, name, "start", bold=True)
        for x, words in zip(columns, cells, strict=True):
            fill = GREY if not words else SAND if "weights" in words else BLUE
            drawing.box(x - 8, y, (136, 40), words or "nothing", fill if words else "#ffffff")
    return drawing


def checkpoint() -> Drawing:
    """The files of a checkpoint, and who writes and reads them."""
    drawing = Drawing(720, 300, "A checkpoint's files")
    for rank in range(4):
        drawing.box(20, 40 + 58 * rank, (110, 44), f"rank {rank}:\nits shards", BLUE)
        drawing.arrow((132, 62 + 58 * rank), (236, 150))
    drawing.text(75, 22, "any layout writes", bold=True)
    drawing.box(240, 30, (260, 250), fill="#ffffff")
    drawing.text(370, 22, "step-000100/, one rename", bold=True)
    files = {
        "model/  weights, by Hugging Face's names": GREEN,
        "optimizer/  NAME.exp_avg, NAME.master, ...": GREEN,
        "trainer.json  step, samples, seed, config": SAND,
        "manifest.json  every file: size, hashes": SAND,
    }
    for number, (words, fill) in enumerate(files.items()):
        drawing.box(250, 42 + 59 * number, (240, 48), words.replace("  ", "\n"), fill)
    drawing.text(630, 22, "anything reads", bold=True)
    readers = (
        "from_pretrained",
        "another layout,\nother ranks",
        "your own reader:\nsafetensors, JSON",
    )
    for number, words in enumerate(readers):
        drawing.arrow((502, 150), (568, 70 + 78 * number))
        drawing.box(570, 46 + 78 * number, (136, 50), words, BLUE)
    return drawing


def batch() -> Drawing:
    """One batch's way, from rows to the update."""
    drawing = Drawing(720, 290, "One batch's way")
    names = (
        "rows\n(JSONL, ...)",
        "template,\ntokens, mask",
        "samples\n(pack, pad)",
        "order: a\nfunction of\nseed, step",
    )
    for number, words in enumerate(names):
        drawing.box(16 + 176 * number, 40, (126, 62), words, SAND)
        if number:
            drawing.arrow((144 + 176 * (number - 1), 71), (190 + 176 * (number - 1), 71))
    drawing.text(16, 22, "once, on rank 0, then memory-mapped by all", "start", bold=True)
    drawing.text(16, 142, "each step, on each data rank", "start", bold=True)
    steps = (
        "its micro-\nbatches",
        "forward:\na sum, and\nits targets",
        "backward",
        "sum over ranks,\n/ all targets,\nclip",
        "update",
    )
    drawing.arrow((607, 102), (607, 128))
    for number, words in enumerate(steps):
        drawing.box(16 + 141 * number, 162, (116, 66), words, GREEN if number in (1, 2) else BLUE)
        if number:
            drawing.arrow((133 + 141 * (number - 1), 195), (156 + 141 * (number - 1), 195))
    drawing.text(
        16, 258,
        "The mean is over the targets of the whole batch, so ranks and micro-batches change nothing.", "start",
    )  # fmt: skip
    return drawing


DIAGRAMS = {
    "one_json": one_json,
    "mesh": mesh,
    "step": step,
    "checkpoint_files": checkpoint,
    "batch": batch,
}


def main() -> None:
    for name, draw in DIAGRAMS.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
