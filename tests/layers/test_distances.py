"""Attention with a bias by query and distance, over pages of a cache, against plain torch."""

import math

import pytest
import torch

from tfbackend.layers import distances
from tfbackend.layers.distances import Request, Rule, attend, write_pages

HEADS, KV_HEADS, SIZE, BLOCK, PAGES = 4, 2, 8, 4, 40


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def one_by_one(q, k, v, bias, rule, sinks=None):
    """[tokens, heads, size] of whole requests, each score by itself."""
    tokens, extent = len(q), bias.shape[-1]
    output = torch.zeros_like(q)
    for head in range(HEADS):
        kv, table = head // (HEADS // KV_HEADS), bias[:, head if bias.shape[1] > 1 else 0]
        for i in range(tokens):
            first = max(0, i + 1 - rule.window) if rule.window else 0
            scores = []
            for j in range(first, i + 1):
                score = float(q[i, head] @ k[j, kv]) * rule.scale
                if rule.soft_cap:
                    score = rule.soft_cap * math.tanh(score / rule.soft_cap)
                scores.append(score + (float(table[i, extent - 1 - (i - j)]) if i - j < extent else 0.0))
            weights = [math.exp(score) for score in scores]
            total = sum(weights) + (math.exp(float(sinks[head])) if sinks is not None else 0.0)
            output[i, head] = sum(w * v[first + n, kv] for n, w in enumerate(weights)) / total
    return output


def pages_of(dtype=torch.float32, token_first=False):
    """Pages that hold what is no number until something is written there."""
    if token_first:  # another order in memory, as some kernels want it
        return torch.full((PAGES, BLOCK, KV_HEADS, 2 * SIZE), math.nan, dtype=dtype).transpose(1, 2)
    return torch.full((PAGES, KV_HEADS, BLOCK, 2 * SIZE), math.nan, dtype=dtype)


def fed(requests, rule, sizes, sinks=None, token_first=False):
    """What a cache gives for several requests whose tokens come in parts of `sizes`, in pages that lie anywhere."""
    order = torch.randperm(PAGES, generator=torch.Generator().manual_seed(9))
    pages, made, at = pages_of(token_first=token_first), [[] for _ in requests], 0
    tables = [order[10 * n : 10 * n + 10] for n in range(len(requests))]
    for size in sizes:
        for (q, k, v, bias), table, outputs in zip(requests, tables, made, strict=True):
            rows = slice(at, min(at + size, len(q)))
            if rows.start >= len(q):
                continue
            places = torch.arange(rows.start, rows.stop)
            write_pages(pages, k[rows], v[rows], table[places // BLOCK] * BLOCK + places % BLOCK)
            output = torch.empty_like(q[rows])
            attend(Request(pages, table, rows.stop), q[rows], bias[rows], rule, output, sinks)
            outputs.append(output)
        at += size
    return [torch.cat(outputs) for outputs in made]


def request(tokens, extent, heads=HEADS, seed=0):
    sizes = ((tokens, HEADS, SIZE), (tokens, KV_HEADS, SIZE), (tokens, KV_HEADS, SIZE), (tokens, heads, extent))
    return [drawn(*size, seed=10 * seed + n) for n, size in enumerate(sizes)]


RULES = {
    "plain": Rule(0.3),
    "window": Rule(0.3, window=6),
    "narrow window": Rule(0.3, window=2),
    "soft cap": Rule(0.9, soft_cap=1.5),
    "window and soft cap": Rule(0.9, window=5, soft_cap=1.5),
}


@pytest.mark.parametrize("sizes", [(40,), (7, 1, 1, 12, 19), (1,) * 40], ids=["whole", "parts", "steps"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_each_request_gets_its_own(rule, sizes):
    requests = [request(tokens, extent=9, seed=n) for n, tokens in enumerate((23, 1, 8, 37))]
    for got, (q, k, v, bias) in zip(fed(requests, rule, sizes), requests, strict=True):
        torch.testing.assert_close(got, one_by_one(q, k, v, bias, rule), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("extent", [1, 5, 64])
def test_a_bias_may_reach_less_and_more_far_than_the_context(extent):
    q, k, v, bias = request(21, extent)
    torch.testing.assert_close(fed([(q, k, v, bias)], RULES["plain"], (9, 12))[0], one_by_one(q, k, v, bias, Rule(0.3)))


def test_one_bias_for_all_heads():
    q, k, v, bias = request(15, 6, heads=1)
    torch.testing.assert_close(fed([(q, k, v, bias)], Rule(0.3), (15,))[0], one_by_one(q, k, v, bias, Rule(0.3)))


def test_sinks_take_their_part():
    (q, k, v, bias), sinks = request(15, 6), drawn(HEADS, seed=5)
    got = fed([(q, k, v, bias)], Rule(0.3, window=6), (4, 11), sinks)[0]
    torch.testing.assert_close(got, one_by_one(q, k, v, bias, Rule(0.3, window=6), sinks))


def test_pages_may_lie_in_memory_in_another_order():
    q, k, v, bias = request(30, 6)
    got = fed([(q, k, v, bias)], Rule(0.3), (13, 17), token_first=True)[0]
    torch.testing.assert_close(got, one_by_one(q, k, v, bias, Rule(0.3)))


@pytest.mark.parametrize("scores", [1, 100, 333])
@pytest.mark.parametrize("rule", [RULES["plain"], RULES["window"]], ids=["plain", "window"])
def test_a_bounded_number_of_scores_at_a_time(monkeypatch, rule, scores):
    """The same is computed, and no more scores at once than are allowed, or one query."""
    q, k, v, bias = request(37, 9)
    wanted, made = one_by_one(q, k, v, bias, rule), []
    weigh = distances._weights
    monkeypatch.setattr(distances, "_SCORES", scores)
    monkeypatch.setattr(distances, "_weights", lambda x, sinks: (made.append(x.shape), weigh(x, sinks))[1])
    torch.testing.assert_close(fed([(q, k, v, bias)], rule, (20, 17))[0], wanted)
    assert len(made) > 2
    assert all(shape.numel() <= scores or shape[1] == 1 for shape in made)


def test_what_is_behind_the_window_is_not_read():
    """The engine gives pages that no later token sees to others, and page 0 to nobody."""
    q, k, v, bias = request(30, 6)
    rule, pages, table = Rule(0.3, window=5), pages_of(), torch.arange(1, 9)
    write_pages(pages, k, v, BLOCK + torch.arange(30))
    table[: (30 - 5) // BLOCK] = 0
    output = torch.empty(1, HEADS, SIZE)
    attend(Request(pages, table, 30), q[29:], bias[29:], rule, output)
    torch.testing.assert_close(output, one_by_one(q, k, v, bias, rule)[29:])


def test_rows_without_a_place_are_not_written():
    pages = pages_of()
    k, v = drawn(3, KV_HEADS, SIZE), drawn(3, KV_HEADS, SIZE, seed=1)
    write_pages(pages, k, v, torch.tensor([5, -1, 14]))
    assert torch.equal(pages[1, :, 1], torch.cat((k[0], v[0]), -1))
    assert torch.equal(pages[3, :, 2], torch.cat((k[2], v[2]), -1))
    assert int((~pages.isnan()).any(-1).sum()) == 2 * KV_HEADS


def test_half_precision_is_kept_as_it_is_and_computed_in_float32():
    q, k, v, bias = (x.bfloat16() for x in request(19, 6))
    pages, output = pages_of(torch.bfloat16), torch.empty_like(q)
    write_pages(pages, k, v, torch.arange(19))
    attend(Request(pages, torch.arange(5), 19), q, bias, Rule(0.3), output)
    wanted = one_by_one(q.float(), k.float(), v.float(), bias.float(), Rule(0.3))
    torch.testing.assert_close(output, wanted.bfloat16(), rtol=1e-2, atol=1e-2)
