"""Functions, closures and classes of cells run on ranks; what a cell defines again is new there too."""
import functools

import pytest

from dtlab import ConfigError, RankError

pytestmark = pytest.mark.ranks


def test_functions_and_lambdas_use_the_names_of_the_rank(ranks, notebook):
    assert ranks.run(lambda: (rank, world_size, str(device))) == [(r, 3, "cpu") for r in range(3)]  # noqa: F821
    assert ranks.run(notebook("def f():\n    return rank * 10").f) == [0, 10, 20]


def test_an_edited_cell_is_new_on_the_ranks(ranks, notebook):
    notebook("def inner():\n    return 10\ndef step():\n    return rank * inner()")
    assert ranks.run(notebook("").step) == [0, 10, 20]
    notebook("def inner():\n    return 11")
    assert ranks.run(notebook("").step) == [0, 11, 22]


def test_arguments_and_keywords(ranks):
    assert ranks.run(lambda a, *more, b=0: (a, more, b), 1, 2, b=3) == [(1, (2,), 3)] * 3


def test_a_closure_travels(ranks, notebook):
    cell = notebook("def outer(k):\n    def f():\n        return k + rank\n    return f")
    assert ranks.run(cell.outer(5)) == [5, 6, 7]


def test_functions_call_one_another_and_themselves(ranks, notebook):
    cell = notebook("""
def even(n): return True if n == 0 else odd(n - 1)
def odd(n): return False if n == 0 else even(n - 1)
def factorial(n): return 1 if n < 2 else n * factorial(n - 1)
def both(): return even(rank), factorial(5)""")
    assert ranks.run(cell.both) == [(True, 120), (False, 120), (True, 120)]


def test_generators_decorators_partials_and_methods(ranks, notebook):
    cell = notebook("""
import functools
def twice(f):
    @functools.wraps(f)
    def g(*a): return 2 * f(*a)
    return g
@twice
def doubled(x): return x + rank
def gen(n): yield from range(n)
def consume(): return list(gen(rank + 1))
class Counter:
    def __init__(self): self.n = 0
    def add(self, k):
        self.n += k
        return self.n
    @classmethod
    def name(cls): return cls.__name__
    def __call__(self): return self.n + rank
counter = Counter()""")
    assert ranks.run(cell.doubled, 1) == [2, 4, 6]
    assert ranks.run(cell.consume) == [[0], [0, 1], [0, 1, 2]]
    assert ranks.run(functools.partial(cell.doubled, 10)) == [20, 22, 24]
    assert ranks.run(cell.counter.add, 3) == [3, 3, 3]
    assert cell.counter.n == 0  # each rank has its own copy
    assert ranks.run(cell.Counter.name) == ["Counter"] * 3
    assert ranks.run(cell.counter) == [0, 1, 2]


def test_classes_dataclasses_and_enums_come_back_as_the_notebooks_own(ranks, notebook):
    cell = notebook("""
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple
@dataclass
class Point:
    x: int
    y: int = 2
class Colour(Enum):
    RED = 1
class Pair(NamedTuple):
    a: int
    b: int
class Base:
    def hello(self): return "base"
class Child(Base):
    def hello(self): return super().hello() + " child"
def make(): return Point(rank), Colour.RED, Pair(rank, 1), Child()""")
    for r, (point, colour, pair, child) in enumerate(ranks.run(cell.make)):
        assert point == cell.Point(r) and type(point) is cell.Point
        assert colour is cell.Colour.RED and pair == cell.Pair(r, 1)
        assert child.hello() == "base child" and isinstance(child, cell.Base)


def test_an_edited_class_is_new_on_the_ranks(ranks, notebook):
    code = "class A:\n    def f(self): return {}\ndef use(): return A().f()"
    assert ranks.run(notebook(code.format(1)).use) == [1] * 3
    assert ranks.run(notebook(code.format(2)).use) == [2] * 3


def test_a_module_of_torch_made_in_a_cell(ranks, notebook):
    cell = notebook("""
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(2, 1)
    def forward(self, x): return self.lin(x)
net = Net()
def forward(x): return net(x).detach()""")
    x = notebook("x = torch.ones(1, 2)").x
    assert all((y == cell.net(x)).all() for y in ranks.run(cell.forward, x))
    returned = ranks.run(lambda net: net, cell.net)
    assert type(returned[0]) is cell.Net and (returned[1].lin.weight == cell.net.lin.weight).all()


def test_global_statements_stay_on_the_rank(ranks, notebook):
    cell = notebook("def first():\n    global kept\n    kept = rank + 1\ndef second():\n    return kept")
    ranks.run(cell.first)
    assert ranks.run(cell.second) == [1, 2, 3] and ranks.pull("kept") == [1, 2, 3]
    assert not hasattr(notebook(""), "kept")


def test_a_global_counter_counts_on_from_run_to_run(ranks, notebook):
    cell = notebook("def start():\n    global n\n    n = 0\ndef count():\n    global n\n    n += 1\n    return n")
    ranks.run(cell.start)
    assert [ranks.run(cell.count) for _ in range(3)] == [[1] * 3, [2] * 3, [3] * 3]


def test_a_variable_of_the_notebook_travels_by_value_and_is_not_changed(ranks, notebook):
    cell = notebook("data = [1]\ndef grow():\n    data.append(rank)\n    return data")
    assert ranks.run(cell.grow) == [[1, 0], [1, 1], [1, 2]] and cell.data == [1]


def test_a_name_on_both_sides_is_refused_until_it_is_pushed(ranks, notebook):
    cell = notebook("value = 1\ndef use():\n    return value")
    ranks.run_cell("value = 100 + rank", "cell [9]")
    with pytest.raises(RankError, match="value: .*both in the notebook and on the ranks"):
        ranks.run(cell.use)
    ranks.push(value=5)
    assert ranks.run(cell.use) == [5, 5, 5]


def test_the_notebooks_own_dist_or_rank_is_not_the_ranks(ranks, notebook):
    cell = notebook("rank = 77\nimport torch.distributed as dist\ndef use():\n    return rank, dist.get_rank()")
    assert ranks.run(cell.use) == [(r, r) for r in range(3)]


def test_modules_import_by_name(ranks, notebook, tmp_path, monkeypatch):
    (tmp_path / "readers_module.py").write_text("constant = 3\ndef f(x): return x + constant\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    cell = notebook("import math, readers_module\nfrom readers_module import f\n"
                    "def use(): return f(rank), readers_module.constant, math.floor(2.5)")  # fmt: skip
    assert ranks.run(cell.use) == [(3, 3, 2), (4, 3, 2), (5, 3, 2)]
    assert ranks.run(cell.f, 1) == [4] * 3


def test_an_attribute_named_like_a_config_of_torch_is_no_trouble(ranks, notebook):
    import torch._dynamo  # noqa: F401  (it loads torch.distributed.config, which is no plain module)

    code = "import torch, torch.distributed as dist\nclass Model: config = 3\n"
    cell = notebook(code + "def f(): return dist.get_rank() + Model.config + torch.ones(2).sum().item()")
    assert ranks.run(cell.f) == [5.0, 6.0, 7.0]


def test_a_chosen_rank_runs_alone(ranks):
    assert ranks.run(lambda: rank, ranks=[2]) == [2]  # noqa: F821
    assert ranks.run(lambda: rank, ranks=1) == [1]  # noqa: F821
    assert ranks.run(lambda: rank, ranks=[2, 0]) == [0, 2]  # noqa: F821


def test_a_collective_of_absent_ranks_is_refused_at_once(ranks):
    with pytest.raises(RankError, match=r"all_reduce needs rank 1, not in this cell \(it runs on ranks 0, 2\)"):
        ranks.run(lambda: dist.all_reduce(torch.ones(1)), ranks=[0, 2])  # noqa: F821
    assert ranks.run(lambda: rank) == [0, 1, 2]  # noqa: F821


def test_cells_share_variables_and_show_the_last_expression(ranks, capsys):
    ranks.run_cell("x = torch.tensor([rank])", "cell [1]")
    ranks.run_cell("x += 1\nx.item()", "cell [2]")
    assert capsys.readouterr().out == "rank 0: 1\nrank 1: 2\nrank 2: 3\n"
    assert ranks.run(lambda: x.item()) == [1, 2, 3]  # noqa: F821


def test_an_error_names_the_cell_and_its_line(ranks):
    with pytest.raises(RankError) as caught:
        ranks.run_cell("y = 1\n\nz = y / (rank - 1)", "cell [7]")
    assert "rank 1 of 3 failed: ZeroDivisionError: division by zero" in str(caught.value)
    assert "cell [7], line 3" in str(caught.value) and "z = y / (rank - 1)" in str(caught.value)


def test_a_syntax_error_names_the_line(ranks):
    with pytest.raises(RankError, match=r"(?s)SyntaxError.*cell \[3\], line 2"):
        ranks.run_cell("x = 1\nif:", "cell [3]")


@pytest.mark.parametrize("line", ["%timeit 1", "!ls"])
def test_magics_are_told_to_stay_in_the_notebook(ranks, line):
    with pytest.raises(RankError, match="work in the notebook, not on ranks"):
        ranks.run_cell(line, "cell [3]")


def test_what_cannot_travel_is_named_and_the_ranks_go_on(ranks, notebook):
    import threading

    lock = threading.Lock()
    with pytest.raises(ConfigError, match="cannot travel"):
        ranks.run(lambda: lock)
    cell = notebook("import threading\nguard = threading.Lock()\ndef use():\n    return guard")
    with pytest.raises(ConfigError, match=r"use\(\) uses 'guard' \(lock\) of the notebook"):
        ranks.run(cell.use)
    with pytest.raises(ConfigError, match="ranks live in the notebook"):
        ranks.run(lambda: ranks)
    with pytest.raises(ConfigError, match="cannot travel"):
        ranks.push(lock=lock)
    assert ranks.run(lambda: rank) == [0, 1, 2]  # noqa: F821


def test_a_result_that_cannot_travel_fails_clearly_and_the_ranks_go_on(ranks):
    def make():
        import threading

        return threading.Lock() if rank == 1 else 1  # noqa: F821

    with pytest.raises(RankError, match="rank 1 of 3 failed: ConfigError: lock cannot travel") as caught:
        ranks.run(make)
    assert caught.value.cause == "ConfigError"
    ranks.run_cell("import threading; lock = threading.Lock()", "cell [1]")
    with pytest.raises(RankError, match="cannot travel"):
        ranks.pull("lock")
    assert ranks.run(lambda: rank) == [0, 1, 2]  # noqa: F821


def test_a_result_that_cannot_be_read_here_fails_clearly(ranks, notebook):
    cell = notebook("""
def explode():
    raise OSError("only on the ranks")
class Odd:
    def __reduce__(self): return explode, ()
def make(): return Odd() if rank == 2 else rank""")
    with pytest.raises(RankError, match=r"rank 2 of 3 failed: ConfigError: .*only on the ranks"):
        ranks.run(cell.make)
    assert ranks.run(lambda: rank) == [0, 1, 2]  # noqa: F821


def test_an_argument_that_cannot_be_rebuilt_there_fails_clearly(ranks, notebook):
    cell = notebook("""
def explode():
    raise OSError("only there")
class Odd:
    def __reduce__(self): return explode, ()
odd = Odd()""")
    with pytest.raises(RankError, match="ranks 0-2 of 3 failed: OSError: only there"):
        ranks.run(lambda x: x, cell.odd)
    with pytest.raises(RankError, match="only there"):
        ranks.push(odd=cell.odd)
    assert ranks.run(lambda: rank) == [0, 1, 2]  # noqa: F821
