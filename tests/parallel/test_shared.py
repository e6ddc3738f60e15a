"""Shards of flat tensors, and norms over them."""
import functools

import pytest
import torch
import torch.distributed as dist
from live_ranks import pool

from dtlab.errors import ConfigError
from dtlab.parallel.shared import FlatShards, ShardedState, clip_shards_, total_norm

close = functools.partial(torch.testing.assert_close, rtol=1e-14, atol=0)


NAMED = [("a", torch.arange(5.0)), ("empty", torch.ones(0)), ("b", 10 + torch.arange(3.0).view(3, 1))]


def layout(numbers):
    """On a rank: of the named tensors with these numbers: everything that it says."""
    named = [NAMED[i] for i in numbers]
    shards = FlatShards(named)
    flat = shards.flatten([t for _, t in named])
    sizes = shards.numel, shards.padded, shards.shard_numel
    shards.views(flat)[0].zero_()  # the same memory
    return sizes, flat, shards.shard_of(flat), [view.shape for view in shards.views(flat)]


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks, numbers, sizes, my_shards", [
    (1, [0, 1, 2], (8, 8, 8), [[0, 0, 0, 0, 0, 10, 11, 12]]),
    (3, [0, 1, 2], (8, 9, 3), [[0, 0, 0], [0, 0, 10], [11, 12, 0]]),
    (4, [2], (3, 4, 1), [[0], [0], [0], [0]]),
    (4, [0], (5, 8, 2), [[0, 0], [0, 0], [0, 0], [0, 0]]),
])  # fmt: skip
def test_tensors_lie_end_to_end_with_zeros_after_them(num_ranks, numbers, sizes, my_shards):
    for rank, (its_sizes, flat, shard, shapes) in enumerate(pool(num_ranks).run(layout, numbers)):
        assert its_sizes == sizes and shard.tolist() == my_shards[rank]
        assert torch.equal(flat, torch.tensor(sum(my_shards, []), dtype=torch.float32))
        assert shapes == [NAMED[i][1].shape for i in numbers]


def whose_elements():
    shards = FlatShards(NAMED)
    return [shards.name_of(element) for element in (0, 4, 5, 7)]


@pytest.mark.ranks
def test_an_element_belongs_to_the_tensor_in_which_it_lies():
    assert pool(2).run(whose_elements)[0] == ["a", "a", "b", "b"]


def norm_of(norm_type, dtype=torch.float64):
    """On a rank of two: 3 and -12 on one and 4 on the other; and an empty shard."""
    mine = [[3.0, -12.0], [4.0]][dist.get_rank()]
    return total_norm([torch.tensor(mine, dtype=dtype), torch.zeros(0, dtype=dtype)], norm_type=norm_type)


@pytest.mark.ranks
@pytest.mark.parametrize("norm_type, norm", [(2.0, 13.0), (1, 19.0), (float("inf"), 12.0)])
def test_a_norm_over_shards_counts_every_element_once(norm_type, norm):
    for mine in pool(2).run(norm_of, norm_type):
        close(mine, torch.tensor(norm, dtype=torch.float64))


def norm_alone(norm_type):
    """On a rank of two: broken: each in a group of its own."""
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    return total_norm([torch.tensor([3.0 + dist.get_rank()])], norm_type=norm_type, group=alone).item()


def norm_with_nan(norm_type, bad):
    """On a rank of three: one of them has a NaN."""
    shard = torch.tensor([1.0 + dist.get_rank(), float("nan") if dist.get_rank() == bad else -2.0])
    return total_norm([shard], norm_type=norm_type), clip_shards_([shard], 0.1, norm_type=norm_type), shard[0]


@pytest.mark.ranks
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize("bad", range(3))
def test_a_nan_on_any_rank_reaches_all_and_scales_nothing(norm_type, bad):
    for rank, (norm, same, first) in enumerate(pool(3).run(norm_with_nan, norm_type, bad)):
        assert norm.isnan() and same.isnan() and first == 1 + rank


def complex_norm(norm_type):
    """On a rank of two: 3 + 4i and 12 on both."""
    shards = [torch.tensor([3 + 4j], dtype=torch.complex128), torch.tensor([12.0])]
    return total_norm(shards, norm_type=norm_type)


@pytest.mark.ranks
@pytest.mark.parametrize("norm_type, norm", [(2.0, 2**0.5 * 13), (1.0, 34.0), (float("inf"), 12.0)])
def test_a_complex_number_counts_by_its_absolute_value(norm_type, norm):
    for mine in pool(2).run(complex_norm, norm_type):
        close(mine, torch.tensor(norm, dtype=torch.float64))


@pytest.mark.ranks
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_broken_with_norms_of_their_own_ranks_clip_by_different_factors(norm_type):
    assert len(set(pool(2).run(norm_alone, norm_type))) == 2


def sixteen_bits():
    shards = [torch.ones(1000, dtype=torch.bfloat16)]
    return total_norm(shards, norm_type=1).item(), clip_shards_(shards, 1.0).dtype, shards[0].dtype


@pytest.mark.ranks
def test_a_norm_of_16_bits_is_summed_in_32():
    assert pool(2).run(sixteen_bits) == [(2000.0, torch.float32, torch.bfloat16)] * 2


def clipped(max_norm):
    shards = [torch.tensor([3.0 + dist.get_rank()])]
    return clip_shards_(shards, max_norm), shards[0]


@pytest.mark.ranks
@pytest.mark.parametrize("max_norm, factor", [(2.5, 0.5), (5.1, 1.0), (float("inf"), 1.0)])
def test_all_ranks_clip_by_the_same_factor(max_norm, factor):
    for rank, (norm, mine) in enumerate(pool(2).run(clipped, max_norm)):
        assert norm == 5
        torch.testing.assert_close(mine, factor * torch.tensor([3.0 + rank]), rtol=1e-6, atol=0)


def state_of(states):
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([parameter])
    optimizer.state[parameter] = states
    return ShardedState(lambda state: state.add_states("0", optimizer, parameter, FlatShards(NAMED)))


def refused():
    texts = []
    for states in ({"step": 3}, {"rows": torch.zeros(2)}):
        try:
            state_of(states)
        except ConfigError as error:
            texts.append(str(error))
    for norm_type in (0, -1, float("nan"), "2"):
        try:
            total_norm([torch.ones(1)], norm_type=norm_type)
        except ConfigError as error:
            texts.append(str(error))
    return texts


@pytest.mark.ranks
def test_states_that_no_checkpoint_takes_and_powers_that_are_no_norm_are_refused():
    texts = pool(2).run(refused)[0]
    assert "state 'step' is int; a checkpoint takes tensors" in texts[0] and "'rows' is [2]" in texts[1]
    assert len(texts) == 6 and all("norm_type" in text for text in texts[2:])
