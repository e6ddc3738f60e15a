"""Legal degrees, parameters of a rank, collectives and bytes of tensor, sequence and context parallelism."""
import doctest

import pytest

import dtlab
from dtlab.errors import ConfigError
from dtlab.models import GPTConfig
from dtlab.theory import (
    GPT_7_5B,
    LlamaShape,
    ModelShape,
    activation_bytes_per_layer,
    causal_blocks,
    causal_work,
    layer_params,
    legal_tp_sizes,
    ring_attention_wire_bytes,
    tensor_parallel,
    tp_layer_collectives,
    tp_layer_params,
    tp_layer_wire_bytes,
    tp_params,
    transformer_params,
    ulysses_wire_bytes,
    why_not_tp,
)

SIZES = {"num_layers": 4, "hidden_size": 192, "num_heads": 12, "seq_length": 128, "vocab_size": 251}
LLAMA = {**SIZES, "num_heads": 64, "hidden_size": 512, "ffn_hidden_size": 1408, "num_kv_heads": 8}


def test_12_heads_on_8_ranks_are_refused_with_the_legal_degrees():
    shape = ModelShape(**SIZES)
    assert legal_tp_sizes(shape) == (1, 2, 3, 4, 6, 12) and legal_tp_sizes(shape, 5) == (1, 2, 3, 4)
    assert why_not_tp(shape, 8) == "num_heads (12) does not divide by tp_size (8); legal are 1, 2, 3, 4, 6, 12"
    assert all(why_not_tp(shape, size) is None for size in legal_tp_sizes(shape))


def test_the_configuration_of_a_gpt_has_the_degrees_of_its_shape():
    assert legal_tp_sizes(GPTConfig()) == (1, 2, 3, 4, 6, 12)
    assert legal_tp_sizes(GPTConfig(num_kv_heads=3)) == (1, 3, 6, 12)


def test_the_mlps_width_is_cut_too():
    shape = ModelShape(**SIZES, ffn_hidden_size=512)
    assert legal_tp_sizes(shape) == (1, 2, 4)
    assert why_not_tp(shape, 3).startswith("ffn_hidden_size (512) does not divide by tp_size (3)")


def test_heads_of_keys_and_values_are_cut_or_shared_by_whole_groups_of_ranks():
    assert legal_tp_sizes(LlamaShape(**LLAMA)) == (1, 2, 4, 8, 16, 32, 64)
    shape = LlamaShape(**{**SIZES, "num_kv_heads": 6})
    assert legal_tp_sizes(shape) == (1, 2, 3, 6, 12)
    assert "num_kv_heads (6) does not divide by tp_size (4), nor tp_size by" in why_not_tp(shape, 4)


@pytest.mark.parametrize("shape", [ModelShape(**SIZES), ModelShape(**SIZES, tie_embeddings=False), LlamaShape(**LLAMA),
                                   LlamaShape(**LLAMA, tie_embeddings=True), GPT_7_5B])  # fmt: skip
def test_one_rank_has_the_whole_model(shape):
    assert tp_layer_params(shape, tp_size=1) == layer_params(shape)
    assert tp_params(shape, tp_size=1) == transformer_params(shape)


def test_a_layer_on_four_ranks_by_hand():
    """h 192: matrices and biases of columns cut, biases of rows and norms whole."""
    qkv, proj = 576 // 4 * (192 + 1), 192 * 48 + 192
    fc1, fc2 = 768 // 4 * (192 + 1), 192 * 192 + 192
    assert tp_layer_params(ModelShape(**SIZES), tp_size=4) == qkv + proj + fc1 + fc2 + 4 * 192


def test_a_llama_on_more_ranks_than_heads_of_keys_and_values_by_hand():
    """16 ranks: four query heads of eight elements each, and one of the eight others, which two ranks share."""
    matrices = 512 * (4 * 8 + 2 * 8 + 4 * 8) + 3 * 512 * 1408 // 16
    assert tp_layer_params(LlamaShape(**LLAMA), tp_size=16) == matrices + 2 * 512
    halves = [tp_layer_params(LlamaShape(**LLAMA), tp_size=t) - 2 * 512 for t in (4, 8, 16)]
    assert halves[0] == 2 * halves[1] and halves[1] < 2 * halves[2]


def numbers_of_parameters(config):
    """On a rank: parameters of its part at tp 1, 2, 4, of a layer in it, and of that layer's matrices."""
    import torch.distributed as dist

    from dtlab.models import GPT
    from dtlab.parallel.tensor_parallel import apply_tensor_parallel

    counted = []
    for tp_size in (1, 2, 4):
        first = dist.get_rank() // tp_size * tp_size
        group = dist.new_group(range(first, first + tp_size), use_local_synchronization=True)
        model = apply_tensor_parallel(GPT(config, device="meta"), group=group)
        layer = list(model.layers[0].parameters())
        counted.append([sum(p.numel() for p in its) for its in (
            model.parameters(), layer, (p for p in layer if p.dim() == 2))])  # fmt: skip
    return counted


@pytest.fixture(scope="module")
def ranks():
    with dtlab.launch(4) as started:
        yield started


@pytest.mark.ranks
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_real_model(ranks, tied):
    shape = ModelShape(**SIZES, tie_embeddings=tied)
    expected = [[tp_params(shape, tp_size=t), tp_layer_params(shape, tp_size=t)] for t in (1, 2, 4)]
    for counted in ranks.run(numbers_of_parameters, GPTConfig(**SIZES, tie_embeddings=tied)):
        assert [its[:2] for its in counted] == expected


@pytest.mark.ranks
def test_matrices_of_a_llama_are_those_of_the_real_layer_with_shared_heads(ranks):
    shape = LlamaShape(**SIZES, num_kv_heads=2, ffn_hidden_size=512)
    config = GPTConfig(**SIZES, num_kv_heads=2, ffn_hidden_size=512, swiglu=True)
    expected = [tp_layer_params(shape, tp_size=t) - 2 * 192 for t in (1, 2, 4)]
    assert [[its[2] for its in counted] for counted in ranks.run(numbers_of_parameters, config)] == [expected] * 4


def test_the_vocabulary_is_padded_to_a_multiple():
    tables = {t: tp_params(ModelShape(**SIZES, tie_embeddings=False), tp_size=t)
              - tp_params(ModelShape(**SIZES), tp_size=t) for t in (1, 2, 4)}  # fmt: skip
    assert tables == {1: 251 * 192, 2: 126 * 192, 4: 63 * 192}


# --- collectives

def test_four_all_reduces_are_8_b_s_h_elements_on_the_wire():
    """Narayanan et al. 2021: 8 b s h (t-1)/t elements a layer."""
    sent = tp_layer_wire_bytes(GPT_7_5B, micro_batch_size=3, tp_size=8)
    assert sum(sent.values()) == 2 * 8 * 3 * 2048 * 4096 * 7 / 8 and sent["forward"] == sent["backward"]
    assert tp_layer_collectives(GPT_7_5B, micro_batch_size=3, tp_size=1) == []


def test_with_sequence_parallelism_forward_sends_the_same_and_backward_half_as_much_again():
    without, with_it = (tp_layer_wire_bytes(GPT_7_5B, micro_batch_size=1, tp_size=4, sequence_parallel=is_split)
                        for is_split in (False, True))
    assert with_it == {"forward": without["forward"], "backward": 1.5 * without["backward"]}
    calls = tp_layer_collectives(GPT_7_5B, micro_batch_size=1, tp_size=4, sequence_parallel=True)
    counts = {op: sum(its == op for _, its, _ in calls) for op in ("all_gather", "reduce_scatter")}
    assert counts == {"all_gather": 4 + 2, "reduce_scatter": 4}  # the paper's 4 and 4, and the inputs once more


# --- context parallelism

def test_contiguous_pieces_of_a_causal_sequence_are_uneven_and_a_zigzag_is_level():
    work = causal_work(4, "contiguous")
    assert max(work) / (sum(work) / 4) == 1.75 and work[-1] / work[0] == pytest.approx(7)
    for num_ranks in range(1, 9):
        assert causal_work(num_ranks, "zigzag") == pytest.approx([1 / num_ranks] * num_ranks)
        assert sum(causal_work(num_ranks)) == pytest.approx(1)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_pairs_counted_one_by_one(layout):
    num_ranks, chunk = 3, 40
    tokens = {rank: [token for part in parts for token in range(part * chunk, (part + 1) * chunk)]
              for rank, parts in enumerate(tensor_parallel.chunks_of(num_ranks, layout))}  # fmt: skip
    pairs = [[sum(key <= query for query in tokens[row] for key in tokens[column]) for column in tokens]
             for row in tokens]  # fmt: skip
    total = sum(map(sum, pairs))
    for row, expected in zip(causal_blocks(num_ranks, layout), pairs):
        assert row == pytest.approx([count / total for count in expected], abs=1 / chunk / num_ranks)


def test_a_ring_sends_keys_and_values_and_ulysses_a_piece_of_everything():
    shape = LlamaShape(**LLAMA)
    piece = 128 // 4 * 8 * 2  # tokens, elements of a head, bytes
    ring, ulysses = (bytes_of(shape, cp_size=4) for bytes_of in (ring_attention_wire_bytes, ulysses_wire_bytes))
    assert ring["forward"] == 3 * piece * 2 * 8
    assert ulysses["forward"] == ulysses["backward"] == 3 / 4 * piece * (2 * 64 + 2 * 8)
    assert sum(ring_attention_wire_bytes(shape, cp_size=1).values()) == 0
    assert sum(ulysses_wire_bytes(shape, cp_size=1).values()) == 0
    assert ring_attention_wire_bytes(shape, cp_size=4, micro_batch_size=3)["forward"] == 3 * ring["forward"]


# --- activations

@pytest.mark.parametrize("choices, mib", [
    ({"tp_size": 8, "flash_attention": True}, 104), ({"tp_size": 8, "recompute": "selective"}, 104),
    ({"tp_size": 8, "sequence_parallel": True, "flash_attention": True}, 34),
    ({"tp_size": 8, "recompute": "full"}, 16), ({"tp_size": 8, "sequence_parallel": True, "recompute": "full"}, 2),
])  # fmt: skip
def test_what_a_layer_keeps_without_its_scores(choices, mib):
    """s 2048, b 1, h 4096, a 32, in units of s b h = 8 MiB: 10 + 24/8; 34/8; 2; 2/8."""
    sizes = {"seq_length": 2048, "micro_batch_size": 1, "hidden_size": 4096, "num_heads": 32}
    assert activation_bytes_per_layer(**sizes, **choices) / 2**20 == mib


@pytest.mark.parametrize("call, words", [
    (lambda: tp_params(GPT_7_5B, tp_size=3), r"num_heads \(32\) does not divide by tp_size \(3\); legal are 1, 2, 4"),
    (lambda: tp_params(ModelShape(**{**SIZES, "vocab_size": 3}), tp_size=12), r"vocab_size \(3\) is below tp_size"),
    (lambda: tp_layer_params(GPT_7_5B, tp_size=0), r"tp_size \(0\) must be at least 1"),
    (lambda: legal_tp_sizes(GPT_7_5B, 0), r"max_size \(0\) must be at least 1"),
    (lambda: tp_layer_collectives(ModelShape(**{**SIZES, "seq_length": 9}), micro_batch_size=1, tp_size=2,
                                  sequence_parallel=True), r"seq_length \(9\) must be divisible by tp_size \(2\)"),
    (lambda: tp_layer_collectives(ModelShape(**SIZES), micro_batch_size=1, tp_size=3, sequence_parallel=True),
     r"seq_length \(128\) must .* tp_size \(3\) with sequence parallelism: use tp_size 1, 2, 4$"),
    (lambda: tp_layer_collectives(GPT_7_5B, micro_batch_size=1, tp_size=2, bytes_per_element=-2),
     r"bytes_per_element \(-2\) must be at least 1"),
    (lambda: ring_attention_wire_bytes(GPT_7_5B, cp_size=2, bytes_per_element=0), r"bytes_per_element \(0\) must be"),
    (lambda: ulysses_wire_bytes(ModelShape(**SIZES), cp_size=3), r"seq_length \(128\) .*\(3\): use cp_size 1, 2, 4"),
    (lambda: tp_layer_wire_bytes(GPT_7_5B, micro_batch_size=0, tp_size=2), r"micro_batch_size \(0\) must be at least"),
    (lambda: causal_work(4, "zig-zag"), r"layout \('zig-zag'\) must be 'contiguous' or 'zigzag'"),
    (lambda: causal_work(0), r"num_ranks \(0\) must be at least 1"),
    (lambda: ulysses_wire_bytes(LlamaShape(**LLAMA), cp_size=16),
     r"num_kv_heads \(8\) must be divisible by cp_size \(16\): use cp_size 1, 2, 4, 8, or a ring$"),
    (lambda: ring_attention_wire_bytes(GPT_7_5B, cp_size=3), r"seq_length \(2048\) must be divisible by cp_size \(3\)"),
])  # fmt: skip
def test_what_cannot_be_is_refused(call, words):
    with pytest.raises(ConfigError, match=words):
        call()


def test_docstring_examples():
    result = doctest.testmod(tensor_parallel)
    assert result.attempted > 0 and result.failed == 0
