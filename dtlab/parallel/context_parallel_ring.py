"""Ring attention block by block: the online softmax, its backward pass, and what is passed on around the ring.

Letters: n ranks of the group, B batch_size, S seq_length, a num_heads, k num_kv_heads, d head size, T tokens of a tile.
"""
import math

import torch
import torch.distributed as dist

from dtlab.parallel.shared import place_in
from dtlab.theory.tensor_parallel import chunks_of

TILE = 1024  # tokens, at most: the scores of two tiles are all that is ever held of the S x S matrix


class RingAttention(torch.autograd.Function):
    """By tiles of tokens; of a tile's rows all query heads that share a kv head lie end to end: [B, k, a/k T, d]."""

    @staticmethod
    def forward(ctx, q, k, v, causal, layout, group):
        """[B, a, S/n, d], and twice [B, k, S/n, d] -> [B, a, S/n, d]."""
        ctx.ring = ring = _Ring(q.size(2), causal, layout, group)
        queries = _scaled(ring.rows(q, k.size(1)))
        states = [(torch.zeros_like(rows), rows.new_full((*rows.shape[:-1], 1), torch.finfo(rows.dtype).min),
                   rows.new_zeros((*rows.shape[:-1], 1))) for rows in queries]  # fmt: skip
        for source, (keys, values) in ring.around(torch.stack((k, v))):
            for i, columns, is_diagonal in ring.blocks(source):
                scores = _scores(queries[i], keys[:, :, columns], is_diagonal)
                states[i] = _online_softmax(*states[i], scores, values[:, :, columns])
        out = ring.joined([rows / total for rows, _, total in states], q).to(q.dtype)
        logsumexp = ring.joined([largest + total.log() for _, largest, total in states], q)
        ctx.save_for_backward(q, k, v, out, logsumexp)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        """[B, a, S/n, d] -> those of q, k, v."""
        with torch.autocast(grad.device.type, enabled=False):  # where backward is called it may be on
            return (*_gradients(ctx.ring, *ctx.saved_tensors, grad), None, None, None)


def _gradients(ring, q, k, v, out, logsumexp, grad):
    """The weights are made again from scores and logsumexp. Gradients of k, v start where k, v get to first."""
    queries, outs, grads, logsumexps = (ring.rows(x, k.size(1)) for x in (q, out, grad, logsumexp))
    queries = _scaled(queries)
    overlaps = [(x * dx).sum(-1, keepdim=True) for x, dx in zip(outs, grads)]  # what the softmax takes off
    query_grads = [torch.zeros_like(rows) for rows in queries]
    home = torch.zeros((2, *k.shape), dtype=queries[0].dtype, device=k.device)  # of this rank's own k and v
    travelling, arriving = home, torch.empty_like(home)
    for step, (source, (keys, values)) in enumerate(ring.around(torch.stack((k, v)))):
        works = ring.pass_on(travelling, arriving) if step > 1 else []
        block_grads = torch.zeros_like(home) if step > 0 else home
        for i, columns, is_diagonal in ring.blocks(source):
            key, value, key_grad, value_grad = (x[:, :, columns] for x in (keys, values, *block_grads))
            weights = (_scores(queries[i], key, is_diagonal) - logsumexps[i]).exp_()
            value_grad += weights.mT @ grads[i]
            weights *= grads[i] @ value.to(home.dtype).mT - overlaps[i]  # gradient of the scores, from here on
            query_grads[i] += weights @ key.to(home.dtype)
            key_grad += weights.mT @ queries[i]
        _wait(works)
        travelling = block_grads.add_(arriving) if step > 1 else block_grads
    if ring.size > 1:
        _wait(ring.pass_on(travelling, arriving))  # those of the last step belong to the next rank
        home += arriving
    query_grad = ring.joined(_scaled(query_grads), q).to(q.dtype)
    return query_grad, home[0].to(k.dtype), home[1].to(v.dtype)


def _scaled(rows):
    """Divided by sqrt(d): queries, once and for all blocks, in the place of all their scores."""
    return [x / math.sqrt(x.size(-1)) for x in rows]


def _scores(queries, keys, is_diagonal):
    """(q / sqrt(d)) k^T, [B, k, a/k T, T]; on the diagonal a query sees keys up to its own."""
    scores = queries @ keys.to(queries.dtype).mT
    if is_diagonal:
        tokens = keys.size(2)
        future = torch.ones(tokens, tokens, dtype=torch.bool, device=keys.device).triu(1)
        scores.unflatten(2, (-1, tokens)).masked_fill_(future, -math.inf)
    return scores


def _online_softmax(out, largest, total, scores, values):
    """Add a block: (sum of exp(score - largest) v, largest score, sum of exp(score - largest)) of each query so far."""
    largest_before, largest = largest, torch.maximum(largest, scores.amax(-1, keepdim=True))
    weights, shrink = (scores - largest).exp_(), (largest_before - largest).exp_()
    return out * shrink + weights @ values.to(out.dtype), largest, total * shrink + weights.sum(-1, keepdim=True)


class _Ring:
    """Who has which tokens, in tiles, and what is passed on to the next rank.

    Attributes:
        size: n.
        tiles: For each rank its tiles: where they are in its [S/n] tokens, as a slice, and their first position.
    """

    def __init__(self, length, causal, layout, group):
        self.causal, self.group, (self.rank, self.size) = causal, group, place_in(group)
        self.tiles = []
        for chunks in chunks_of(self.size, layout):
            tokens = length // len(chunks)
            places = [(i * tokens, start, chunk) for i, chunk in enumerate(chunks) for start in range(0, tokens, TILE)]
            self.tiles.append([(slice(first + start, first + min(start + TILE, tokens)), chunk * tokens + start)
                               for first, start, chunk in places])

    def rows(self, x, num_kv_heads):
        """[B, a, S/n, d] -> for each tile [B, k, a/k T, d], of 32 bits at least."""
        kind = torch.float32 if x.itemsize < 4 else x.dtype
        tiles = [x[:, :, tile].unflatten(1, (num_kv_heads, -1)) for tile, _ in self.tiles[self.rank]]
        return [tile.flatten(2, 3).to(kind) for tile in tiles]

    def joined(self, rows, q):
        """The inverse of ``rows``."""
        shared = q.size(1) // rows[0].size(1)
        return torch.cat([part.unflatten(2, (shared, -1)) for part in rows], dim=3).flatten(1, 2)

    def blocks(self, source):
        """Yield (number of a tile of queries, slice of the keys of rank ``source``, is it the diagonal), where seen."""
        for i, (_, first_query) in enumerate(self.tiles[self.rank]):
            for columns, first_key in self.tiles[source]:
                if not self.causal or first_key <= first_query:
                    yield i, columns, self.causal and first_key == first_query

    def around(self, held):
        """Yield (rank, its tensor) for each rank, this one first; the next tensor arrives while the caller computes."""
        spare = torch.empty_like(held)
        for step in range(self.size):
            works = self.pass_on(held, spare) if step < self.size - 1 else []
            yield (self.rank - step) % self.size, held
            _wait(works)
            held, spare = spare, held

    def pass_on(self, sent, received):
        """Begin to send to the next rank, and to receive from the one before, in one batch: nobody waits for a send."""
        ops = [(dist.irecv, received, self.rank - 1), (dist.isend, sent, self.rank + 1)]  # send, the bytes of sent
        return dist.batch_isend_irecv([dist.P2POp(op, x, group=self.group, group_peer=peer % self.size)
                                       for op, x, peer in ops])  # fmt: skip


def _wait(works):
    for work in works:
        work.wait()
