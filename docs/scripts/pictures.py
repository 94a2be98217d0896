"""Draw the pictures of docs/concepts: `python docs/scripts/pictures.py` writes docs/images/concept-*.svg.

A picture is 480 units wide, so that its text is about 11 px high on a phone whose screen is 400 px wide. The background
is white, so that the picture is readable on a dark page as well.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

IMAGES = Path(__file__).resolve().parents[1] / "images"
TEAL, GREY, RED, AMBER, BLUE = "#00796b", "#455a64", "#c62828", "#b26a00", "#1e5aa8"
FILL = {TEAL: "#e0f2f1", GREY: "#eceff1", RED: "#ffebee", AMBER: "#fff3e0", BLUE: "#e3edf9"}
WIDTH = 480


class Picture:
    """An SVG under construction; coordinates are in units of the picture."""

    def __init__(self, height: int, title: str) -> None:
        self.height, self.title = height, title
        self.parts: list[str] = []

    def text(self, x: float, y: float, text: str, *, size: int = 15, color: str = "#1c2529", anchor: str = "middle",
             bold: bool = False) -> None:  # fmt: skip
        """Write one line of text whose baseline is at y."""
        weight = ' font-weight="600"' if bold else ""
        style = f'font-size="{size}" fill="{color}" text-anchor="{anchor}"{weight}'
        self.parts.append(f'<text x="{x}" y="{y}" {style}>{escape(text)}</text>')

    def box(
        self, x: float, y: float, w: float, h: float, lines: str, *, color: str = TEAL, dashed: bool = False
    ) -> None:
        """Draw a rounded box; the first of its `|`-separated lines is bold, the others are small."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="7" fill="{FILL[color]}" stroke="{color}" '
            f'stroke-width="1.6"{dash}/>'
        )
        rows = lines.split("|")
        top = y + h / 2 - (len(rows) - 1) * 9 + 5
        for i, row in enumerate(rows):
            self.text(x + w / 2, top + i * 18, row, size=15 if i == 0 else 13, bold=i == 0)

    def arrow(self, *points: tuple[float, float], color: str = GREY, dashed: bool = False) -> None:
        """Draw an arrow along points; its head is at the last point."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        path = " ".join(f"{x},{y}" for x, y in points)
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.8"{dash} '
            f'marker-end="url(#head-{color[1:]})"/>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, *, color: str = GREY, width: float = 1.2) -> None:
        """Draw a straight line."""
        self.parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{color}" stroke-width="{width}"/>')

    def save(self, path: Path) -> None:
        """Write the picture to a file."""
        heads = "".join(
            f'<marker id="head-{color[1:]}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0,0 L10,5 L0,10 z" fill="{color}"/></marker>'
            for color in FILL
        )
        svg = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" role="img" '
            f'font-family="system-ui, sans-serif"><title>{escape(self.title)}</title><defs>{heads}</defs>'
            f'<rect width="{WIDTH}" height="{self.height}" rx="10" fill="#fff"/>\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )
        path.write_text(svg, encoding="utf-8")


def draw_loop() -> None:
    """Draw the stages of a run and what each of them commits."""
    p = Picture(400, "The stages of a run: convert, then rollout, train and publish in a loop, then export")
    p.box(150, 14, 180, 44, "convert|Hugging Face to Megatron", color=GREY)
    p.arrow((240, 58), (240, 94))
    p.parts.append(
        '<rect x="14" y="78" width="452" height="180" rx="12" fill="none" stroke="#90a4ae" stroke-width="1.4"/>'
    )
    p.text(30, 100, "one round, N times", size=13, anchor="start", color=GREY)
    p.box(30, 112, 124, 62, "rollout|SGLang samples,|rewards grade")
    p.box(178, 112, 124, 62, "train|Megatron-core,|one new policy")
    p.box(326, 112, 124, 62, "publish|weights into the|engines' memory")
    p.arrow((154, 143), (178, 143))
    p.arrow((302, 143), (326, 143))
    p.arrow((388, 174), (388, 244), (92, 244), (92, 174))
    p.text(240, 238, "the next round uses the new policy", size=13, color=GREY)
    p.box(160, 186, 160, 34, "checkpoint · eval", color=BLUE, dashed=True)
    p.arrow((240, 174), (240, 186), color=BLUE)
    p.arrow((240, 258), (240, 282))
    p.box(150, 282, 180, 34, "export", color=GREY)
    p.arrow((92, 258), (92, 338), color=AMBER)
    p.arrow((388, 258), (388, 338), color=AMBER)
    p.arrow((240, 316), (240, 338), color=AMBER)
    p.box(14, 338, 452, 50, "the store|every stage ends with one commit record", color=AMBER)
    p.save(IMAGES / "concept-loop.svg")


def draw_log() -> None:
    """Draw how an attempt becomes part of a run."""
    p = Picture(390, "An attempt writes private files; one conditional create makes them part of the run")
    p.text(20, 30, "1  write under a private prefix", anchor="start", bold=True)
    p.box(20, 42, 300, 54, "rollouts/000012/attempt-3f0c…/|part-00000.parquet", color=GREY, dashed=True)
    p.text(335, 66, "no reader opens", anchor="start", size=13, color=GREY)
    p.text(335, 84, "these files yet", anchor="start", size=13, color=GREY)
    p.text(20, 130, "2  commit: create one file, only if absent", anchor="start", bold=True)
    p.arrow((170, 142), (170, 164), color=TEAL)
    p.box(20, 166, 300, 54, "rollouts/000012.commit.json|files, sizes, hashes, metrics, inputs")
    p.text(335, 190, "now the round", anchor="start", size=13, color=TEAL)
    p.text(335, 208, "exists", anchor="start", size=13, color=TEAL)
    p.text(20, 254, "3  killed before the commit: nothing happened", anchor="start", bold=True)
    p.box(20, 266, 140, 42, "attempt-a91e…", color=RED, dashed=True)
    p.text(172, 292, "→  the stage runs again; gc removes it", anchor="start", size=13, color=RED)
    p.text(20, 338, "4  two writers: the second create fails", anchor="start", bold=True)
    p.text(20, 360, "It returns the first writer's commit; its own files", anchor="start", size=13, color=GREY)
    p.text(20, 377, "are never read.", anchor="start", size=13, color=GREY)
    p.save(IMAGES / "concept-write-ahead-log.svg")


def draw_crash() -> None:
    """Draw which rounds are loaded, replayed and generated again after a kill."""
    p = Picture(330, "After a kill: load the last checkpoint, replay the committed rounds, retry the open round")
    p.text(20, 28, "killed in round 47, checkpoints every 20 rounds", anchor="start", bold=True)
    for i, (label, color, dashed) in enumerate(
        [("0–39", GREY, False), ("40", TEAL, False), ("41", TEAL, False), ("…", TEAL, False), ("46", TEAL, False),
         ("47", RED, True)]
    ):  # fmt: skip
        p.box(20 + i * 74, 48, 66, 40, label, color=color, dashed=dashed)
    p.line(90, 40, 90, 104, color=AMBER, width=3)
    p.text(90, 122, "checkpoint 40", size=13, color=AMBER)
    p.text(424, 106, "killed", size=13, color=RED, bold=True)
    rows = [
        (AMBER, "load", "checkpoint 40 from the store"),
        (TEAL, "replay", "train again on rollouts 40 to 46: no generation,"),
        (None, "", "and every weight is compared with its commit"),
        (RED, "retry", "generate what is missing of round 47: groups that"),
        (None, "", "finished before the kill are in its journal"),
        (GREY, "never", "rounds 0 to 39 are not touched"),
    ]
    y = 158
    for color, word, text in rows:
        if color is not None:
            y += 6
            p.text(20, y, word, anchor="start", bold=True, color=color)
        p.text(92, y, text, anchor="start", size=14)
        y += 22
    p.text(20, 318, "cost = load + replay + the rest of one rollout", anchor="start", size=14, color=GREY)
    p.save(IMAGES / "concept-crash.svg")


def draw_placement() -> None:
    """Draw the three ways to divide GPUs between trainer and engines."""
    p = Picture(440, "Three placements: shared GPUs in turns, separate GPUs, several nodes")
    p.text(20, 28, "shared: --colocate", anchor="start", bold=True)
    p.text(20, 46, "trainer and engines take turns on the same GPUs", anchor="start", size=13, color=GREY)
    for i in range(4):
        x = 20 + i * 112
        p.box(x, 56, 104, 30, "engine", color=TEAL)
        p.box(x, 90, 104, 30, "trainer", color=BLUE)
        p.text(x + 52, 136, f"GPU {i}", size=13, color=GREY)
    p.text(20, 170, "separate: --rollout-num-gpus 2", anchor="start", bold=True)
    p.text(20, 188, "weights go over NCCL; needed to generate while training", anchor="start", size=13, color=GREY)
    for i in range(4):
        x = 20 + i * 112
        p.box(x, 198, 104, 34, "engine" if i > 1 else "trainer", color=TEAL if i > 1 else BLUE)
        p.text(x + 52, 248, f"GPU {i}", size=13, color=GREY)
    p.text(20, 284, "several nodes: --ray-address", anchor="start", bold=True)
    for n in range(2):
        x = 20 + n * 224
        p.parts.append(
            f'<rect x="{x}" y="296" width="216" height="86" rx="9" fill="none" stroke="#90a4ae" stroke-width="1.4"/>'
        )
        p.text(x + 12, 314, f"node {n}", anchor="start", size=13, color=GREY)
        p.box(x + 12, 324, 192, 46, "engines|8 GPUs" if n else "trainer|8 ranks", color=TEAL if n else BLUE)
    p.box(20, 394, 440, 34, "the store: a directory that all nodes mount, or S3", color=AMBER)
    p.save(IMAGES / "concept-placement.svg")


def draw_staleness() -> None:
    """Draw which policy version generates and trains each round, synchronously and one rollout ahead."""
    p = Picture(330, "Synchronous training has staleness 0; with one rollout ahead it is 1")
    p.text(20, 28, "synchronous: staleness 0", anchor="start", bold=True)
    for i in range(3):
        x = 70 + i * 134
        p.box(x, 42, 62, 30, f"gen {i}", color=TEAL)
        p.box(x + 66, 76, 62, 30, f"train {i}", color=BLUE)
    p.text(20, 62, "engines", anchor="start", size=12, color=TEAL)
    p.text(20, 96, "trainer", anchor="start", size=12, color=BLUE)
    p.text(20, 140, "one ahead (--async-buffer-size 1): staleness 1 from round 1", anchor="start", bold=True)
    for i in range(5):
        x = 70 + i * 80
        p.box(x, 154, 74, 30, f"gen {i}", color=TEAL)
        if i:
            p.box(x, 188, 74, 30, f"train {i - 1}", color=BLUE)
    p.text(20, 174, "engines", anchor="start", size=12, color=TEAL)
    p.text(20, 208, "trainer", anchor="start", size=12, color=BLUE)
    p.text(70, 238, "gen 1 runs while version 0 is being trained: its tokens", anchor="start", size=13, color=GREY)
    p.text(70, 255, "come from version 0 and are trained by version 1", anchor="start", size=13, color=GREY)
    p.text(20, 290, "staleness of a token =", anchor="start", bold=True)
    p.text(20, 312, "version that is trained on it − version that generated it", anchor="start", size=14)
    p.save(IMAGES / "concept-staleness.svg")


def draw_policy() -> None:
    """Draw who uses the policy, and the rules between them (flows/policy_schedule.py)."""
    p = Picture(
        430, "The trainer has the newest policy; weights are sent between two rounds; two bounds order the rest"
    )
    p.box(20, 40, 170, 62, "train round r|trainer: version r|-> version r + 1", color=BLUE)
    p.box(290, 40, 170, 62, "publish version v|trainer -> engines|one send at a time", color=AMBER)
    p.box(290, 190, 170, 62, "generate round r|engines: version v")
    p.box(20, 190, 170, 62, "evaluate version v|engines keep v|until its end", color=GREY)
    p.arrow((190, 71), (290, 71))
    p.text(240, 62, "never both", size=12, color=RED)
    p.arrow((375, 102), (375, 190))
    p.text(382, 150, "v is due", anchor="start", size=12, color=GREY)
    p.arrow((290, 228), (190, 228))
    p.text(240, 246, "same v", size=12, color=GREY)
    p.arrow((300, 190), (150, 102))
    p.text(160, 160, "commit", size=12, color=GREY)
    p.text(20, 288, "round r may be generated with version v if", anchor="start", bold=True)
    p.text(34, 308, "r - (rounds trained) <= lead    and    r - v <= bound", anchor="start", size=14)
    rows = (
        ("", "lead", "bound", "weights are sent"),
        ("synchronous", "0", "N - 1", "between two rollouts"),
        ("--async-buffer-size K", "K", "K + N - 1", "between two rollouts"),
        ("--async-mode streaming", "S", "S", "while groups are in flight"),
    )
    for i, row in enumerate(rows):
        for x, cell in zip((20, 190, 226, 300), row):
            p.text(x, 338 + i * 20, cell, anchor="start", size=13, color=GREY if i == 0 else "#1c2529")
    p.text(20, 422, "N: --update-weights-interval, S: --max-staleness", anchor="start", size=12, color=GREY)
    p.save(IMAGES / "concept-policy.svg")


def draw_lineage() -> None:
    """Draw the graph from data and models to an export."""
    p = Picture(410, "Every artifact names what it was made from")
    p.box(20, 16, 130, 44, "train.jsonl|content hash", color=GREY)
    p.box(175, 16, 130, 44, "base model|content hash", color=GREY)
    p.box(330, 16, 130, 44, "code version|and options", color=GREY)
    p.box(90, 100, 130, 44, "rollout 12|256 samples")
    p.box(260, 100, 130, 44, "step 12|weights' digest", color=BLUE)
    p.arrow((85, 60), (130, 100))
    p.arrow((240, 60), (180, 100))
    p.arrow((395, 60), (345, 100))
    p.arrow((220, 122), (260, 122))
    p.box(175, 184, 130, 44, "checkpoint 20|policy version 20", color=BLUE)
    p.arrow((325, 144), (265, 184))
    p.text(330, 172, "rounds 13–19", anchor="start", size=13, color=GREY)
    p.box(20, 268, 130, 44, "eval 20|gsm8k", color=AMBER)
    p.box(175, 268, 130, 44, "export 20|Hugging Face", color=AMBER)
    p.box(330, 268, 130, 44, "a fork|from round 20", color=AMBER)
    p.arrow((200, 228), (110, 268))
    p.arrow((240, 228), (240, 268))
    p.arrow((280, 228), (370, 268))
    p.box(20, 352, 285, 44, "champion of a model|penstock promote")
    p.arrow((85, 312), (110, 352))
    p.arrow((240, 312), (215, 352))
    p.text(325, 370, "penstock lineage", anchor="start", size=13, color=GREY)
    p.text(325, 388, "prints both directions", anchor="start", size=13, color=GREY)
    p.save(IMAGES / "concept-lineage.svg")


if __name__ == "__main__":
    for draw in (draw_loop, draw_log, draw_crash, draw_placement, draw_staleness, draw_policy, draw_lineage):
        draw()
