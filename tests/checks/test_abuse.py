"""What a learner's code does to harm costs that exercise only: every way out ends as a verdict, with the reason."""
import psutil
import pytest
import toy_lab

from dtlab.checks import evidence
from dtlab.checks.evidence import Answer
from dtlab.checks.exercise import find, judge
from dtlab.checks.notebook import definitions
from dtlab.ranks.nursery import nursery

pytestmark = pytest.mark.ranks


def verdict_on(key, text, shown_chars=0):
    exercise = find(key)
    cells = (("given", definitions(toy_lab.GIVEN)), (f"exercise {key}", text))
    return judge(exercise, Answer({}, cells, dict(exercise.references)), shown_chars=shown_chars)


def double(*body):
    return "\n    ".join(["def double(x):", *body])


ENDS = {  # what the function does -> what the verdict says
    "return x * x": "you square",
    "while True: pass": "not done after ",
    "import time; time.sleep(10**6)": "not done after ",
    "import os; os._exit(0)": "died: its process ended with exit code 0",
    "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)": "segmentation fault",
    "raise SystemExit(0)": "SystemExit: 0",
    "raise KeyboardInterrupt": "KeyboardInterrupt",
    "return double(x)": "RecursionError",
    "return torch.ones(10**12)": "MemoryError: more than",
    "return [torch.ones(10**8) for _ in range(99)]": "MemoryError: more than",
    "return [0] * 10**12": "MemoryError: more than",
    "raise ValueError('x' * 10**7)": "ValueError: xxx",
    "return torch.zeros(1).expand(10**9)": "larger than 64 MB",
    "return (lambda: 3)": "a value of type function should be a tensor",
    "return [x]": "should be a tensor of shape",
    "return None": "None should be a tensor",
    "return 2 * x.float()": "torch.float32 should be",
    "x = [x]; x.append(x); return x": "RecursionError",
    "return total(x)": "run the cells above",
    "dist.destroy_process_group(); return 2 * x": "process group",
}


@pytest.mark.parametrize("body", ENDS)
def test_every_end_is_a_verdict_with_its_reason(course, monkeypatch, body):
    monkeypatch.setattr(evidence, "LIMIT_S", 3.0)
    verdict = verdict_on("lab90.1", double(body))
    assert verdict.state == "failed" and ENDS[body] in verdict.text, verdict
    assert len(verdict.text) < 5000


def test_a_right_answer_passes_also_after_all_that(course):
    for key, text in toy_lab.RIGHT.items():
        assert verdict_on(key, text).state == "passed"


@pytest.mark.parametrize("key", toy_lab.STUBS)
def test_a_stub_is_not_yet(course, key):
    assert verdict_on(key, toy_lab.STUBS[key]).state == "not yet"


def test_half_of_an_exercise_is_not_yet_too(course):
    text = "def first(x):\n    return x + 1\ndef second(x):\n    raise NotImplementedError('Exercise 90.3: x + 2')"
    verdict = verdict_on("lab90.3", text)
    assert (verdict.state, verdict.text) == ("not yet", "Exercise 90.3: x + 2")
    assert verdict_on("lab90.3", "def first(x):\n    return x + 1").state == "not yet"


def test_what_torch_has_not_implemented_is_a_failure(course):
    assert verdict_on("lab90.1", double("raise NotImplementedError('Could not run aten::x')")).state == "failed"


def test_an_endless_loop_in_the_cell_itself_ends(course, monkeypatch):
    monkeypatch.setattr(evidence, "LIMIT_S", 2.0)
    assert "not done after " in verdict_on("lab90.1", "while True: pass").text


def test_a_hang_is_a_diagnosis_and_names_the_known_mistake(course):
    verdict = verdict_on("lab90.2", "def total(x):\n    if dist.get_rank() == 0: dist.all_reduce(x)\n    return x")
    assert verdict.mistake == "only rank 0 calls" and "rank 1 never made that call" in verdict.text
    assert "--timeout" not in verdict.text


def test_magics_of_the_notebook_are_left_out(course):
    assert verdict_on("lab90.1", "%%time\n!ls\n" + double("return 2 * x")).state == "passed"


def test_an_error_shows_the_learners_line_and_none_of_ours(course):
    text = verdict_on("lab90.1", double("y = 1", "return y.nothing")).text
    assert "exercise lab90.1, line 3, in double\n    return y.nothing" in text and "evidence.py" not in text


@pytest.mark.parametrize("body, which", [
    ("dist.all_gather([x.clone(), x.clone()][:dist.get_world_size()], x); return total0(x)", "all_gather was called"),
    ("dist.all_reduce(x); dist.all_reduce(torch.ones(1)); return 2 * x", "calls were made"),
])  # fmt: skip
def test_right_values_by_forbidden_or_costly_calls_fail(course, body, which):
    text = f"def total0(x):\n    x = 2 * x\n    dist.all_reduce(x)\n    return x\ndef total(x):\n    {body}"
    verdict = verdict_on("lab90.2", text)
    assert verdict.state == "failed" and which in verdict.text


def test_a_flood_is_cut_and_counted(course, capsys):
    for way in ("print('x' * 100)", "os.write(1, b'x' * 99 + b'\\n')", "display('x' * 100)"):
        body = ["import os", "for _ in range(1000):", f"    {way}", "return 2 * x"]
        given = double(*body) if "display" not in way else "from dtlab.ranks import worker\ndisplay = "\
            "lambda text: worker._worker.display(text)\n" + double(*body)
        assert verdict_on("lab90.1", given, shown_chars=500).state == "passed", way
        out = "".join(capsys.readouterr())
        assert "more characters are not shown" in out and out.count("x" * 90) < 40, way
        assert verdict_on("lab90.1", given).state == "passed" and "".join(capsys.readouterr()) == ""


def test_processes_that_were_left_behind_are_ended(course):
    body = ["import subprocess, sys", "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99.25)'], "
            "start_new_session=True)", "return 2 * x"]  # fmt: skip
    assert verdict_on("lab90.1", double(*body)).state == "passed"
    left = [p for p in psutil.process_iter(["cmdline"]) if any("sleep(99.25)" in w for w in p.info["cmdline"] or [])]
    assert [p for p in left if p.status() != psutil.STATUS_ZOMBIE] == []


def test_a_thread_that_goes_on_is_ended_with_its_rank(course):
    text = "import threading\n" + double("threading.Thread(target=lambda: iter(int, 1) and [0 for _ in iter(int, 1)])"
                                          ".start()", "return 2 * x")  # fmt: skip
    assert verdict_on("lab90.1", text).state == "passed"


def test_a_result_that_runs_code_or_equals_everything_does_neither_here(course, tmp_path):
    mark = tmp_path / "ran"
    sly = f"    def __reduce__(self): return exec, (\"open({str(mark)!r}, 'w')\",)"
    text = double("class Sly:", "    def __eq__(self, other): return True", sly, "return Sly()")
    assert verdict_on("lab90.1", text).state == "failed" and not mark.exists()


def test_patching_dtlab_on_a_rank_changes_no_verdict(course):
    body = ["from dtlab.checks import exercise", "exercise.judge_case = lambda *_: None", "return x"]
    assert verdict_on("lab90.1", double(*body)).state == "failed"


def test_ranks_of_the_notebook_stay_the_current_ones(course):
    import dtlab

    with dtlab.launch(1) as ranks:
        ranks.push(mine=3)
        assert verdict_on("lab90.1", double("import os", "os._exit(1)")).state == "failed"
        assert dtlab.current_ranks() is ranks and ranks.pull("mine") == [3]


def test_no_rank_of_a_check_is_left(course, monkeypatch):
    monkeypatch.setattr(evidence, "LIMIT_S", 2.0)
    verdict_on("lab90.1", double("while True: pass"))
    verdict_on("lab90.1", double("import os", "os._exit(1)"))
    assert psutil.Process(nursery().process.pid).children() == []


def test_a_sum_that_went_another_way_than_by_messages_fails():
    exercise = find("lab01.4")
    by_store = """
import pickle
from torch.distributed.distributed_c10d import _get_default_store
calls = iter(range(99))
def two_node_all_reduce(tensor):
    call, store = next(calls), _get_default_store()
    store.set(f"{call}, {rank}", pickle.dumps(tensor.clone()))
    tensor.copy_(sum(pickle.loads(store.get(f"{call}, {r}")) for r in range(world_size)))
"""
    verdict = judge(exercise, Answer(source=[("answer", by_store)], references=exercise.references))
    assert verdict.state == "failed" and "went another way" in verdict.text
