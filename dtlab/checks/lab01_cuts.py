"""Lab 01, exercise 1: the usual mistakes in cutting a length into chunks."""
import re

from dtlab.checks import lab01_serial as serial
from dtlab.checks.compare import difference
from dtlab.checks.exercise import Mistake
from dtlab.checks.lab01_serial import cut_key, wrong_ranks


def _cut_by(model):
    """Whether all bounds are those of ``model``, and some of them wrong."""
    def seen(evidence, expected):
        if not wrong_ranks(evidence, expected):
            return False
        model_gives = {cut_key(*pair): model(*pair) for pair in evidence.case["pairs"]}
        return difference(evidence.results[0], model_gives) is None
    return seen


def _ends_inside(length, size):
    return [(start, end - 1) for start, end in serial.bounds(length, size)]


def _sizes(length, size):
    return [end - start for start, end in serial.bounds(length, size)]


def _longer_last(length, size):
    return [(length - end, length - start) for start, end in serial.bounds(length, size)][::-1]


def _not_first(evidence, _):
    """Whether the chunks are whole and even, and a longer one stands behind a shorter."""
    found = False
    for length, size in evidence.case["pairs"]:
        cuts = [tuple(its) for its in evidence.results[0][cut_key(length, size)]]
        lengths = [end - start for start, end in cuts]
        joined = [start for start, _ in cuts] + [length] == [0] + [end for _, end in cuts]
        if len(cuts) != size or not joined or max(lengths) - min(lengths) > 1:
            return False
        found |= lengths != sorted(lengths, reverse=True)
    return found


def _no_list(evidence, _):
    said = "a value of type (zip|map|generator)"
    kinds = [re.fullmatch(said, str(its)) for its in evidence.results[0].values()]
    return all(kinds) and kinds[0].group(1)


def _too_long(evidence, _):
    return "10**12" in evidence.case.name and evidence.failed in ("raised", "died", "time")


def failed(kind, *words):
    """Whether it failed in this way, with these words in the report: a ``seen`` of a Mistake."""
    return lambda evidence, _: evidence.failed == kind and all(word in evidence.text for word in words)


BORROWED = Mistake("borrowed", "dtlab.parallel has what this lab builds, and is closed here",
                   failed("raised", "dtlab.parallel is closed"))  # fmt: skip
CUT_MISTAKES = (
    BORROWED,
    Mistake("remainder dropped", "every chunk has length // size elements, and the last length % size are in "
            "no chunk. Lengths that the ranks divide never show it", _cut_by(serial.dropped)),
    Mistake("rest in the last chunk", "the last chunk takes the whole remainder: of 10 elements on 4 ranks it has 4, "
            "where 3 are the most that any rank needs to have. The ring waits for its longest chunk in every step",
            _cut_by(serial.rest_last)),
    Mistake("all chunks rounded up", "every chunk is as long as the longest until nothing is left, so the last ranks "
            "get less than their share or nothing: 10 elements on 4 ranks need 3, 3, 2, 2", _cut_by(serial.rounded_up)),
    Mistake("longer chunks last", "the sizes are right; the longer chunks are to come first, so that every rank means "
            "the same chunk by its number", _cut_by(_longer_last)),
    Mistake("longer chunks not first", "no two chunks differ by more than one element, and a longer one stands "
            "behind a shorter one, as i * length // size puts them. The longer ones come first: 10 on 4 "
            "ranks are 3, 3, 2, 2",
            _not_first),
    Mistake("no list", "what is returned is a {}, which can be gone through once: list(...) makes a list of it",
            _no_list),
    Mistake("last element inside", "each end is the last element inside the chunk. Here an end is one past it, as in "
            "Python's slices: tensor[start:end]", _cut_by(_ends_inside)),
    Mistake("sizes for bounds", "these are the sizes of the chunks; asked for are (start, end) of each",
            _cut_by(_sizes)),
    Mistake("too long to list", "this works for short lengths and makes something of `length` elements on the way. "
            "Four bytes for each of 10**12 are 4 TB; bounds need a few whole numbers", _too_long),
)  # fmt: skip
