"""The mappings by hand, by gradcheck, and by calls and bytes; random streams inside and outside of a split region."""
import functools
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from live_ranks import pool
from torch.autograd import gradcheck, gradgradcheck

import dtlab
from dtlab.errors import ConfigError, RankError
from dtlab.models.init import full_parameter
from dtlab.parallel import (
    all_to_all_region,
    copy_to_tp_region,
    gather_from_sequence_region,
    gather_from_tp_region,
    mappings,
    recompute,
    reduce_from_tp_region,
    reduce_scatter_to_sequence_region,
    scatter_to_sequence_region,
    scatter_to_tp_region,
    split_region_rng,
)

SHAPE = (12, 24, 36)  # 1, 2, 3 and 4 divide all
close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-13)


# by hand: what each rank gets, forward and back, from what all ranks have

piece = lambda whole, dim, rank, size: whole.chunk(size, dim)[rank]
exchanged = lambda tensors, cut, join, rank: torch.cat([piece(t, cut, rank, len(tensors)) for t in tensors], join)
CASES = {  # name: (mapping, what it gives, what its gradient is); xs and gs of all ranks, r of how many
    "copy": (copy_to_tp_region, lambda xs, r: xs[r], lambda gs, r: sum(gs)),
    "reduce": (reduce_from_tp_region, lambda xs, r: sum(xs), lambda gs, r: gs[r]),
}
for _dim in (0, 1, 2, -1):
    _cut = lambda tensors, r, dim=_dim: piece(tensors[r], dim, r, len(tensors))
    _cut_sum = lambda tensors, r, dim=_dim: piece(sum(tensors), dim, r, len(tensors))
    _join = lambda tensors, r, dim=_dim: torch.cat(tensors, dim)
    for _name, _mapping, _ahead, _back in [
        ("scatter", scatter_to_tp_region, _cut, _join),
        ("gather", gather_from_tp_region, _join, _cut),
        ("scatter sequence", scatter_to_sequence_region, _cut, _join),
        ("gather sequence", gather_from_sequence_region, _join, _cut_sum),
        ("reduce_scatter", reduce_scatter_to_sequence_region, _cut_sum, _join),
    ]:
        CASES[f"{_name} {_dim}"] = functools.partial(_mapping, dim=_dim), _ahead, _back
for _cut, _join in ((0, 1), (1, 2), (2, -2), (-1, 0)):
    CASES[f"all_to_all {_cut} {_join}"] = (
        functools.partial(all_to_all_region, scatter_dim=_cut, gather_dim=_join),
        lambda xs, r, cut=_cut, join=_join: exchanged(xs, cut, join, r),
        lambda gs, r, cut=_cut, join=_join: exchanged(gs, join, cut, r),
    )  # fmt: skip


def data(name, rank, shape=SHAPE):
    return full_parameter(f"{name} {rank}", shape, 0, dtype=torch.float64)


def apply_all(device="cpu"):
    """On a rank: for each case what comes out, the gradient that is sent back, and the input's."""
    rank, found = dist.get_rank(), {}
    for name, (mapping, _, _) in CASES.items():
        x = data("x", rank).to(device).transpose(0, 1).contiguous().transpose(0, 1)  # strides are no plain ones
        before = x.clone()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            y = mapping(x.requires_grad_())
            grad = data("g", rank, y.shape[::-1]).to(device).permute(2, 1, 0)
            y.backward(grad)
        assert torch.equal(x, before) and x._version == 0
        plain = data("x", rank).to(device)
        assert torch.equal(mapping(plain), y) and torch.equal(plain, before)  # of plain strides too
        found[name] = y.detach(), grad, x.grad
    return found


def assert_by_hand(found):
    for name, (_, ahead, back) in CASES.items():
        xs, gs = [data("x", rank) for rank in range(len(found))], [mine[name][1].cpu() for mine in found]
        for rank, mine in enumerate(found):
            close(mine[name][0].cpu(), ahead(xs, rank))
            close(mine[name][2].cpu(), back(gs, rank))


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_every_mapping_gives_what_is_to_come_forward_and_back_and_leaves_its_input(num_ranks):
    assert_by_hand(pool(num_ranks).run(apply_all))


@pytest.mark.gpu
@pytest.mark.ranks
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_on_a_gpu():
    with dtlab.launch(2, device="cuda", share_gpu=torch.cuda.device_count() < 2) as ranks:
        assert_by_hand(ranks.run(apply_all, "cuda"))


def of_every_dtype():
    """On a rank: forward only, of dtypes that need not have a gradient."""
    rank, found = dist.get_rank(), []
    for dtype in ("complex128", "float16", "bfloat16", "float32", "int64", "int32", "uint8"):
        x = torch.arange(rank, rank + 16).view(4, 4).to(getattr(torch, dtype))
        found.append([mapping(x) for mapping in (
            copy_to_tp_region, reduce_from_tp_region, scatter_to_tp_region, gather_from_tp_region,
            gather_from_sequence_region, reduce_scatter_to_sequence_region,
            functools.partial(all_to_all_region, scatter_dim=0, gather_dim=1))])
    return found


@pytest.mark.ranks
def test_every_dtype_that_the_backend_knows_passes():
    for first, *others in pool(2).run(of_every_dtype):
        for other in others:
            assert [torch.equal(ours.to(first[0].dtype), theirs) for ours, theirs in zip(other, first)] == [True] * 7


# gradcheck: functions of a tensor that all ranks have, through a region in which each does something else

sequence = functools.partial(scatter_to_sequence_region, dim=1)
REGIONS = {
    "copy, reduce": lambda x, w: reduce_from_tp_region(w * copy_to_tp_region(x)),
    "scatter, gather": lambda x, w: gather_from_tp_region(mine(w, -1) * scatter_to_tp_region(x)),
    "sequence": lambda x, w: gather_from_tp_region(mine(w, 1) * sequence(x), dim=1),
    "gather sequence": lambda x, w: reduce_from_tp_region(w * gather_from_sequence_region(sequence(x))),
    "reduce_scatter": lambda x, w: gather_from_tp_region(
        reduce_scatter_to_sequence_region(w * copy_to_tp_region(x)), dim=1),
    "all_to_all": lambda x, w: gather_from_tp_region(all_to_all_region(
        mine(w, 2) * all_to_all_region(sequence(x), scatter_dim=2, gather_dim=1), scatter_dim=1, gather_dim=2), dim=1),
    "used twice": lambda x, w: reduce_from_tp_region((y := w * copy_to_tp_region(x)) * y.tanh()),
}  # fmt: skip
mine = lambda w, dim: piece(w, dim, dist.get_rank(), dist.get_world_size())


def checked(names):
    """On a rank: gradcheck of each region; the ranks change the same element at the same time."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x, w = (data(name, number, (1, size, size)) for name, number in (("x", 0), ("w", rank)))
    for name in names:
        assert gradcheck(lambda x, region=REGIONS[name]: region(x, w), x.requires_grad_())
    return gradgradcheck(lambda x: REGIONS["used twice"](x, w), x.requires_grad_(), fast_mode=True)


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_gradcheck_through_regions_in_which_each_rank_does_something_else(num_ranks):
    assert pool(num_ranks).run(checked, list(REGIONS)) == [True] * num_ranks


def checked_wrong():
    """On a rank: broken: g that sums in backward too, as torch.distributed.nn's all_reduce does; and no f."""
    wrong = lambda x: mappings._apply(mappings._all_reduce, mappings._all_reduce, x, None)
    x, w = data("x", 0, (2, 2)).requires_grad_(), data("w", dist.get_rank(), (2, 2))
    return [gradcheck(region, x, raise_exception=False) for region in (
        lambda x: wrong(w * copy_to_tp_region(x)), lambda x: reduce_from_tp_region(w * x))]


@pytest.mark.ranks
def test_broken_with_a_sum_too_many_or_one_too_few_gradcheck_finds_it():
    assert pool(2).run(checked_wrong) == [[False, False]] * 2


# communication

BYTES = 8 * 12 * 24 * 36
CALLS = {  # forward, backward; per rank, on 3 ranks
    "copy": ([], [("all_reduce", BYTES)]),
    "reduce": ([("all_reduce", BYTES)], []),
    "scatter 1": ([], [("all_gather", BYTES)]),
    "gather -1": ([("all_gather", 3 * BYTES)], []),
    "scatter sequence 1": ([], [("all_gather", BYTES)]),
    "gather sequence 1": ([("all_gather", 3 * BYTES)], [("reduce_scatter", 3 * BYTES)]),
    "reduce_scatter 0": ([("reduce_scatter", BYTES)], [("all_gather", BYTES)]),
    "all_to_all 1 2": ([("all_to_all", BYTES)], [("all_to_all", BYTES)]),
}


def recorded():
    """On a rank: forward and backward of each, in phases."""
    for name in CALLS:
        x = data("x", dist.get_rank()).requires_grad_()
        with dtlab.phase("ahead " + name):
            y = CASES[name][0](x)
        with dtlab.phase("back " + name):
            y.sum().backward()


def calls_of(recording, phase):
    names = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    return [(next(name for name in names if name in e.op), e.bytes) for e in recording.events[0]
            if e.kind == "issue" and e.phase["name"] == phase]  # fmt: skip


@pytest.mark.ranks
def test_each_mapping_makes_the_calls_that_it_says():
    live = pool(3).record(recorded)
    for name, calls in CALLS.items():
        assert (calls_of(live, f"ahead {name}"), calls_of(live, f"back {name}")) == calls


@pytest.mark.ranks
def test_alone_nothing_is_sent_and_dry_all_is_as_live():
    assert not [e for e in pool(1).record(recorded).events[0] if e.kind == "issue"]
    dry = dtlab.record_dry(recorded, world_size=3)
    for name, calls in CALLS.items():
        assert (calls_of(dry, f"ahead {name}"), calls_of(dry, f"back {name}")) == calls


# mistakes


def refusals():
    """On a rank of three: every message."""
    x, outside, texts = torch.ones(2, 4, 5), dist.GroupMember.NON_GROUP_MEMBER, []
    for call in (
        lambda: scatter_to_tp_region(x),
        lambda: reduce_scatter_to_sequence_region(x),
        lambda: all_to_all_region(x, scatter_dim=0, gather_dim=1),
        lambda: copy_to_tp_region(x, outside),
        lambda: split_region_rng(outside).__enter__(),
        lambda: scatter_to_tp_region(x, dim=3),
    ):
        try:
            call()
        except (ConfigError, IndexError) as error:
            texts.append(str(error))
    return texts


@pytest.mark.ranks
def test_what_cannot_be_cut_and_other_groups_are_refused_with_the_numbers():
    parts = [
        "x.shape[-1] (5) must be divisible by the ranks of the group (3)",
        "x.shape[1] (4) must be divisible by the ranks of the group (3)",
        "x.shape[0] (2) must be divisible by the ranks of the group (3)",
        "is not in this group",
        "is not in this group",
        "Dimension out of range",
    ]
    for texts in pool(3).run(refusals):
        assert len(texts) == len(parts)
        for text, part in zip(texts, parts):
            assert part in text


# random streams


def drop(device="cpu"):
    return F.dropout(torch.ones(40, device=device))


def masks(device="cpu", group=None):
    """On a rank: masks before, in two regions, between and after them, of ranks that are seeded alike."""
    torch.manual_seed(7)
    found = {"before": drop(device)}
    with split_region_rng(group):
        found["inside"] = drop(device)
    found["between"] = drop(device)
    with split_region_rng(group):
        found["inside again"] = drop(device)
    return {**found, "after": drop(device)}


def assert_streams(found):
    distinct = lambda tensors: len({tuple(t.tolist()) for t in tensors})
    for name in found[0]:
        assert distinct(mine[name] for mine in found) == (len(found) if "inside" in name else 1)
    for mine in found:
        assert distinct(mine.values()) == 5


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_masks_differ_by_rank_inside_and_are_equal_outside_and_after(num_ranks):
    assert_streams(pool(num_ranks).run(masks))


@pytest.mark.gpu
@pytest.mark.ranks
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_masks_on_a_gpu():
    with dtlab.launch(2, device="cuda", share_gpu=torch.cuda.device_count() < 2) as ranks:
        assert_streams(ranks.run(masks, "cuda"))


def masks_in_groups():
    """On a rank of four: in two groups of two."""
    return masks(group=[dist.new_group([a, a + 1]) for a in (0, 2)][dist.get_rank() // 2])["inside"]


@pytest.mark.ranks
def test_the_place_in_the_group_decides():
    a, b, c, d = (tuple(mask.tolist()) for mask in pool(4).run(masks_in_groups))
    assert a == c and b == d and a != b


def seeded(by_rank):
    """On a rank: twice into a region of a new group; the second time nothing is compared."""
    group, draws = dist.new_group([0, 1]), []
    torch.manual_seed(dist.get_rank() if by_rank else 3)
    for i in range(2):
        with dtlab.phase(f"entry {i}"), split_region_rng(group):
            draws.append(drop())
    return draws


@pytest.mark.ranks
def test_generators_that_are_not_seeded_alike_are_refused_on_every_rank_the_first_time():
    with pytest.raises(RankError, match="rank 1 has another state of torch's default generator than rank 0"):
        pool(2).run(seeded, True)
    recording = pool(2).record(seeded, False)
    for events in recording.events.values():
        entries = [e.phase["name"] for e in events if e.kind == "issue" and e.phase.get("name", "").startswith("entry")]
        assert set(entries) == {"entry 0"}


def without_a_region():
    torch.manual_seed(7)
    return drop()


@pytest.mark.ranks
def test_broken_without_the_region_ranks_seeded_alike_drop_the_same():
    first, second = pool(2).run(without_a_region)
    assert torch.equal(first, second)


def split_dropout(x):
    """y and what a rank alone did to it."""
    with split_region_rng():
        y = F.dropout(x * x)
    return F.dropout(y * x)


def in_the_region(x):
    with split_region_rng():
        return recompute(lambda x: F.dropout(x * x) * x, x)


def recomputed_masks():
    """On a rank: outputs and gradients, plain and computed again, and the next random numbers."""
    found = []
    for call in (split_dropout, lambda x: recompute(split_dropout, x), in_the_region):
        torch.manual_seed(3)
        x = torch.arange(1.0, 41, requires_grad=True)
        y = call(x)
        next_one = torch.rand(3)
        y.sum().backward()
        found.append([y.detach(), x.grad, next_one, torch.rand(3)])
    return found


@pytest.mark.ranks
def test_what_is_computed_again_has_the_same_masks():
    for plain, again, inside in pool(2).run(recomputed_masks):
        close(again, plain)
        y, grad, *_ = inside
        assert torch.equal(grad == 0, y == 0)  # one mask, inside: y is x^3 times its factor
        close(grad, 3 * y / torch.arange(1.0, 41))


def resumed():
    """On a rank: masks of two steps; then from a state that was saved between them."""
    torch.manual_seed(5)
    step = lambda: split_dropout(torch.ones(40))
    step()
    state = torch.get_rng_state()
    second = step()
    torch.manual_seed(99)
    step()
    torch.set_rng_state(state)
    return second, step()


@pytest.mark.ranks
def test_a_saved_state_of_torchs_generator_resumes_the_streams_of_all_ranks():
    found = pool(2).run(resumed)
    assert all(torch.equal(second, again) for second, again in found)
    assert not torch.equal(found[0][0], found[1][0])


def failed_inside():
    """On a rank: the generator's state after a region that fails, and after one that does not."""
    states = []
    for fails in (True, False):
        torch.manual_seed(1)
        try:
            with split_region_rng():
                drop()
                assert not fails
        except AssertionError:
            pass
        states.append(torch.get_rng_state())
    return torch.equal(*states)


@pytest.mark.ranks
def test_an_error_inside_leaves_the_streams_as_they_would_be():
    assert pool(2).run(failed_inside) == [True, True]


def dropped_dry():
    with split_region_rng():
        F.dropout(torch.ones(4))


@pytest.mark.ranks
def test_a_region_is_recorded_dry():
    assert [e.op for e in dtlab.record_dry(dropped_dry, world_size=4).events[0] if "native" in e.op or "bern" in e.op]
