"""A small SVG builder and the course's colours (Okabe-Ito, one colour per meaning)."""
from html import escape
from math import floor, hypot, log10

COLOURS = {
    "forward": "#56B4E9", "activations": "#56B4E9",
    "backward": "#D55E00", "grads": "#D55E00",
    "weight_grads": "#CC79A7",
    "optimizer": "#E69F00", "optimizer_states": "#E69F00",
    "scores": "#F0E442",
    "communication": "#009E73",
    "params": "#4D4D4D",
    "other": "#E4E4E4",
    "outline": "#222222", "idle": "#FFFFFF", "paper": "#FFFFFF",
}


class Svg:
    """An SVG document: shown as a picture in a notebook, with a text that says the same.

    Subtle: no subclass of ``str``, whose markup IPython would show as the text.

    Attributes:
        markup: the document; also what ``str()`` gives.
        text: what the picture shows, for readers who do not see it; also its ``repr``.
    """

    def __init__(self, markup, text):
        self.markup, self.text = markup, text

    def __str__(self):
        return self.markup

    def __repr__(self):
        return self.text

    def _repr_svg_(self):
        return self.markup


def document(parts, *, width, height, title, text):
    """Join shapes to one ``Svg`` with a title for screen readers (else the first line of its text) on white ground."""
    title = title or text.strip().partition("\n")[0] or "picture"
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" aria-label="{escape(title, quote=True)}" font-family="sans-serif" font-size="12">')
    ground = f'<rect width="{width}" height="{height}" fill="{COLOURS["paper"]}"/>'
    return Svg("\n".join([head, f"<title>{escape(title)}</title>", ground, *parts, "</svg>"]), text)


def titled(markup, title):
    """An SVG made elsewhere, with role and title for screen readers, and without its XML prologue."""
    start = markup.index("<svg")
    end = markup.index(">", start)
    opening = f'{markup[start:end]} role="img" aria-label="{escape(title, quote=True)}">'
    return f"{opening}\n<title>{escape(title)}</title>{markup[end + 1:]}"


def tick_step(length, count):
    """1, 2 or 5 times a power of ten: the largest of which ``count`` fit into ``length``."""
    power = 10 ** floor(log10(length / count))
    return power * max((factor for factor in (1, 2, 5) if factor * power <= length / count), default=1)


def box(x, y, width, height, *, fill="none", stroke=COLOURS["outline"], radius=6):
    """A box with a dark outline."""
    return (f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}" fill="{fill}" '
            f'stroke="{stroke}" stroke-width="1.5"/>')


def label(x, y, text, *, anchor="start", size=12, weight="normal", fill=COLOURS["outline"], mono=False):
    """A line of text."""
    family = ' font-family="monospace"' if mono else ""
    return (f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" '
            f'fill="{fill}"{family}>{escape(str(text))}</text>')


def line(x1, y1, x2, y2, *, stroke=COLOURS["outline"], dash=None, width=1.5):
    """A straight line, dashed where ``dash`` says how."""
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{stroke}" stroke-width="{width}"{dashes}/>'


def arrow(x1, y1, x2, y2, *, stroke=COLOURS["outline"], dash=None, width=1.5, both=False):
    """A straight arrow to (x2, y2), with a head at the other end too where ``both`` says so."""
    length = hypot(x2 - x1, y2 - y1)
    along, across = ((x2 - x1) / length, (y2 - y1) / length), ((y1 - y2) / length, (x2 - x1) / length)
    size = 5 + 1.5 * width

    def head(x, y, way):
        back = x - way * size * along[0], y - way * size * along[1]
        wings = [(back[0] + side * size / 2 * across[0], back[1] + side * size / 2 * across[1]) for side in (-1, 1)]
        points = " ".join(f"{px:.1f},{py:.1f}" for px, py in ((x, y), *wings))
        return f'<polygon points="{points}" fill="{stroke}"/>', back

    tip, end = head(x2, y2, 1)
    tail, start = head(x1, y1, -1) if both else ("", (x1, y1))
    ends = (round(value, 1) for value in (*start, *end))
    return line(*ends, stroke=stroke, dash=dash, width=width) + tip + tail


def letter(kind, x, y, size=13):
    """The letter of a kind of ``COLOURS``, about a middle; none for other, since O is the optimizer's."""
    fill = COLOURS["paper" if kind == "params" else "outline"]
    said = "" if kind == "other" else kind[0].upper()
    return label(round(x, 1), round(y + 4.7, 1), said, anchor="middle", size=size, weight="bold", fill=fill)


def diamond(x, y):
    """A mark of what was measured."""
    return (f'<path d="M {x - 7:.1f} {y:.1f} l 7 -7 l 7 7 l -7 7 Z" fill="{COLOURS["outline"]}" '
            f'stroke="{COLOURS["paper"]}" stroke-width="1.5"/>')


def legend(kinds, x, *, words=None, marks=False, size=13):
    """A line of boxes with letter and words for ``kinds`` of ``COLOURS``, from x; 18 units high."""
    for kind in kinds:
        said = (words or {}).get(kind, kind)
        yield f'<rect x="{x}" y="2" width="18" height="14" fill="{COLOURS[kind]}" stroke="{COLOURS["outline"]}"/>'
        yield letter(kind, x + 9, 9, size)
        yield label(x + 24, 14, said, size=size)
        x += 46 + 7 * len(said)
    if marks:
        yield diamond(x + 8, 9)
        yield label(x + 22, 14, "measured", size=size)
