import os
from random import Random

from kvferry.core import entropy
from kvferry.core.clock import SYSTEM_CLOCK, ManualClock, simulated_time


def _draws() -> list[object]:
    return [
        entropy.token_bytes(8),
        entropy.token_hex(4),
        entropy.token_bits(63),
        entropy.secret_hex(),
        entropy.RANDOM.random(),
    ]


def test_a_simulation_decides_all_randomness_and_gives_it_back() -> None:
    with entropy.simulated_entropy(Random(1)):
        first = _draws()
    with entropy.simulated_entropy(Random(1)):
        again = _draws()
    assert first == again
    assert entropy.token_bytes is os.urandom
    assert not {str(one) for one in _draws()} & {str(one) for one in first}


def test_bits_are_as_many_as_asked_for() -> None:
    drawn = [entropy.token_bits(63) for _ in range(200)]
    assert all(0 <= one < 2**63 for one in drawn)
    assert max(drawn) >= 2**62
    assert {entropy.token_bits(1) for _ in range(100)} == {0, 1}


def test_names_are_not_repeated() -> None:
    names = [entropy.secret_hex() for _ in range(1000)]
    assert len(set(names)) == 1000
    assert all(len(name) == 32 for name in names)


def test_a_simulation_decides_the_systems_time() -> None:
    clock = ManualClock(5.0)
    with simulated_time(clock):
        clock.advance(1.0)
        assert (SYSTEM_CLOCK.monotonic(), SYSTEM_CLOCK.wall()) == (6.0, 6.0)
    assert SYSTEM_CLOCK.wall() > 1e9
