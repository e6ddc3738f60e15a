"""Lab 90, a toy: small exercises for the tests of checks."""
import torch

from dtlab.checks import Case, Exercise, Mistake
from dtlab.checks import exercise as exercises


def cases(rng):
    return [Case(2, "length 3", {"base": rng.randint(1, 10**6), "length": 3}),
            Case(1, "length 1", {"base": rng.randint(1, 10**6), "length": 1})]


def mine(case, rank):
    return torch.arange(case["length"], dtype=torch.float64) + case["base"] + 0.5 * rank


def run_double(case, double):
    import torch.distributed as dist

    return double(mine(case, dist.get_rank()))


def doubled(case):
    return [2 * mine(case, rank) for rank in range(case.world_size)]


def run_total(case, total):
    import torch.distributed as dist

    return total(mine(case, dist.get_rank()))


def totals(case):
    whole = sum(mine(case, rank) for rank in range(case.world_size))
    return [2 * whole] * case.world_size


def ref_double(x):
    return x * 2


def one_call(case, recording):
    calls = recording.communication()["calls"].sum()
    return None if calls <= case.world_size else f"{calls} calls were made, and {case.world_size} are enough"


EXERCISES = (
    Exercise(
        key="lab90.1", title="twice a tensor", names=("double",), cases=cases, program=run_double, spec=doubled,
        mistakes=(Mistake("squares", "you square: {}", lambda e, right: "x * x" if bool(
            (e.results[0] > right[0] * 100).all()) else False),),
        hint="add it to itself", minutes=5,
    ),
    Exercise(
        key="lab90.2", title="twice the sum over ranks", names=("total",), cases=cases, program=run_total, spec=totals,
        budget=(one_call,), forbidden=("all_gather",), replicated=True, hint="one all_reduce", minutes=10,
        mistakes=(Mistake("only rank 0 calls", "rank 0 is alone in its call", lambda e, right: e.failed == "hang"),),
        references={"double": ref_double},
    ),
    Exercise(
        key="lab90.3", title="two names", names=("first", "second"), cases=cases,
        program=lambda case, first, second: [first(1), second(1)], spec=lambda case: [[2, 3]] * case.world_size,
    ),
)  # fmt: skip

GIVEN = "import torch\nimport torch.distributed as dist\nimport toy_lab\n\n1 / 0"
STUBS = {
    "lab90.1": '# Exercise lab90.1\ndef double(x):\n    raise NotImplementedError("Exercise 90.1: return twice x")',
    "lab90.2": '# Exercise lab90.2\ndef total(x):\n    raise NotImplementedError("Exercise 90.2: sum twice x")',
    "lab90.3": '# Exercise lab90.3\ndef first(x):\n    raise NotImplementedError("Exercise 90.3: x + 1")\n'
               'def second(x):\n    raise NotImplementedError("Exercise 90.3: x + 2")',
}  # fmt: skip
RIGHT = {
    "lab90.1": "# Exercise lab90.1\ndef double(x):\n    return x + x",
    "lab90.2": "# Exercise lab90.2\ndef total(x):\n    x = double(x)\n    dist.all_reduce(x)\n    return x",
    "lab90.3": "# Exercise lab90.3\ndef first(x):\n    return x + 1\ndef second(x):\n    return x + 2",
}


def code(source, *tags, **more):
    return {"cell_type": "code", "metadata": {"tags": list(tags)} if tags else {}, "source": source, "outputs": [],
            "execution_count": None, **more}


def notebook(*cells, minor=5):
    cells = [cell if isinstance(cell, dict) else code(cell) for cell in cells]
    for number, cell in enumerate(cells):
        if minor >= 5:
            cell.setdefault("id", f"cell-{number}")
    return {"cells": cells, "metadata": {"kernelspec": {"name": "conda-env-x-py", "display_name": "X"}},
            "nbformat": 4, "nbformat_minor": minor}


exercises.LABS["lab90"] = __name__  # also in a judge, and on a rank
