"""The tour: every technique equals one process, and one that is broken on purpose makes the exit code 1."""
import pytest
import torch
import torch.distributed as dist

from dtlab.cli import tour
from dtlab.errors import ConfigError
from dtlab.models import GPTConfig

SMALL = tour.Job(GPTConfig(seq_length=16, hidden_size=24, num_layers=1, num_heads=12), num_steps=3, batch_size=5)


@pytest.fixture(scope="module")
def reference():
    return tour.serial(SMALL)


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_technique_equals_one_process(num_ranks, capsys):
    assert tour.main(["--ranks", str(num_ranks)], job=SMALL) == 0
    output = capsys.readouterr().out
    assert output.count(" yes ") == len(tour.TECHNIQUES) and "NO" not in output and "Time is not the gain" in output


@pytest.mark.ranks
def test_a_technique_that_cannot_run_on_so_many_ranks_is_left_out_with_the_reason(capsys):
    job = tour.Job(GPTConfig(seq_length=16, hidden_size=24, num_layers=1, num_heads=3), num_steps=1, batch_size=5)
    tensor_parallel = next(its for its in tour.TECHNIQUES if its.name == "tensor parallel")
    assert tour.main(["--ranks", "2"], techniques=[tensor_parallel], job=job) == 0
    assert "left out: num_heads (3) does not divide by tp_size (2)" in capsys.readouterr().out


def without_all_reduce(job):
    """Data parallel whose gradients are never added: the loss still falls."""
    real, dist.all_reduce = dist.all_reduce, lambda tensor: real(tensor) if tensor.ndim == 0 else None
    try:
        return tour.data_parallel(job)
    finally:
        dist.all_reduce = real


def wrong_on_the_last_rank(job):
    """One parameter of one rank is off by one part in a million."""
    trained = tour.data_parallel(job)
    if dist.get_rank() == dist.get_world_size() - 1:
        trained.params["final_layernorm.weight"] *= 1 + 1e-6
    return trained


def raising(job):
    """One rank raises."""
    if dist.get_rank() == 1:
        raise ValueError("broken on purpose")
    return tour.data_parallel(job)


@pytest.mark.ranks
@pytest.mark.parametrize("program, message", [
    (without_all_reduce, "rank 0: loss of step 1 is"),
    (wrong_on_the_last_rank, r"rank 1: parameter final_layernorm.weight at [0] is"),
    (raising, "broken on purpose"),
])
def test_a_broken_technique_makes_the_exit_code_1(program, message, capsys):
    techniques = [tour.Technique("broken", program), tour.TECHNIQUES[0]]
    assert tour.main(["--ranks", "2"], techniques=techniques, job=SMALL) == 1
    output = capsys.readouterr().out
    assert message in output and "1 of 2 techniques did not equal one process" in output
    assert " yes " in output  # the one after it still ran


def test_serial_equals_itself(reference):
    assert tour.first_difference(tour.serial(SMALL), reference) is None


def test_a_loss_curve_alone_is_not_proof(reference):
    grads = {name: 4 * grad for name, grad in reference.grads.items()}
    words = tour.first_difference(reference._replace(grads=grads), reference)
    assert words.startswith("gradient of token_embedding.weight at [") and words.endswith("(size x 4)")


@pytest.mark.parametrize("name, tensor, message", [
    ("final_layernorm.weight", None, "is missing, serial has (24,)"),
    ("final_layernorm.weight", torch.zeros(12), "is (12,), serial has (24,)"),
    ("extra", torch.zeros(1), "parameter extra is not on both sides"),
    ("final_layernorm.weight", torch.full((24,), float("nan"), dtype=torch.float64), "is nan"),
])
def test_missing_misshapen_and_undefined_tensors_are_differences(reference, name, tensor, message):
    assert message in tour.first_difference(reference._replace(params={**reference.params, name: tensor}), reference)


def test_no_ranks_are_refused():
    with pytest.raises(ConfigError, match=r"--ranks \(0\) must be at least 1"):
        tour.main(["--ranks", "0"])


@pytest.mark.ranks
def test_the_recorded_cost_of_a_step():
    import dtlab

    params = 8 * sum(p.numel() for p in SMALL.model().parameters())
    with dtlab.launch(2) as ranks:
        alone = tour.recorded_cost(ranks, tour.serial, SMALL, on=[0])
        sent, peak = tour.recorded_cost(ranks, tour.data_parallel, SMALL)
    assert alone[0] == 0 and alone[1] > 4 * params  # parameters, gradients, two moments
    assert sent == params + 8  # all gradients and the loss, 2 (n - 1) / n = 1 times on two ranks
    assert 4 * params < peak < alone[1] + 1000
