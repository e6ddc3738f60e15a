"""Which variables a recording looks at: those that the code reads, not whatever has the name of an attribute."""
import functools

import dtlab
from dtlab.record.names import global_names


def test_attributes_comments_and_text_are_no_names():
    assert global_names("model.weight.sum()  # big\n'text'") == {"model"}
    assert global_names("def f():\n    return inner(x)\nf()") == {"inner", "x", "f"}
    assert global_names("if rank=") == set()


def test_functions_partials_and_what_stands_inside():
    def outer():
        return lambda: dtlab.launch

    assert global_names(outer) == {"dtlab"} == global_names(functools.partial(outer))
    assert global_names(len) == set()


def test_a_recorded_cell_counts_only_what_it_reads():
    with dtlab.launch(1) as ranks:
        ranks.run_cell("model, weight = torch.nn.Linear(2, 2), torch.ones(10**6)", "cell")
        recording = ranks.run_cell("model.weight.sum();", "cell", record=True)
    assert recording.memory()["peak"].max() < 4_000_000
