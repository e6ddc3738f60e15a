"""Questions: what a reader sees headless and live, and what is kept."""
import pytest

from dtlab import notes, shell
from dtlab.errors import ConfigError
from dtlab.widgets import predict as module

CHOICES = {"10": "Each rank holds the sum.", "3": "That is what rank 2 held before."}


@pytest.fixture(autouse=True)
def clean(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "_questions", {})


@pytest.fixture
def live(monkeypatch):
    """As in a notebook with a screen; shown bundles are collected."""
    import IPython.display

    shown = []
    monkeypatch.setattr(shell, "in_notebook", lambda: True)
    monkeypatch.setattr(IPython.display, "display", lambda bundle, raw=False: shown.append(bundle))
    return shown


def test_headless_prints_the_same_text_always(capsys):
    for _ in range(2):
        module.predict("00.1", "What does rank 2 hold?", CHOICES)
        module.reveal("00.1", 10)
    text = capsys.readouterr().out
    half = len(text) // 2
    assert text[:half] == text[half:]
    assert "  ( ) 3\n" in text and "Question 00.1, measured: 10\n" in text
    assert "(x) 10: Each rank holds the sum.\n" in text and "( ) 3: That is what rank 2 held before.\n" in text


def test_a_choice_is_answered_and_survives_a_restart(live, capsys, monkeypatch):
    module.predict("00.1", "What does rank 2 hold?", CHOICES)
    module.reveal("00.1", 10)
    assert "no answer yet" in capsys.readouterr().out
    module._questions["00.1"].buttons.value = "3"
    monkeypatch.setattr(module, "_questions", {})  # the kernel restarts
    module.predict("00.1", "What does rank 2 hold?", CHOICES)
    module.reveal("00.1", 10)
    assert capsys.readouterr().out == "You said: 3. Measured: 10.\nThat is what rank 2 held before.\n"
    assert module._questions["00.1"].buttons.disabled  # no second guess after the answer


def test_the_right_choice_is_called_right(live, capsys):
    module.predict("00.2", "Faster?", {"slower": "Two cores.", "faster": "Not here."})
    module._questions["00.2"].buttons.value = "slower"
    module.reveal("00.2", "0.3 of the speed", right="slower")
    assert "You said: slower. Measured: 0.3 of the speed, and that is right.\n" in capsys.readouterr().out


def test_the_shown_bundle_has_the_text_for_readers_without_widgets(live):
    module.predict("00.1", "What does rank 2 hold?", CHOICES)
    assert live[0]["text/plain"].startswith("Question 00.1: What does")
    assert "application/vnd.jupyter.widget-view+json" in live[0]


def test_forgetting_a_lesson_forgets_its_answers_only(live, tmp_path):
    for key in ("00.1", "01.1"):
        module.predict(key, "?", CHOICES)
        module._questions[key].buttons.value = "3"
    notes.forget("00")
    assert notes.read("predictions") == {"01.1": "3"}


def test_headless_writes_no_file(tmp_path):
    module.predict("00.1", "?", CHOICES)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call, words", [
    (lambda: module.reveal("00.9", 1), "no question '00.9' was asked in this kernel"),
    (lambda: module.predict("00.1", "?", {"only": ""}), "at least 2"),
    (lambda: (module.predict("00.1", "?", CHOICES), module.reveal("00.1", 1, right="7")), "is no choice"),
])
def test_mistakes_name_the_cure(call, words):
    with pytest.raises(ConfigError, match=words):
        call()
