"""Draw the manual's pictures: `python docs/pictures.py` writes docs/images/*.svg."""

from pathlib import Path

import bloodcells

LABELED, UNLABELED, SERVER, PLAIN = "#cfe8cf", "#e6e6ee", "#fde2b8", "#ffffff"


class Picture:
    """Boxes with words in them, and arrows between them."""

    def __init__(self, width: int, height: int) -> None:
        self.size, self.parts = (width, height), list[str]()

    def box(self, x: int, y: int, w: int, h: int, *lines: str, fill: str = PLAIN) -> "Picture":
        self.parts.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="6" fill="{fill}" stroke="#555"/>')
        top = y + h / 2 - 8 * (len(lines) - 1)
        for number, line in enumerate(lines):
            self.text(x + w / 2, top + 16 * number + 4, line, bold=number == 0)
        return self

    def text(self, x: float, y: float, words: str, bold: bool = False, anchor: str = "middle") -> "Picture":
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{weight}>{words}</text>')
        return self

    def arrow(self, x: int, y: int, to_x: int, to_y: int, words: str = "", color: str = "#333") -> "Picture":
        self.parts.append(f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" stroke="{color}" marker-end="url(#tip)"/>')
        return self.text((x + to_x) / 2, (y + to_y) / 2 - 6, words) if words else self

    def svg(self) -> str:
        width, height = self.size
        tip = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
                f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12" fill="#222">',
                f'<defs>{tip}<path d="M0,0 L8,4 L0,8 z" fill="#333"/></marker></defs>',
                f'<rect width="{width}" height="{height}" fill="white"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


def rscfed() -> Picture:
    p = Picture(640, 250)
    p.box(10, 30, 130, 44, "labeled client", "cross-entropy", fill=LABELED)
    p.box(10, 100, 130, 44, "unlabeled client", "student, teacher", fill=UNLABELED)
    p.box(10, 170, 130, 44, "unlabeled client", "student, teacher", fill=UNLABELED)
    for number, y in enumerate((20, 95, 170)):
        p.box(250, y, 150, 54, f"group {number + 1} of M", "K clients at random", "near the mean: more", fill=SERVER)
        for start in (52, 122, 192):
            p.arrow(140, start, 250, y + 27)
        p.arrow(400, y + 27, 500, 122)
    return p.box(500, 98, 120, 48, "new model", "mean of the groups", fill=SERVER)


def fedirm() -> Picture:
    p = Picture(640, 210)
    p.box(10, 20, 180, 64, "labeled client", "cross-entropy;", "how it confuses classes", fill=LABELED)
    p.box(10, 124, 180, 64, "unlabeled client", "two views consistent;", "its confusion like theirs", fill=UNLABELED)
    p.box(
        430,
        20,
        200,
        168,
        "server",
        "mean of the models,",
        "mean of the relations:",
        "C rows of C probabilities",
        fill=SERVER,
    )
    p.arrow(190, 52, 430, 52, "weights, relation matrix").arrow(190, 142, 430, 142, "weights")
    return p.arrow(430, 174, 190, 174, "model, mean relation")


def cbafed() -> Picture:
    p = Picture(640, 230)
    p.box(10, 20, 190, 68, "labeled client", "first alone; blends with", "its own earlier weights", fill=LABELED)
    words = "labels its images once", "a round; a second guess", "where that class is rare"
    p.box(10, 124, 190, 84, "unlabeled client", *words, fill=UNLABELED)
    words = "mean by images used,", "every s rounds blended", "with an earlier one;", "rare class: low threshold"
    p.box(430, 20, 200, 188, "server", *words, fill=SERVER)
    p.arrow(200, 54, 430, 54, "weights, class counts").arrow(200, 146, 430, 146, "weights, class counts")
    return p.arrow(430, 190, 200, 190, "model, thresholds")


def isofed() -> Picture:
    p = Picture(640, 190)
    p.box(10, 60, 90, 60, "model", fill=SERVER)
    p.box(
        150,
        40,
        160,
        100,
        "1. unlabeled clients",
        "adapt to own images,",
        "then student follows",
        "a fresh teacher",
        fill=UNLABELED,
    )
    p.box(345, 60, 70, 60, "mean by", "distance", fill=SERVER)
    p.box(450, 40, 130, 100, "2. labeled clients", "adapt to own", "images, then", "cross-entropy", fill=LABELED)
    p.arrow(100, 90, 150, 90).arrow(310, 90, 345, 90).arrow(415, 90, 450, 90)
    p.parts.append('<path d="M515,140 V170 H55 V122" fill="none" stroke="#333" marker-end="url(#tip)"/>')
    return p.text(285, 164, "mean by distance, next round")


def fedmatch() -> Picture:
    p = Picture(640, 230)
    p.box(10, 20, 180, 60, "labels", "at clients or the server", "move sigma alone", fill=LABELED)
    p.box(10, 140, 180, 60, "unlabeled images", "at clients", "move psi alone", fill=UNLABELED)
    p.box(260, 80, 150, 60, "a client's network", "sigma + psi")
    p.arrow(190, 50, 275, 80, "").arrow(190, 170, 275, 140)
    p.box(470, 20, 160, 60, "mean by accuracy", "on the server's", "validation set", fill=SERVER)
    p.box(470, 140, 160, 60, "helpers", "psi of the best models", fill=SERVER)
    p.arrow(410, 95, 470, 60).arrow(550, 80, 550, 140)
    return p.arrow(470, 180, 190, 180, "should agree with them")


def semifl() -> Picture:
    p = Picture(640, 190)
    p.box(10, 60, 90, 60, "model", fill=SERVER)
    words = "label own images once;", "epochs on sure labels,", "and on mixed images"
    p.box(150, 40, 160, 100, "1. unlabeled clients", *words, fill=UNLABELED)
    p.box(345, 60, 80, 60, "mean, with", "momentum", fill=SERVER)
    words = "the server, or", "labeled clients:", "cross-entropy"
    p.box(460, 40, 130, 100, "2. fine-tuning", *words, fill=LABELED)
    p.arrow(100, 90, 150, 90).arrow(310, 90, 345, 90).arrow(425, 90, 460, 90)
    p.parts.append('<path d="M525,140 V170 H55 V122" fill="none" stroke="#333" marker-end="url(#tip)"/>')
    return p.text(290, 164, "next round")


def fl2() -> Picture:
    p = Picture(640, 210)
    p.box(10, 70, 80, 60, "model", fill=SERVER)
    words = "label own images once", "threshold: mean confidence", "weights nearby must", "predict the same"
    p.box(130, 40, 190, 110, "1. unlabeled clients", *words, fill=UNLABELED)
    p.box(360, 60, 90, 80, "mean by", "1 - threshold,", "momentum", fill=SERVER)
    words = "the server, or", "labeled clients:", "cross-entropy"
    p.box(490, 45, 130, 100, "2. fine-tuning", *words, fill=LABELED)
    p.arrow(90, 100, 130, 100).arrow(320, 100, 360, 100).arrow(450, 100, 490, 100)
    p.parts.append('<path d="M555,145 V190 H50 V132" fill="none" stroke="#333" marker-end="url(#tip)"/>')
    return p.text(290, 184, "next round")


def sage() -> Picture:
    p = Picture(640, 200)
    p.box(10, 70, 110, 60, "unlabeled image", "weak view", fill=UNLABELED)
    p.box(170, 20, 150, 60, "local model", "as it trains", fill=LABELED)
    p.box(170, 120, 150, 60, "global model", "as received", fill=SERVER)
    p.arrow(120, 95, 170, 55).arrow(120, 105, 170, 145)
    words = "local label: exp(-kappa gap),", "global label: the rest"
    p.box(370, 60, 250, 80, "soft target of the strong view", *words)
    return p.arrow(320, 50, 370, 85, "").arrow(320, 150, 370, 115)


def proxyfl() -> Picture:
    p = Picture(640, 220)
    words = "labels: cross-entropy", "sure images: FixMatch", "undecided ones: towards the", "proxies of likely classes"
    p.box(10, 60, 200, 110, "a client", *words, fill=LABELED)
    p.box(300, 20, 150, 60, "mean", "of the weights", fill=SERVER)
    p.box(300, 130, 150, 70, "proxies", "each client's rows", "of the classifier", fill=SERVER)
    p.arrow(210, 95, 300, 55).arrow(210, 135, 300, 160)
    p.box(500, 70, 130, 80, "tuned proxies", "tell all clients'", "proxies apart", fill=SERVER)
    return p.arrow(450, 60, 500, 90).arrow(450, 160, 500, 130)


def twinsight() -> Picture:
    p = Picture(640, 220)
    p.box(10, 80, 110, 60, "any client", "two views", "of its images", fill=UNLABELED)
    words = "learns from labels, or from", "sure pseudo-labels"
    p.box(170, 15, 220, 70, "supervised model", *words, fill=LABELED)
    words = "learns to tell images apart,", "the same at all clients"
    p.box(170, 135, 220, 70, "self-supervised twin", *words, fill=UNLABELED)
    p.arrow(120, 100, 170, 60).arrow(120, 120, 170, 160)
    p.arrow(280, 85, 280, 135).arrow(280, 135, 280, 85).text(290, 114, "find the same images alike", anchor="start")
    p.box(500, 15, 130, 70, "new model", "mean of the models,", "shipped", fill=SERVER)
    p.box(500, 135, 130, 70, "new twin", "mean of the twins", fill=SERVER)
    return p.arrow(390, 50, 500, 50, "weights").arrow(390, 170, 500, 170, "weights")


def architecture() -> Picture:
    p = Picture(660, 440)
    p.box(20, 20, 300, 64, "methods", "what the paper says:", "round, local_update", fill=SERVER)
    p.box(380, 20, 260, 64, "learn, core.tree", "losses, teachers,", "arithmetic on weights")
    p.box(20, 114, 300, 44, "core.federation", "sample, mean, run, map, log", fill=SERVER)
    p.box(20, 188, 620, 44, "engine.rounds", "the server's part, the same for all", fill=SERVER)
    p.arrow(320, 52, 380, 52).arrow(170, 84, 170, 114).arrow(170, 158, 170, 188)
    p.box(20, 262, 190, 64, "engine.local", "this machine: one", "process, or many")
    p.box(235, 262, 190, 64, "engine.ray", "Flower's engine on Ray:", "--backend flower-ray")
    p.box(450, 262, 190, 64, "deploy.nodes", "sites on other machines,", "over Flower")
    p.arrow(115, 232, 115, 262).arrow(330, 232, 330, 262).arrow(545, 232, 545, 262)
    words = "images, scratch network,", "private state, random numbers"
    p.box(190, 366, 280, 60, "site", *words, fill=UNLABELED)
    p.box(510, 374, 130, 44, "data, networks", "views, layers")
    p.arrow(150, 326, 220, 366).arrow(330, 326, 330, 366).arrow(510, 326, 440, 366).arrow(470, 396, 510, 396)
    return p.text(96, 354, "through the wire only")


def tutor() -> Picture:
    p = Picture(680, 250)
    p.text(120, 18, "first term", bold=True).text(470, 18, "second term, each round", bold=True)
    p.box(
        10,
        34,
        220,
        64,
        "labeled clients",
        "train five tutors on labels alone;",
        "four leave out a quarter each",
        fill=LABELED,
    )
    p.box(
        10,
        150,
        220,
        64,
        "labeled clients",
        "count which class tutors take",
        "for which, on what they left out",
        fill=LABELED,
    )
    p.arrow(120, 98, 120, 150)
    words = "once: tutors label images", "by the site's class shares;", "then: train on the labels"
    p.box(270, 76, 180, 92, "1. unlabeled clients", *words, fill=UNLABELED)
    p.box(474, 92, 80, 60, "mean, with", "momentum", fill=SERVER)
    p.box(578, 76, 94, 92, "2. labeled", "clients", "train on", "true labels", fill=LABELED)
    p.arrow(230, 66, 270, 104).arrow(230, 182, 270, 140).arrow(450, 122, 474, 122).arrow(554, 122, 578, 122)
    p.parts.append('<path d="M625,168 V226 H360 V170" fill="none" stroke="#333" marker-end="url(#tip)"/>')
    return p.text(492, 220, "next round")


def blood_cells() -> Picture:
    """Draw each row's mean as a bar, and its seeds as dots."""
    rows, left, scale = bloodcells.bars(), 170, 4.3
    p = Picture(680, 70 + 30 * len(rows))
    p.text(10, 22, "Blood cells, one labeled site of ten: balanced accuracy on test, %", bold=True, anchor="start")
    for number, row in enumerate(rows):
        y, ours = 40 + 30 * number, row.method in ("labels-only", "tutor")
        p.text(left - 8, y + 16, row.name, anchor="end")
        fill = "#9aa0a6" if row.recipe == "printed" else "#2f7d4f" if ours else "#5b7fb5"
        p.parts.append(f'<rect x="{left}" y="{y}" width="{scale * row.mean:.1f}" height="22" rx="3" fill="{fill}"/>')
        for value in row.values:
            dot = f'<circle cx="{left + scale * value:.1f}" cy="{y + 11}" r="3.5" fill="white" stroke="#222"/>'
            p.parts.append(dot)
        end = left + scale * max(row.mean, *row.values) + 10
        p.text(end, y + 16, f"{row.mean:.0f}" + " (one seed)" * (len(row.values) == 1), anchor="start")
    note = "Bars are means, dots are seeds. All but the first row: the recipe fewlabel, 60 rounds."
    return p.text(10, 58 + 30 * len(rows), note, anchor="start")


PICTURES = (
    blood_cells,
    rscfed,
    fedirm,
    cbafed,
    isofed,
    fedmatch,
    semifl,
    sage,
    fl2,
    proxyfl,
    twinsight,
    tutor,
    architecture,
)

if __name__ == "__main__":
    for draw in PICTURES:
        (Path(__file__).parent / "images" / f"{draw.__name__}.svg").write_text(draw().svg())
