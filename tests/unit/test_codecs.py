"""The codecs against models in NumPy, bit for bit, with each level of vector instructions that this processor has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from horovodish import _native

Floats = npt.NDArray[np.float32]
testing = _native.testing
SHARE, SEED = 0.01, 7
LEVELS = 3
BLOCKS = {"int8": 256, "int4": 64, "onebit": 4096, "ternary": 1024, "topk": 4096, "randomk": 4096}
TINY, LARGEST, EPSILON = (getattr(np.finfo(np.float32), name) for name in ("tiny", "max", "eps"))


def mean_of(values: Floats, count: int) -> np.float32:
    """The mean of `count` values, the others being 0: 16 sums of every 16th one in float64, added up at the end."""
    lanes = np.zeros(16)
    for begin in range(0, len(values), 16):
        part = values[begin : begin + 16]
        lanes[: len(part)] += part
    total = 0.0
    for lane in lanes:
        total += lane
    return np.float32(total / count)


def planes(symbols: Any, bits: int) -> bytes:
    """Symbol i in byte i % stride."""
    stride = -(-len(symbols) * bits // 8)
    out = np.zeros(stride, np.uint8)
    for index, symbol in enumerate(symbols):
        out[index % stride] |= int(symbol) << (bits * (index // stride))
    return out.tobytes()


def stepped(values: Floats, levels: int, mask: int = 0xFFFFFFFF) -> tuple[np.float32, Any]:
    """The scale, with only the bits of `mask`, and whole multiples of it."""
    most = LARGEST / np.float32(levels) * (1 - EPSILON)
    exact: Floats = np.minimum(np.abs(values).max(keepdims=True) / np.float32(levels), most)
    scale = (exact.view(np.uint32) & np.uint32(mask)).view(np.float32)[0]
    if scale < TINY:
        return np.float32(0), np.zeros(len(values), np.int64)
    return scale, np.rint(values * (np.float32(1) / scale)).astype(np.int64)


def int8(values: Floats, seed: int) -> tuple[bytes, Floats]:
    scale, steps = stepped(values, 127)
    return scale.tobytes() + steps.astype(np.int8).tobytes(), steps.astype(np.float32) * scale


def int4(values: Floats, seed: int) -> tuple[bytes, Floats]:
    scale, steps = stepped(values, 7, 0xFFFF0000)
    padding = len(values) % 2  # the last half byte of an odd block is not used
    symbols = [*(steps + 8), *[0] * padding]
    return scale.tobytes()[2:] + planes(symbols, 4), steps.astype(np.float32) * scale


def onebit(values: Floats, seed: int) -> tuple[bytes, Floats]:
    mean = mean_of(np.abs(values), len(values))
    return mean.tobytes() + planes(np.signbit(values), 1), np.copysign(mean, values)


def ternary(values: Floats, seed: int) -> tuple[bytes, Floats]:
    magnitudes = np.abs(values)
    threshold = np.float32(0.7) * mean_of(magnitudes, len(values))
    above = magnitudes > threshold
    scale = np.float32(0)
    if above.any():
        scale = mean_of(np.where(above, magnitudes, np.float32(0)), above.sum())
    signs = np.where(above, np.sign(values), np.float32(0))
    return scale.tobytes() + planes((signs > 0) + 2 * (signs < 0), 2), signs * scale


def kept(count: int) -> int:
    return min(max(int(np.ceil(SHARE * count)), 1), count)


def topk(values: Floats, seed: int) -> tuple[bytes, Floats]:
    places = np.sort(np.argsort(-np.abs(values), kind="stable")[: kept(len(values))])
    decoded = np.zeros_like(values)
    decoded[places] = values[places]
    return values[places].tobytes() + places.astype(np.uint16).tobytes(), decoded


def drawn(seed: int, counter: int) -> int:
    most = 2**64 - 1
    bits = (seed + (counter + 1) * 0x9E3779B97F4A7C15) & most
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & most
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & most
    return bits ^ (bits >> 31)


def randomk(values: Floats, seed: int) -> tuple[bytes, Floats]:
    cells, count, own = kept(len(values)), len(values), drawn(seed, 0)
    begins = [cell * count // cells for cell in range(cells + 1)]
    places = [begins[cell] + drawn(own, cell) % (begins[cell + 1] - begins[cell]) for cell in range(cells)]
    decoded = np.zeros_like(values)
    decoded[places] = values[places]
    return values[places].tobytes(), decoded


MODELS: dict[str, Callable[[Floats, int], tuple[bytes, Floats]]] = {
    each.__name__: each for each in (int8, int4, onebit, ternary, topk, randomk)
}


def given_values() -> dict[str, Floats]:
    random = np.random.default_rng(1)
    normal = random.standard_normal(9000).astype(np.float32)
    mixed = np.concatenate([normal[:300], np.zeros(5000, np.float32), normal[:3] * TINY / 8, [-0.0, 1e38]])
    return {
        **{f"{count} values": normal[:count] for count in (1, 7, 255, 256, 257, 1025, 4095, 4096, 9000)},
        "zeros": np.zeros(5000, np.float32),
        "denormal": normal[:1000] * TINY / 2**10,
        "mixed": mixed.astype(np.float32),
        "equal": np.full(5000, -3, np.float32),
        "largest": np.full(5000, -LARGEST, np.float32),
        "large": np.clip(normal[:5000], -1, 1) * LARGEST,
        "halfway": np.arange(-127, 128, dtype=np.float32) / 2,
    }


@pytest.mark.parametrize("kind", MODELS)
def test_codes_errors_and_sums_are_those_of_the_model_on_every_processor(kind: str) -> None:
    tried = 0
    for name, values in given_values().items():
        blocks = range(0, len(values), BLOCKS[kind])
        coded = [MODELS[kind](values[begin : begin + BLOCKS[kind]], SEED + begin) for begin in blocks]
        code, decoded = b"".join(part for part, _ in coded), np.concatenate([part for _, part in coded])
        others = np.linspace(-1, 1, len(values), dtype=np.float32)
        for level, adds in ((level, adds) for level in range(LEVELS) for adds in (False, True)):
            given = {"values": values.tobytes(), "others": others.tobytes() if adds else None}
            made = testing.code_with(level=level, kind=_native.CODECS[kind], share=SHARE, seed=SEED, **given)
            if made is None:  # the processor lacks the instructions
                continue
            case, tried = f"{name}, level {level}", tried + 1
            assert made[0] == code, case
            assert np.isfinite(decoded).all(), case
            np.testing.assert_array_equal(np.frombuffer(made[1], np.float32), values - decoded, case, strict=True)
            result = others + decoded if adds else decoded
            np.testing.assert_array_equal(np.frombuffer(made[2], np.float32), result, case, strict=True)
    assert tried >= 2 * len(given_values())


@pytest.mark.parametrize("kind", MODELS)
def test_a_block_that_is_not_finite_decodes_to_nan_and_leaves_the_others_alone(kind: str) -> None:
    block = BLOCKS[kind]
    values = np.random.default_rng(2).standard_normal(3 * block + 5).astype(np.float32)
    for place, bad in ((block + 3, np.nan), (2 * block - 1, np.inf), (block, -np.inf)):
        given = values.copy()
        given[place] = bad
        made = testing.code_with(
            level=0, kind=_native.CODECS[kind], share=SHARE, seed=SEED, values=given.tobytes(), others=values.tobytes()
        )
        assert made is not None
        for floats in made[1:]:
            is_nan = np.isnan(np.frombuffer(floats, np.float32))
            assert is_nan[block : 2 * block].all()
            assert not is_nan[:block].any()
            assert not is_nan[2 * block :].any()
