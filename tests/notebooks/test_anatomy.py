"""What every committed lesson keeps: its source, its size, its headings, nothing of the machine that built it."""
import importlib.util
import re
from pathlib import Path

import nbformat
import pytest

COURSE = Path(__file__).resolve().parents[2]
LESSONS = sorted((COURSE / "notebooks").glob("[0-9][0-9]_*.ipynb"))
spec = importlib.util.spec_from_file_location("build", COURSE / "notebooks" / "build.py")
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)

HEADINGS = ["The problem", "The idea", "Build it", "Is it right?", "What does it cost?", "In real systems",
            "Exercises", "Summary"]


@pytest.fixture(params=LESSONS, ids=lambda path: path.stem)
def lesson(request):
    return nbformat.read(request.param, as_version=4)


def cells(lesson, kind):
    return [cell for cell in lesson.cells if cell.cell_type == kind]


def prose(lesson):
    return "\n".join(cell.source for cell in cells(lesson, "markdown"))


def test_every_lesson_is_built_and_every_source_has_one():
    assert LESSONS and [path.stem for path in LESSONS] == sorted(
        path.stem for path in (COURSE / "notebooks" / "src").glob("*.py"))


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_the_committed_lesson_is_its_source(path):
    assert build.differences(COURSE / "notebooks" / "src" / f"{path.stem}.py", path) == []


def test_kernel_and_ids(lesson):
    assert lesson.metadata.kernelspec.name == "python3"
    assert len({cell.id for cell in lesson.cells}) == len(lesson.cells)
    nbformat.validate(lesson)


def test_every_cell_ran_in_order(lesson):
    assert [cell.execution_count for cell in cells(lesson, "code")] == list(range(1, len(cells(lesson, "code")) + 1))


def test_outputs_name_nothing_of_the_machine_and_stay_small(lesson):
    for cell in cells(lesson, "code"):
        text = build._text(cell)
        assert build.machine_names(text) == [] and len(text) < 50_000, cell.id


def test_an_unmeant_error_is_in_no_output(lesson):
    for cell in cells(lesson, "code"):
        failed = any(output.output_type == "error" for output in cell.outputs)
        assert failed == ("raises-exception" in cell.metadata.get("tags", [])), cell.id


def test_size(lesson):
    code = cells(lesson, "code")
    lines = [sum(bool(line.strip()) for line in cell.source.splitlines()) for cell in code]
    assert len(code) <= 30 and max(lines) <= 20 and sum(lines) <= 220, (len(code), max(lines), sum(lines))
    words = len(re.findall(r"[A-Za-z0-9']+", re.sub(r"\]\([^)]*\)|<[^>]*>|```.*?```", "", prose(lesson), flags=re.S)))
    assert words <= 1800, words


def test_one_import_cell_and_the_number_of_ranks_in_one_place(lesson):
    code = [cell.source for cell in cells(lesson, "code")]
    in_kernel = [source for source in code if not source.startswith("%%ranks")]
    with_imports = [source for source in in_kernel if re.search(r"^(import|from) ", source, flags=re.M)]
    assert with_imports == code[:1], "imports stand in the first code cell only"
    assert [source for source in code if re.search(r"^WORLD_SIZE = 4$", source, flags=re.M)] == code[:1]
    assert sum(len(re.findall(r"\bWORLD_SIZE\s*=[^=]", source)) for source in code) == 1


def test_prose_stands_above_every_code_cell(lesson):
    kinds = [cell.cell_type for cell in lesson.cells]
    bare = [lesson.cells[i].id for i in range(len(kinds)) if kinds[i] == "code" and (i == 0 or kinds[i - 1] == "code")]
    assert not bare, bare


def test_no_line_of_code_is_cut_on_a_laptops_screen(lesson):
    shown = [cell for cell in cells(lesson, "code") if "folded" not in cell.metadata.get("tags", [])]
    assert not [line for cell in shown for line in cell.source.splitlines() if len(line) > 97]


def test_questions_hide_their_replies(lesson):
    for cell in cells(lesson, "code"):
        hidden = cell.metadata.get("jupyter", {}).get("source_hidden", False)
        assert hidden or "dtlab.predict(" not in cell.source, cell.id


def test_headings_in_order(lesson):
    found = re.findall(r"^## (.*)$", prose(lesson), flags=re.M)
    positions = [next((i for i, title in enumerate(found) if title.startswith(heading)), None) for heading in HEADINGS]
    assert None not in positions and positions == sorted(positions), (HEADINGS, found)


def test_header_links_the_glossary_and_says_what_it_needs(lesson):
    header = lesson.cells[0].source
    assert "(../notebooks/GLOSSARY.md)" in header
    assert all(word in header for word in ("You will build", "Needs", "Runs on", "Takes"))


def test_bold_terms_of_the_summary_are_in_the_glossary(lesson):
    glossary = (COURSE / "notebooks" / "GLOSSARY.md").read_text(encoding="utf-8").lower()
    summary = prose(lesson).split("## Summary")[1]
    terms = re.findall(r"\*\*(.+?)\*\*", summary)
    assert terms and [term for term in terms if f"| {term.lower()} |" not in glossary] == []


def test_links_lead_somewhere(lesson):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", prose(lesson)):
        assert (COURSE / "notebooks" / target).exists(), target
