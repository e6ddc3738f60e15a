"""The learners' copy has no solution, and a copy that had one is not made."""
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dtlab.checks.release import leaks, release, secret_lines
from dtlab.errors import ConfigError

SOLUTION = '''"""Solution of lab 90."""
import torch


def double(x, group=None,
           another=None):
    """Twice a tensor, as everybody knows who reads this long line."""
    rank, size = dist.get_rank(), dist.get_world_size(group)
    everybody_adds_up(x, group)
    if len(x) == 0:
        return x
    total = torch.stack([x, x]).sum(dim=0)  # a comment that is long enough to be told
    both = torch.cat([x, x], dim=0).contiguous()
    return total
'''
SECRET = "total = torch.stack([x, x]).sum(dim=0)"


@pytest.fixture
def sources(tmp_path):
    """A small course with a solution, one line of which a lesson shows."""
    files = {"labs/lab90_x/solution.py": SOLUTION, "labs/lab90_x/lab.ipynb": "{}", "labs/INSTRUCTORS.md": SOLUTION,
             "tests/labs/test_x.py": SOLUTION, "tests/test_y.py": "y = 1", "dtlab/parallel/x.py": "z = 1",
             "notebooks/00_x.ipynb": '["both = torch.cat([x, x], dim=0).contiguous()\\n"]', "README.md": "course",
             "work/mine.py": SOLUTION, "grades.csv": "anna"}  # fmt: skip
    for name, text in files.items():
        (tmp_path / "course" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "course" / name).write_text(text)
    return tmp_path / "course"


def test_only_lines_that_tell_something_are_secret(sources):
    assert list(secret_lines(sources).values()) == [SECRET]


def test_the_copy_has_everything_but_what_is_kept_back(sources, tmp_path):
    target = tmp_path / "copy"
    lines, files = release(target, sources)
    there = sorted(path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file())
    assert there == ["README.md", "dtlab/parallel/x.py", "labs/lab90_x/lab.ipynb", "notebooks/00_x.ipynb",
                     "tests/test_y.py"] and (lines, files) == (1, 5)  # fmt: skip


@pytest.mark.parametrize("place, text", [
    ("tests/test_y.py", f"if 1:\n        {SECRET}"), ("dtlab/checks/lab90.py", "total=torch.stack([x,x]).sum( dim=0 )"),
    ("labs/lab90_x/lab.ipynb", f'{{"cells": [{{"source": ["x = 1\\n", "{SECRET}\\n"]}}]}}'),
    ("labs/lab90_x/lab.ipynb", f'{{"cells": [{{"source": "x = 1\\n{SECRET}\\nx"}}]}}'), ("README.md", f"`{SECRET}`"),
    ("labs/lab90_x/solution2.py", SOLUTION),
])  # fmt: skip
def test_a_line_of_a_solution_anywhere_stops_the_release(sources, tmp_path, place, text):
    (sources / place).parent.mkdir(parents=True, exist_ok=True)
    (sources / place).write_text(text)
    with pytest.raises(ConfigError) as error:
        release(tmp_path / "copy", sources)
    assert place in str(error.value) and SECRET in str(error.value) and not (tmp_path / "copy").exists()


def test_the_library_and_the_lessons_may_have_it(sources, tmp_path):
    for place in ("dtlab/parallel/x.py", "notebooks/00_x.ipynb"):
        (sources / place).write_text(SECRET)
        assert release(tmp_path / place.split("/")[0], sources)


def test_a_folder_with_something_in_it_is_refused(sources, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    for target in (tmp_path / "mine", tmp_path / "mine" / "thesis.txt"):
        with pytest.raises(ConfigError, match="not an empty folder"):
            release(target, sources)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "x"


def test_a_leak_is_seen_in_a_copy_made_by_hand(sources, tmp_path):
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "a.py").write_text(SOLUTION)
    assert leaks(secret_lines(sources), tmp_path / "copy") == [("a.py", SECRET)]


@pytest.mark.ranks
def test_this_course_has_no_leak_and_its_copy_works(tmp_path):
    lines, files = release(tmp_path / "copy", Path(__file__).resolve().parents[2])
    assert lines > 40 and files > 100
    assert not [*(tmp_path / "copy").glob("labs/*/solution.py"), *(tmp_path / "copy").glob("**/lab0*_wrong.py")]
    for path in (tmp_path / "copy").glob("*.md"):
        links = re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8"))
        assert [link for link in links if not (path.parent / link).exists()] == []
    program = ("from dtlab.cli import bootstrap, labs, working_copies\nfrom dtlab.examine import doctor\n"
               "working_copies.make_all()\nprint(labs.check(['lab02', '--exercise', '1']), bool(doctor().findings))")
    reply = subprocess.run([sys.executable, "-c", program], cwd=tmp_path / "copy", capture_output=True, text=True)
    assert "lab02.1   not yet" in reply.stdout and "1 True" in reply.stdout, reply.stdout + reply.stderr
    assert (tmp_path / "copy" / "work" / "labs" / "lab02_data_parallel" / "lab.result.json").exists()
