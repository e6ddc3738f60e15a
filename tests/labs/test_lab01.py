"""Lab 01: wrong answers are rejected for the right reason, right ones pass however they are written."""
import pytest
from lab_answers import answers, name_of, verdict_on

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("key, title, source", answers("lab01_wrong.py"))
def test_a_wrong_answer_is_told_its_mistake(key, title, source):
    verdict = verdict_on(key, source)
    assert (verdict.state, verdict.mistake) == ("failed", name_of(title)), verdict.text


@pytest.mark.parametrize("key, title, source", answers("lab01_right.py"))
def test_a_right_answer_passes(key, title, source):
    verdict = verdict_on(key, source)
    assert verdict.state == "passed", verdict.text
