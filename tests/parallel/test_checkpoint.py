"""Checkpoints: other numbers of ranks, whole or not at all, and nothing that does not fit."""
import functools
import json
import os
import shutil
import signal

import pytest
import torch
import torch.distributed as dist
from live_ranks import pool
from torch import nn

from dtlab.errors import ConfigError, RankError
from dtlab.parallel.checkpoint import load_checkpoint, save_checkpoint
from dtlab.parallel.zero import ZeroOptimizer

close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)
NUM_ROWS = 12


class Net(nn.Module):
    """Odd sizes (one bucket has 1 element, so that most ranks have none of it), a buffer and a frozen parameter."""

    def __init__(self, seed, width=5):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(3, width).double(), nn.Linear(width, 1).double()
        self.shift = nn.Parameter(torch.randn(3, dtype=torch.float64), requires_grad=False)
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))

    def forward(self, x):
        self.mean.mul_(0.9).add_(0.1)
        return self.second(torch.tanh(self.first(x + self.shift))) + self.mean.sum()


def build(seed=0, optimizer=torch.optim.NAdam, width=5, dtype=torch.float64, **options):
    model = Net(seed, width).to(dtype)
    return model, ZeroOptimizer(model, optimizer, **{"bucket_bytes": 60, "lr": 0.01, **options})


def train(model, optimizer, steps, start=0):
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(start, start + steps):
        rows = torch.randn(NUM_ROWS, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        x = rows.to(model.mean.dtype)[rank * NUM_ROWS // size : (rank + 1) * NUM_ROWS // size]
        model(x).square().mean().backward()
        optimizer.step()


def first_part(path, steps=3, **options):
    """On a rank: train and save."""
    model, optimizer = build(seed=0, **options)
    train(model, optimizer, steps)
    save_checkpoint(path, optimizer.sharded_state())


def second_part(path, source=None, steps=3, start=3, **options):
    """On a rank: another seed, load, train on and save; the model."""
    model, optimizer = build(seed=1, **options)
    load_checkpoint(source or path, optimizer.sharded_state())
    train(model, optimizer, steps, start)
    save_checkpoint(path, optimizer.sharded_state())
    return {name: value.clone() for name, value in model.state_dict().items()}


def in_one_go(steps, **options):
    model, optimizer = build(seed=0, **options)
    train(model, optimizer, steps)
    return dict(model.state_dict())


@pytest.mark.ranks
@pytest.mark.parametrize("zero_stage", [1, 2])
def test_training_goes_on_identically_on_other_numbers_of_ranks_and_back(tmp_path, zero_stage):
    path = str(tmp_path / "saved")
    right = pool(1).run(in_one_go, 15, zero_stage=zero_stage)[0]
    pool(4).run(first_part, path, zero_stage=zero_stage)
    for start, num_ranks in [(3, 3), (6, 2), (9, 1), (12, 4)]:
        results = pool(num_ranks).run(second_part, path, start=start, zero_stage=zero_stage)
    for params in results:
        close(params, right)
    assert sorted(os.listdir(path)) == ["checkpoint.json", "dtlab_state_5"]


@pytest.mark.ranks
def test_masters_are_saved_not_made_again_from_16_bits(tmp_path):
    path, options = str(tmp_path), {"dtype": torch.bfloat16, "optimizer": torch.optim.SGD, "lr": 1e-4}
    right = pool(2).run(in_one_go, 40, **options)[0]
    pool(2).run(first_part, path, 20, **options)
    params = pool(2).run(second_part, path, steps=20, start=20, **options)[0]
    assert all(torch.equal(params[name], right[name]) for name in right)


@pytest.mark.ranks
def test_an_optimizer_that_has_made_no_step_has_no_states_after_loading_either(tmp_path):
    path = str(tmp_path)
    right = pool(2).run(in_one_go, 3)[0]
    pool(2).run(first_part, path, 0)
    for params in pool(2).run(second_part, path, start=0):
        close(params, right)


def taken_before_training(path):
    """On a rank: a state from before the first step is saved and loaded; parameters trained after each."""
    model, optimizer = build(seed=0, dtype=torch.bfloat16)
    state = optimizer.sharded_state()
    train(model, optimizer, 3)
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})  # the masters follow
    save_checkpoint(path, state)
    runs = []
    for _ in range(2):
        train(model, optimizer, 2, 3)
        runs.append({name: value.clone() for name, value in model.state_dict().items()})
        load_checkpoint(path, state)
    return runs


@pytest.mark.ranks
def test_a_state_is_read_when_it_is_saved_not_when_it_was_taken(tmp_path):
    for first, second in pool(2).run(taken_before_training, str(tmp_path)):
        assert all(torch.equal(first[name], second[name]) for name in first)


def back_to_the_beginning(path):
    """On a rank: save before the first step, train, load, train."""
    model, optimizer = build(seed=0)
    save_checkpoint(path, optimizer.sharded_state())
    train(model, optimizer, 3)
    load_checkpoint(path, optimizer.sharded_state())
    train(model, optimizer, 3)
    return dict(model.state_dict())


@pytest.mark.ranks
def test_loading_the_beginning_forgets_the_states(tmp_path):
    right = pool(2).run(in_one_go, 3)[0]
    for params in pool(2).run(back_to_the_beginning, str(tmp_path)):
        close(params, right)


def killed_while_saving(path, killed, moment):
    """On a rank: the second save, in which one rank dies at a certain moment."""
    from dtlab.parallel import checkpoint

    model, optimizer = build(seed=0)
    train(model, optimizer, 5)
    die = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == killed:
        owner = {"_new_folder": checkpoint, "write_text": checkpoint.Path, "replace": os, "rmtree": shutil,
                 "save": None}[moment]  # fmt: skip
        if owner is None:
            from torch.distributed.checkpoint import FileSystemWriter

            FileSystemWriter.write_data = die
        else:
            setattr(owner, moment, die)
    save_checkpoint(path, optimizer.sharded_state())


def loaded(path):
    model, optimizer = build(seed=1)
    load_checkpoint(path, optimizer.sharded_state())
    return dict(model.state_dict())


@pytest.mark.ranks
@pytest.mark.parametrize("killed, moment", [(0, "_new_folder"), (1, "save"), (0, "write_text"), (0, "replace"),
                                            (0, "rmtree")])  # fmt: skip
def test_a_rank_killed_at_any_moment_leaves_the_old_checkpoint_whole_or_the_new_one(tmp_path, killed, moment):
    path = str(tmp_path)
    pool(3).run(first_part, path)
    with pytest.raises(RankError, match=f"rank {killed} of 3 died"):
        pool(3).run(killed_while_saving, path, killed, moment)
    steps = 5 if moment == "rmtree" else 3  # by then the new one counts
    right = pool(2).run(in_one_go, steps)[0]
    for params in pool(2).run(loaded, path):
        close(params, right)
    pool(2).run(first_part, path)  # and the next save works, and clears up
    assert len(os.listdir(path)) == 2


def refused(path, **options):
    """On a rank: what loading says, and whether anything has changed."""
    model, optimizer = build(seed=1, **options)
    state = optimizer.sharded_state()
    before = [t.clone() for t in model.state_dict().values()]
    text = ""
    try:
        load_checkpoint(path, state)
    except ConfigError as error:
        text = f"{type(error).__name__}: {error}"
    return text, all(torch.equal(old, new) for old, new in zip(before, model.state_dict().values()))


@pytest.mark.ranks
@pytest.mark.parametrize("options, words", [
    ({"bucket_bytes": 1000}, "saved is float64 6: second.bias [1], second.weight [1, 5]; here is float64 26: "
                             "second.bias [1], second.weight [1, 5], first.bias [5], first.weight [5, 3]"),
    ({"width": 4}, "here is float64 5: second.bias [1], second.weight [1, 4]"),
    ({"dtype": torch.float32}, "here is float32 11: second.bias [1], second.weight [1, 5], first.bias [5]"),
    ({"optimizer": torch.optim.SGD}, "'0.step': saved is float32 []; here is nothing"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_with_names_and_numbers_and_changes_nothing(tmp_path, options, words):
    pool(2).run(first_part, str(tmp_path))
    for text, is_unchanged in pool(2).run(refused, str(tmp_path), **options):
        assert "ConfigError: rank 0: the checkpoint in" in text and words in text and is_unchanged


@pytest.mark.ranks
def test_a_damaged_checkpoint_changes_nothing(tmp_path):
    path = str(tmp_path)
    pool(2).run(first_part, path)
    folder = json.loads((tmp_path / "checkpoint.json").read_text())["folder"]
    data = tmp_path / folder / "__1_0.distcp"
    data.write_bytes(data.read_bytes()[:200])
    for text, is_unchanged in pool(2).run(refused, path):
        assert "cannot be read from" in text and "rank 0: EOFError" in text and is_unchanged
    for text in ("{", "{}", "[]", '{"folder": 1, "layout": 2}'):
        (tmp_path / "checkpoint.json").write_text(text)
        assert all("checkpoint.json is damaged: " in text and same for text, same in pool(2).run(refused, path))


@pytest.mark.ranks
def test_no_checkpoint_and_no_folder_to_write_are_said_on_every_rank(tmp_path):
    assert all("there is no checkpoint in" in text for text, _ in pool(2).run(refused, str(tmp_path)))
    (tmp_path / "file").write_text("")
    with pytest.raises(RankError, match="ConfigError: rank 0: .*file"):
        pool(2).run(first_part, str(tmp_path / "file"), 0)


@pytest.mark.ranks
def test_what_stood_in_the_folder_before_stays(tmp_path):
    names = ["state_7", "state_old", "dtlab_state_x"]
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / "dtlab_state_3").write_text("a file")
    for _ in range(2):
        pool(2).run(first_part, str(tmp_path), 0)
    assert sorted(os.listdir(tmp_path)) == sorted([*names, "dtlab_state_3", "checkpoint.json", "dtlab_state_2"])


def misused(path):
    """On a rank: what is said of another path on each rank, and of what is no sharded state."""
    model, optimizer = build()
    state, texts = optimizer.sharded_state(), []
    for action in (save_checkpoint, load_checkpoint):
        for arguments in ((f"{path}/{dist.get_rank()}", state), (path, model.state_dict())):
            try:
                action(*arguments)
            except ConfigError as error:
                texts.append(str(error))
    return texts


@pytest.mark.ranks
def test_other_paths_and_other_states_are_refused_on_every_rank(tmp_path):
    for texts in pool(2).run(misused, str(tmp_path)):
        assert all("ranks have different paths" in text and "/0, /" in text for text in texts[::2])
        assert all("state is of type OrderedDict: give what sharded_state()" in text for text in texts[1::2])
        assert len(texts) == 4


def of_a_group(path):
    """On ranks 1 and 2 of three."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    model, optimizer = build(seed=0, group=group)
    model(torch.ones(2, 3, dtype=torch.float64)).mean().backward()
    optimizer.step()
    save_checkpoint(path, optimizer.sharded_state())
    other, new = build(seed=1, group=group)
    load_checkpoint(path, new.sharded_state())
    return dict(model.state_dict()), dict(other.state_dict())


@pytest.mark.ranks
def test_a_group_saves_and_loads_by_itself(tmp_path):
    for right, params in pool(3).run(of_a_group, str(tmp_path))[1:]:
        close(params, right)
