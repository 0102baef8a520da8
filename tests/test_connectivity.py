"""Self-edges, Hamiltonian paths and hops against the definitions of Yun et al. (2020), and their section 3.4."""

import itertools

import oracles_theory
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import connectivity_table as connectivity_page
from sparsefinder.connectivity import (
    analyse,
    connections,
    connectivity_rows,
    connectivity_table,
    hops_to_reach,
)
from sparsefinder.errors import PatternError, ShapeError
from sparsefinder.hamiltonian import hamiltonian_path
from sparsefinder.patterns.content import Listed
from sparsefinder.patterns.heads import Multihead, Sequential
from sparsefinder.patterns.legal import Legal, legal_from_mask, legal_full
from sparsefinder.patterns.positional import (
    BlockDiagonal,
    Dilated,
    Fixed,
    GlobalPositions,
    GlobalTokens,
    Nothing,
    Strided,
    Window,
)


@st.composite
def graphs(draw):
    n = draw(st.integers(1, 6))
    density = draw(st.sampled_from([0.2, 0.35, 0.6]))
    seed = draw(st.integers(0, 10_000))
    return torch.rand(n, n, generator=torch.Generator().manual_seed(seed)) < density


def key_sets(matrix):
    return [set(row.nonzero().flatten().tolist()) for row in matrix]


def is_order(reads, order):
    steps = itertools.pairwise(order)
    return sorted(order) == list(range(len(reads))) and all(reads[after, before] for before, after in steps)


@given(graphs())
@settings(max_examples=60)
def test_the_path_is_found_exactly_where_one_exists(reads):
    found = hamiltonian_path(reads)
    expected = oracles_theory.hamiltonian_orders(key_sets(reads))
    assert found.answer == ("yes" if expected else "no"), found.reason
    assert found.order in expected if expected else found.order is None


@given(st.integers(0, 10_000), st.integers(6, 40), st.sampled_from([0.0, 0.02, 0.1]))
@settings(max_examples=20)
def test_a_hidden_path_is_never_denied(seed, n, extra):
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(n, generator=draw)
    reads = torch.rand(n, n, generator=draw) < extra
    reads[order[1:], order[:-1]] = True
    found = hamiltonian_path(reads)
    assert found.answer != "no"
    assert found.answer == "unknown" or is_order(reads, found.order)
    if extra == 0:
        assert found.order == tuple(order.tolist())


def test_random_graphs_of_some_density_have_paths_that_are_found():
    for seed in range(3):
        reads = torch.rand(120, 120, generator=torch.Generator().manual_seed(seed)) < 0.12
        found = hamiltonian_path(reads)
        assert found.answer == "yes"
        assert is_order(reads, found.order)


def test_no_comes_with_the_right_reason():
    n = 12
    unread = torch.eye(n, dtype=torch.bool) | (torch.arange(n) < 4)  # all read the first four only
    assert "8 tokens are read by no other token" in hamiltonian_path(unread).reason
    assert "8 tokens read no other token" in hamiltonian_path(unread.T).reason
    blocks = torch.arange(n)[:, None] // 4 == torch.arange(n) // 4
    assert "groups" in hamiltonian_path(blocks).reason
    star = torch.zeros(n, n, dtype=torch.bool)
    star[0], star[:, 0] = True, True
    assert "steps" in hamiltonian_path(star).reason
    hubs = blocks | star
    hubs[1:4, 1:4] = torch.eye(3, dtype=torch.bool)  # one hub, and five parts without it
    assert hamiltonian_path(hubs).answer == "no"
    pairs = torch.arange(9)[:, None] // 2 == torch.arange(9) // 2
    pairs[8], pairs[:, 8] = True, True
    assert "without its 1 busiest tokens the rest is 4 parts" in hamiltonian_path(pairs).reason


def test_the_search_says_when_it_gave_up():
    """Five groups of eight that only three tokens join: no path, but the three are not busy, so no proof is found."""
    label = torch.arange(43) // 8
    reads = (label[:, None] == label) & (label < 5)
    for joint in range(3):
        reads[40 + joint, joint:40:8], reads[joint:40:8, 40 + joint] = True, True
    found = hamiltonian_path(reads, budget=300)
    assert (found.answer, found.order) == ("unknown", None)


@given(st.integers(2, 6), st.integers(1, 3), st.integers(0, 9999))
@settings(max_examples=40)
def test_hops_equal_the_recursion(n, period, seed):
    draw = torch.Generator().manual_seed(seed)
    cycle = [torch.rand(n, n, generator=draw) < 0.35 for _ in range(period)]
    goal = torch.rand(n, n, generator=draw) < 0.6 if seed % 2 else torch.ones(n, n, dtype=torch.bool)
    sets = [key_sets(layer) for layer in cycle]
    found, most = hops_to_reach(cycle, goal), 4 * n * period
    expected = oracles_theory.hops(sets, key_sets(goal), most)
    assert found == expected if expected is not None else found in ("never", "unknown")
    if found == "never":  # and it stays so, long after
        assert oracles_theory.hops(sets, key_sets(goal), 40 * most) is None


def test_hops_of_a_wheel_are_unknown_or_never_but_never_wrong():
    shift = torch.eye(6, dtype=torch.bool).roll(1, 0)
    assert hops_to_reach([shift]) == "never"  # each token always holds one other, and the sets come round after six
    assert hops_to_reach([shift], most=3) == "unknown"
    assert hops_to_reach([shift], shift.roll(2, 0)) == 3
    with pytest.raises(ShapeError, match="square"):
        hops_to_reach([shift, shift[:, :3]])


def full(pattern, n, **settings_):
    return analyse(pattern, legal_full(1, n, n), **settings_)


@pytest.mark.parametrize("stride", [2, 4, 5, 8])
def test_strided_fixed_and_star_satisfy_assumption_1(stride):
    """Yun et al. (2020), section 3.4: two hops and the identity order; sequential, union and multihead."""
    for pair in ((Window(stride), Strided(stride)), (BlockDiagonal(stride), Fixed(stride))):
        for pattern, period in ((Sequential(pair), 2), (Multihead(pair), 1), (pair[0] | pair[1], 1)):
            found = full(pattern, 40)
            assert (found.period, found.self_edges, found.path, found.reason) == (period, True, "yes", "identity")
            assert found.hops == 2
            assert found.assumption == "yes"
    star = full(Window(1) | GlobalTokens(1), 24)
    assert (star.hops, star.reason, star.assumption) == (2, "identity", "yes")


def test_fixed_needs_a_whole_number_of_segments():
    """The paper says "for all values of w", but a last segment that is cut short has no token that others read."""
    fixed = Sequential((BlockDiagonal(5), Fixed(5)))
    assert full(fixed, 23).hops == "never"
    assert full(fixed, 25).hops == 2
    closed = Sequential((BlockDiagonal(5), Fixed(5) | GlobalPositions((-1,))))
    assert full(closed, 23).hops == 2


def test_the_order_of_the_cycle_counts():
    """A layer that starts the cycle passes its tokens on to the next: local then strided is not strided then local."""
    n, stride = 12, 6
    local, jump = BlockDiagonal(stride), Fixed(stride)
    assert full(Sequential((local, jump)), n).hops == 2
    assert full(Sequential((jump, local)), n).hops == 3


@pytest.mark.parametrize(("n", "radius"), [(10, 1), (33, 4), (33, 32)])
def test_a_window_alone_needs_many_layers(n, radius):
    found = full(Window(radius), n)
    assert found.hops == -(-(n - 1) // radius)
    assert found.assumption == "yes"


def test_patterns_that_fail():
    assert full(BlockDiagonal(4), 12).assumption == "no"
    assert full(BlockDiagonal(4), 12).hops == "never"
    assert full(Dilated(2, 2), 12).path == "no"
    assert full(Strided(3), 12).assumption == "no"
    assert full(GlobalTokens(1) & ~Window(0), 6).self_edges is False
    only_relay = full(Window(0) | GlobalTokens(1), 12)
    assert (only_relay.path, only_relay.hops) == ("no", 2)
    assert full(Nothing(), 5).hops == "never"
    second = Sequential((Window(3), Window(3) & ~Window(0)))
    assert full(second, 12).self_edges is False


@pytest.mark.parametrize("apart", [Dilated(1, 2), Dilated(2, 3), Dilated(1, 4), BlockDiagonal(4)])
def test_hubs_join_what_a_pattern_leaves_apart(apart):
    """Residue classes and blocks that only global tokens connect; the order is constructed, nothing is searched."""
    found = full(apart | GlobalTokens(3), 16)
    assert found.path == "yes"
    assert found.reason.startswith(("classes modulo", "runs of"))
    assert is_order(connections(apart | GlobalTokens(3), legal_full(1, 16, 16))[0], found.order)
    assert full(Dilated(1, 3) | GlobalTokens(1), 15).path == "no"  # three classes, one hub


def test_causal_layers_reach_their_past():
    legal = legal_full(1, 9, 9, causal=True)
    assert analyse(Window(2), legal).hops == 4
    assert analyse(Window(2), legal).path == "yes"
    assert analyse(GlobalTokens(1) | Window(0), legal).path == "no"
    assert analyse(~Nothing(), legal).hops == 1


def test_padding_changes_nothing():
    """Case 6, on either side; and an item is analysed alone."""
    mask = torch.zeros(2, 20, dtype=torch.bool)
    mask[0, 7:] = True
    mask[1, :13] = True
    alone = full(Sequential((Window(3), Strided(3))), 13)
    for b in range(2):
        assert analyse(Sequential((Window(3), Strided(3))), legal_from_mask(mask), b=b) == alone


def test_cycles_and_heads():
    draw = torch.rand(1, 3, 7, 7) < 0.4
    legal = legal_full(1, 7, 7)
    one = connections(Listed(draw), legal, heads=3)
    assert torch.equal(one[0], draw[0].any(0))
    nested = Sequential((Window(0), Sequential((Window(1), Window(2), Window(3))) | Window(1)))
    assert len(connections(nested, legal)) == 6
    assert len(connections(Sequential((Window(0), Window(1))), legal, layers=4)) == 4
    mixed = Multihead((Window(0), Strided(2)))
    assert torch.equal(connections(mixed, legal)[0], connections(Strided(2), legal)[0])


def test_the_table_has_a_line_for_every_pattern():
    rows = connectivity_rows({"window(3)": Window(1), "a | b": BlockDiagonal(2), "full": ~Nothing()}, 8)
    lines = connectivity_table(rows).splitlines()
    assert len(lines) == 5
    assert r"| a \| b |" in lines[3]
    assert lines[2] == "| window(3) | 1 | 2.8 | yes | yes (identity) | 7 | yes |"
    assert "| never | no |" in lines[3]
    assert rows["full"].pairs_per_token == 8


@pytest.mark.unchecked
def test_what_is_no_self_attention_is_refused():
    with pytest.raises(PatternError, match="self-attention"):
        analyse(Window(1), legal_full(1, 3, 5))
    with pytest.raises(PatternError, match="self-attention"):
        analyse(Window(1), legal_full(1, 3, 3, query_offset=2))
    real = torch.tensor([[True, False]])
    with pytest.raises(PatternError, match="self-attention"):
        analyse(Window(1), Legal(real, ~real))
    with pytest.raises(PatternError, match="at least one real token"):
        analyse(Window(1), legal_from_mask(torch.zeros(1, 4, dtype=torch.bool)))
    with pytest.raises(PatternError, match="at least one layer"):
        analyse(Window(1), legal_full(1, 3, 3), layers=0)
    with pytest.raises(ShapeError, match="square"):
        hamiltonian_path(torch.ones(2, 3, dtype=torch.bool))


def test_the_page_holds_every_pattern():
    """docs/connectivity.md, on a shorter text: every line is there, and nothing is left unknown."""
    page = connectivity_page.make_page(64)
    for text in (*connectivity_page.PATTERNS, *connectivity_page.CAUSAL_ONLY):
        assert "| `{}` |".format(text.replace("|", "\\|")) in page
    tables = [line for line in page.splitlines() if line.startswith("| ")]
    assert not any("unknown" in line or "none" in line for line in tables)
    assert sum("`sparse_transformer('fixed', 16)`" in line for line in tables) == 4
    cut_short = page[page.index("## 58 tokens") : page.index("## Depth")].splitlines()
    assert [line.split(" | ")[-2] for line in cut_short if "sparse_transformer" in line] == ["2", "never"]
