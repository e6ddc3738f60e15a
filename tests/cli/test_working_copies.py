"""Working copies: cleared, never overwritten, kept aside on reset."""
import json

import pytest

from dtlab import notes
from dtlab.cli.working_copies import make_all, reset
from dtlab.errors import ConfigError


@pytest.fixture
def course(tmp_path):
    (tmp_path / "notebooks").mkdir()
    for name in ("00_ranks", "01_more"):
        cell = {"cell_type": "code", "id": "00-a", "source": "1", "metadata": {"tags": ["exact"]},
                "outputs": [{"output_type": "stream", "name": "stdout", "text": "1"}], "execution_count": 1}
        notebook = {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
        (tmp_path / "notebooks" / f"{name}.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
    return tmp_path


def test_copies_are_cleared_and_keep_the_rest(course):
    copies = make_all(course)
    assert [path.relative_to(course).as_posix() for path in copies] == ["work/00_ranks.ipynb", "work/01_more.ipynb"]
    cell = json.loads(copies[0].read_text(encoding="utf-8"))["cells"][0]
    assert (cell["outputs"], cell["execution_count"]) == ([], None)
    assert (cell["id"], cell["metadata"]["tags"]) == ("00-a", ["exact"])


def test_the_readers_file_is_never_overwritten(course):
    copy = make_all(course)[0]
    copy.write_text("mine", encoding="utf-8")
    make_all(course)
    assert copy.read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("name", ["00", "00_ranks", "00_ranks.ipynb"])
def test_reset_keeps_each_old_copy_and_forgets_the_lessons_answers(course, name):
    copy = make_all(course)[0]
    notes.write("predictions", "00.1", "3", copy.parent)
    for text in ("first", "second"):
        copy.write_text(text, encoding="utf-8")
        fresh, kept = reset(name, course)
        assert fresh == copy and kept.read_text(encoding="utf-8") == text
        assert json.loads(copy.read_text(encoding="utf-8"))["cells"]
    assert sorted(path.name for path in copy.parent.glob("00*")) == [
        "00_ranks.ipynb", "00_ranks_kept_1.ipynb", "00_ranks_kept_2.ipynb"]
    assert notes.read("predictions", copy.parent) == {}


def test_reset_without_a_copy_makes_one(course):
    copy, kept = reset("01", course)
    assert copy.exists() and kept is None


def test_an_unknown_lesson_lists_those_there_are(course, tmp_path_factory):
    with pytest.raises(ConfigError, match="there are 00_ranks, 01_more"):
        reset("07", course)
    with pytest.raises(ConfigError, match="checkout"):
        make_all(tmp_path_factory.mktemp("empty"))
