"""Baselines with known values: probabilities sum to one, noise costs its entropy, repetition costs little."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.train.baselines import KneserNey, measure_baselines, xz_bytes


def test_probabilities_after_any_context_sum_to_one() -> None:
    train = np.random.default_rng(0).integers(0, 6, 400) ** 2 % 6
    model = KneserNey(train.astype(np.uint8), 6, order=3)
    for context in ([0, 1], [5, 5], [4, 2]):
        total = sum(model.probabilities(np.array([*context, s], np.uint8))[2] for s in range(6))
        assert total == pytest.approx(1.0, abs=1e-9)


def test_a_unigram_of_order_one_is_the_interpolated_count() -> None:
    train = np.array([0] * 6 + [1] * 2 + [2] * 1, np.uint8)
    probability = KneserNey(train, 4, order=1).probabilities(np.array([0, 1, 2, 3], np.uint8))
    assert probability.sum() == pytest.approx(1.0)
    assert probability[0] > probability[1] > probability[2] > probability[3] > 0


def test_bigrams_by_hand() -> None:
    # "abab" + "ac": order 2 counts ab 2, ba 2, ac 1; continuation counts a 1 (after b), b 1, c 1
    model = KneserNey(np.array([0, 1, 0, 1, 0, 2], np.uint8), 3, order=2)
    y = 1 / (1 + 2 * 2)  # one bigram seen once, two seen twice; n3 and n4 are floored at 1
    d1, d2 = 1 - 2 * y * 2 / 1, 2 - 3 * y * 1 / 2
    unigram = 1 / 3
    expected = (2 - d2 + (d1 + d2) * unigram) / 3
    assert model.probabilities(np.array([0, 1], np.uint8))[1] == pytest.approx(expected)


def test_noise_costs_eight_bits_and_repetition_almost_none() -> None:
    noise = np.random.default_rng(0).integers(0, 256, 60_000).astype(np.uint8)
    held = np.random.default_rng(1).integers(0, 256, 4_000).astype(np.uint8)
    assert KneserNey(noise, 256).bits(held) / len(held) == pytest.approx(8.0, abs=0.1)
    text = np.frombuffer(b"the cat sat on the mat. " * 400, np.uint8)
    assert KneserNey(text, 256).bits(text[:480]) / 480 < 0.3


def test_a_higher_order_helps_on_text_and_all_figures_are_per_byte() -> None:
    train = "".join(f"item {n} costs {n * 7 % 100} coins\n" for n in range(3000)).encode()
    held = "".join(f"item {n} costs {n * 7 % 100} coins\n" for n in range(3000, 3100)).encode()
    symbols = np.frombuffer(train, np.uint8), np.frombuffer(held, np.uint8)
    bits = [KneserNey(symbols[0], 256, order=n).bits(symbols[1]) for n in (1, 3, 5)]
    assert bits[0] > bits[1] > bits[2]
    result = measure_baselines(train, held, *symbols, 256)
    assert result.bytes_5gram == result.tokens_5gram == pytest.approx(bits[2] / len(held))
    assert result.xz == pytest.approx(8 * xz_bytes(held) / len(held))
    assert 0 < result.xz_primed < result.xz < 8
