"""One MoE forward at any world size and in every form: N local ranks give each token exactly what one rank gives it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_ranks import EXPERTS, HIDDEN, TOP_K, make_exchange, make_layer, placement, stages, tokens

from coterie.comm.exchange import Exchange, FormName, FormPolicy
from coterie.comm.live import Rates
from coterie.comm.local import LocalTransport
from coterie.comm.mesh import Mesh
from coterie.comm.transport import CountMismatch, TransportError
from coterie.kernels.native import NativeKernels
from coterie.model.overlap import drive_all, interleave
from coterie.observe.expert_load import ExpertLoad

KERNELS = NativeKernels()
SIZES = [(13,), (7, 6), (13, 0), (1, 0, 9, 3), (0, 0, 0, 13), (0, 0, 0, 0)]
FORMS: dict[str, FormPolicy] = {
    "flat": FormPolicy(),
    "fixed": FormPolicy(capacity=13),
    "fixed, too small": FormPolicy(capacity=2),
    "hierarchical": FormPolicy("hierarchical"),
    "hierarchical, fixed": FormPolicy("hierarchical", capacity=4),
    "flat, far first": FormPolicy(piece_bytes=1),
    "hierarchical, in pieces": FormPolicy("hierarchical", piece_bytes=1),
    "hierarchical, in two pieces": FormPolicy("hierarchical", piece_bytes=700),
    "hierarchical, never in pieces": FormPolicy("hierarchical", piece_bytes=0),
}
REDUCED: list[FormName] = ["flat-reduced", "hierarchical-reduced"]


def make_kernels(name: str) -> Any:
    if name == "native":
        return KERNELS
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    from coterie.kernels.reference import ReferenceKernels

    return ReferenceKernels()


def one_rank(kernels: Any, x: np.ndarray, skew: str = "") -> tuple[np.ndarray, np.ndarray]:
    """The layer's output without an exchange, and the expert counts."""
    load = ExpertLoad([0], EXPERTS, kernels.to_host)
    (out,) = drive_all([stages(kernels, make_layer(kernels, None, load, skew), x)])
    return kernels.to_host(out), load.read()[0]


class Ranks:
    """A group of local ranks with one layer each."""

    def __init__(self, size: int, policy: FormPolicy, *, copies: bool, kernels: Any = KERNELS, skew: str = "") -> None:
        nodes = 2 if policy.sized.startswith("hier") or policy.piece_bytes == 1 else 1
        self.kernels = kernels
        table = placement(size, min(nodes, size), copies=copies)
        self.exchanges = [make_exchange(transport, table, policy) for transport in LocalTransport.group(size)]
        self.loads = [ExpertLoad([0], EXPERTS, kernels.to_host) for _ in range(size)]
        self.layers = [
            make_layer(kernels, exchange, load, skew) for exchange, load in zip(self.exchanges, self.loads, strict=True)
        ]

    def run(self, parts: list[np.ndarray], most: int | None = None) -> list[np.ndarray]:
        """Every rank's rows through its layer."""
        running = [stages(self.kernels, layer, x, most) for layer, x in zip(self.layers, parts, strict=True)]
        outputs = [self.kernels.to_host(out) for out in drive_all(running)]
        assert all(exchange.pool.lent == 0 for exchange in self.exchanges), "a buffer was not given back"
        return outputs


def parts_of(x: np.ndarray, sizes: tuple[int, ...]) -> list[np.ndarray]:
    return np.split(x, np.cumsum(sizes)[:-1])


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_ranks_equal_one_rank(sizes: tuple[int, ...], form: str, copies: bool) -> None:
    if form.startswith("hier") and len(sizes) == 1:
        pytest.skip("one rank has one node")
    x = tokens(sum(sizes))
    whole, counts = one_rank(KERNELS, x)
    ranks = Ranks(len(sizes), FORMS[form], copies=copies)
    for _ in range(2):  # the second batch knows the counts of the first
        np.testing.assert_array_equal(np.concatenate(ranks.run(parts_of(x, sizes))), whole)
    assert counts.sum() == len(x) * TOP_K
    np.testing.assert_array_equal(sum(load.read()[0] for load in ranks.loads), 2 * counts)


@pytest.mark.parametrize("form", ["flat", "fixed", "hierarchical"])
@pytest.mark.parametrize("sizes", [(13,), (7, 6), (1, 0, 9, 3)], ids=str)
def test_the_reference_backend(sizes: tuple[int, ...], form: str) -> None:
    if form == "hierarchical" and len(sizes) == 1:
        pytest.skip("one rank has one node")
    kernels = make_kernels("reference")
    x = tokens(sum(sizes))
    whole, _ = one_rank(kernels, x)
    got = np.concatenate(Ranks(len(sizes), FORMS[form], copies=True, kernels=kernels).run(parts_of(x, sizes)))
    assert np.abs(whole).max() > 0.1
    np.testing.assert_allclose(got, whole, atol=1e-5)


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("form", REDUCED)
@pytest.mark.parametrize("sizes", SIZES[1:], ids=str)
def test_reduced_forms_are_close_and_repeatable(sizes: tuple[int, ...], form: FormName, copies: bool) -> None:
    x = tokens(sum(sizes))
    whole, _ = one_rank(KERNELS, x)
    first, second = (
        np.concatenate(Ranks(len(sizes), FormPolicy(form), copies=copies).run(parts_of(x, sizes))) for _ in range(2)
    )
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, whole, atol=1e-5)


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 9), min_size=4, max_size=4),
    st.sampled_from(["", "one expert", "one rank"]),
    st.sampled_from(sorted(FORMS)),
    st.booleans(),
    st.integers(0, 1000),
)
def test_any_batch_under_any_skew(sizes: list[int], skew: str, form: str, copies: bool, seed: int) -> None:
    x = tokens(sum(sizes), seed)
    whole, _ = one_rank(KERNELS, x, skew)
    ranks = Ranks(4, FORMS[form], copies=copies, skew=skew)
    got = ranks.run(parts_of(x, tuple(sizes)), max(sizes) if seed % 2 else None)
    np.testing.assert_array_equal(np.concatenate(got), whole)


@pytest.mark.parametrize("steps", [80, pytest.param(1000, marks=pytest.mark.slow)])
def test_alternating_forms_a_thousand_times(steps: int) -> None:
    """The forms share one group and one pool of buffers, and two micro-batches are in flight."""
    world = LocalTransport.group(4)
    table = placement(4, 2, copies=True)
    policies = [FormPolicy("hierarchical", piece_bytes=1), FormPolicy(capacity=3), FormPolicy(piece_bytes=1),
                FormPolicy("hierarchical", 9)]  # fmt: skip
    exchanges = [[make_exchange(transport, table, policy) for transport in world] for policy in policies]
    for group in exchanges[1:]:
        for exchange, first in zip(group, exchanges[0], strict=True):
            exchange.pool = first.pool
    layers = [[make_layer(KERNELS, exchange, None) for exchange in group] for group in exchanges]
    rng = np.random.default_rng(0)
    batches = []
    for index in range(8):
        sizes = rng.integers(0, 6, 4)
        x = tokens(int(sizes.sum()), index)
        batches.append((np.split(x, np.cumsum(sizes)[:-1]), one_rank(KERNELS, x)[0]))
    for step in range(steps):
        (first, want), (second, want_second) = batches[step % 8], batches[(step * 3 + 1) % 8]
        form, other = layers[step % 4], layers[(step // 4) % 4]
        pairs = [
            interleave([stages(KERNELS, form[r], first[r]), stages(KERNELS, other[r], second[r])], lambda index: None)
            for r in range(4)
        ]
        results = drive_all(pairs)
        np.testing.assert_array_equal(np.concatenate([a for a, _ in results]), want)
        np.testing.assert_array_equal(np.concatenate([b for _, b in results]), want_second)
    assert all(exchange.pool.lent == 0 for exchange in exchanges[0])
    assert exchanges[0][0].pool.allocated_bytes <= 10 << 16


@pytest.mark.parametrize(
    ("form", "copies", "dispatch", "back"),
    [
        ("flat", False, 2, 1),
        ("flat", True, 3, 1),
        ("fixed", True, 1, 1),
        ("fixed, too small", False, 3, 1),
        ("hierarchical", False, 3, 1),
        ("hierarchical", True, 3, 1),
        ("hierarchical, never in pieces", False, 3, 1),
        ("flat, far first", False, 2, 5),
        ("hierarchical, in pieces", False, 1 + 4 + 1 + 4, 5),
        ("flat-reduced", False, 2, 1),
        ("hierarchical-reduced", True, 3, 2),
    ],
)
def test_number_of_exchanges(form: str, copies: bool, dispatch: int, back: int) -> None:
    """A form may not cost more exchanges than it says: each yield is one. In pieces: four for other nodes, and one for
    the own node; hierarchical passes each of the four on inside."""
    policy = FORMS[form] if form in FORMS else FormPolicy(form)  # type: ignore[arg-type]
    ranks = Ranks(4, policy, copies=copies)
    x = [tokens(9, rank) for rank in range(4)]
    running = [stages(KERNELS, layer, rows) for layer, rows in zip(ranks.layers, x, strict=True)]
    rounds = 0
    while True:
        try:
            for generator in running:
                next(generator)
            rounds += 1
        except StopIteration:
            break
    assert rounds == dispatch + back


def test_copies_share_the_rows_of_their_expert() -> None:
    """All tokens want expert 5, which has three copies: by this batch's counts, and without them by the last one's."""
    for form, more in (("flat", 0), ("fixed", 6), ("hierarchical", 6)):
        ranks = Ranks(4, FORMS[form], copies=True, skew="one expert")
        x = [tokens(12, rank) for rank in range(4)]
        ranks.run(x)
        seen: list[np.ndarray] = []
        for layer in ranks.layers:
            object.__setattr__(layer, "experts", Spy(layer.experts, seen))
        ranks.run(x)
        computed = np.concatenate(seen)
        slots = np.flatnonzero(ranks.exchanges[0].placement.slot_to_expert[0] == 5)
        assert computed[slots].sum() == 48
        assert computed[slots].min() > 0
        loads = computed.reshape(4, 3).sum(1)
        with_copy = loads[[0, 2, 3]]  # rank 1 has none
        assert loads.sum() == 144 and with_copy.max() <= -(-with_copy.sum() // 3) + more, f"{form}: {loads}"


def test_a_slow_rank_gets_less_and_tokens_do_not_change() -> None:
    ranks = Ranks(4, FORMS["flat"], copies=True, skew="one expert")
    x = [tokens(12, rank) for rank in range(4)]
    whole, _ = one_rank(KERNELS, np.concatenate(x), "one expert")
    seen: list[np.ndarray] = []
    for rank, layer in enumerate(ranks.layers):
        object.__setattr__(layer, "experts", Spy(layer.experts, seen))
        exchange = ranks.exchanges[rank]
        # rank 2 is four times as slow; it holds one of the three copies of expert 5
        exchange.live.computed = lambda *work, live=exchange.live, slow=rank == 2: (
            setattr(  # type: ignore[method-assign]
                live, "_spent", 400.0 if slow else 100.0
            )
            or setattr(live, "_rows", 1.0)
        )
    slot = np.flatnonzero(ranks.exchanges[0].placement.slot_to_expert[0] == 5)[1]
    assert slot // 3 == 2
    shares = []
    for _ in range(80):
        seen.clear()
        np.testing.assert_array_equal(np.concatenate(ranks.run(x)), whole)
        shares.append(int(np.concatenate(seen)[slot]))
    assert shares[0] > 10, "three copies share 48 rows, and the ranks' other work is about equal"
    assert shares[-1] < shares[0] / 2, shares


class ByRates:
    """Chooses by the rate between nodes alone."""

    def entered(self, form: str, pairs: np.ndarray) -> None: ...

    def heard(self, nanoseconds: int) -> None: ...

    def conclude(self, rates: Rates, policy: FormPolicy) -> FormPolicy:
        return FormPolicy("hierarchical" if 0 < rates.between < 1e6 else "flat")


def test_the_form_follows_the_links() -> None:
    """When rows between nodes begin to crawl, all ranks go over to the hierarchical form in the same step."""
    ranks = Ranks(4, FormPolicy("hierarchical"), copies=False)
    slow: list[bool] = []
    for exchange in ranks.exchanges:
        exchange.policy = FormPolicy()
        exchange.chooser = ByRates()
        exchange.live.carried = lambda inside, between, ns, live=exchange.live: setattr(  # type: ignore[method-assign]
            live, "_best", [1e9, 1e5 if slow else 1e8]
        )
    x = [tokens(3, rank) for rank in range(4)]
    whole, _ = one_rank(KERNELS, np.concatenate(x))
    forms = []
    for step in range(200):
        if step == 80:
            slow.append(True)
        np.testing.assert_array_equal(np.concatenate(ranks.run(x)), whole)
        forms.append({exchange.policy.sized for exchange in ranks.exchanges})
    assert forms[79] == {"flat"} and forms[-1] == {"hierarchical"} and all(len(found) == 1 for found in forms)
    assert ranks.exchanges[3].adaptations == 1


def test_an_infinity_stays_its_own() -> None:
    """Sums of unequal length are padded; another token's infinite output must not reach them."""
    for form in REDUCED:
        x = np.concatenate([np.full((1, HIDDEN), 1e38, np.float32), tokens(12)])
        (out,) = drive_all([stages(KERNELS, make_layer(KERNELS, None, None), x[1:])])
        got = np.concatenate(Ranks(4, FormPolicy(form), copies=True).run(parts_of(x, (4, 3, 3, 3))))
        assert not np.isfinite(got[0]).all()
        np.testing.assert_allclose(got[1:], out, atol=1e-5)


class Spy:
    """Experts that note how many rows each local slot computes."""

    def __init__(self, inner: Any, seen: list[np.ndarray]) -> None:
        self.inner, self.seen, self.kernels = inner, seen, inner.kernels

    def forward(self, rows: Any, counts: Any) -> Any:
        self.seen.append(np.array(counts))
        return self.inner.forward(rows, counts)


def test_a_placement_installed_between_steps() -> None:
    ranks = Ranks(4, FORMS["flat"], copies=False)
    x = [tokens(5, rank) for rank in range(4)]
    before = ranks.run(x)
    other = placement(4, 1, copies=True)
    for index, exchange in enumerate(ranks.exchanges):
        exchange.install(other)
        ranks.layers[index] = make_layer(KERNELS, exchange, None)
    for old, new in zip(before, ranks.run(x), strict=True):
        np.testing.assert_array_equal(old, new)


def test_ranks_in_different_exchanges_are_refused() -> None:
    ranks = Ranks(2, FORMS["flat"], copies=False)
    ranks.exchanges[1].install(ranks.exchanges[1].placement)
    with pytest.raises(TransportError, match=r"rank 1 is in another exchange: flat, layer 0, placement 1.*placement 0"):
        ranks.run([tokens(2), tokens(2)])
    world = LocalTransport.group(2)
    layers = [
        make_layer(KERNELS, make_exchange(transport, placement(2, 1, copies=False), policy), None)
        for transport, policy in zip(world, [FormPolicy(), FormPolicy("flat-reduced")], strict=True)
    ]
    with pytest.raises(TransportError, match="another exchange"):
        drive_all([stages(KERNELS, layer, tokens(2)) for layer in layers])


def test_a_payload_that_is_not_what_was_announced() -> None:
    """Slots that changed after the counts were gathered are seen before outputs are sent."""
    ranks = Ranks(2, FORMS["flat"], copies=False)
    first, second = (stages(KERNELS, layer, tokens(4)) for layer in ranks.layers)
    next(first), next(second)
    real = ranks.exchanges[0].read_counts

    def lie(*arguments: Any) -> Any:
        counts = real(*arguments)
        return counts._replace(pairs=counts.pairs + 1)

    ranks.exchanges[0].read_counts = lie  # type: ignore[method-assign]
    next(first), next(second)
    with pytest.raises(CountMismatch, match="outputs to return"):
        next(first)


def test_what_an_exchange_refuses() -> None:
    world = LocalTransport.group(4)
    with pytest.raises(TransportError, match="one of flat, flat-reduced, hier"):
        FormPolicy("ring")  # type: ignore[arg-type]
    with pytest.raises(TransportError, match="at least 0"):
        FormPolicy(capacity=-1)
    with pytest.raises(TransportError, match="two nodes of equal size"):
        make_exchange(world[0], placement(4, 1, copies=False), FormPolicy("hierarchical"))
    with pytest.raises(TransportError, match="placement for 2 ranks, and there are 4"):
        Exchange(Mesh.of(world[0], [0, 0, 0, 0]), placement(2, 1, copies=False))


def test_one_waiting_rank_is_an_error() -> None:
    ranks = Ranks(2, FORMS["flat"], copies=False)
    with pytest.raises(AssertionError, match="every rank waits"):
        drive_all([stages(KERNELS, ranks.layers[0], tokens(1))])


def test_a_handle_is_spent_once() -> None:
    layer = make_layer(KERNELS, None, None)
    x = tokens(3)
    routed = layer.router.route(x)
    (dispatched,) = drive_all([layer.dispatcher.dispatch(x, routed)])
    outputs = layer.experts.forward(dispatched.rows, dispatched.counts)
    drive_all([layer.dispatcher.combine(outputs, dispatched, routed, None)])
    with pytest.raises(AssertionError, match="combined once"):
        drive_all([layer.dispatcher.combine(outputs, dispatched, routed, None)])
