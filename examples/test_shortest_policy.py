"""How a package shows that its router policy does what a policy must: `pytest examples`."""

from kvferry.testing.policy import Fleet, PolicyContract, prompt_traits


class TestShortest(PolicyContract):
    policy = "shortest_policy:Shortest"
    options = ("decode_tokens=300",)


def test_who_has_less_to_do_is_taken() -> None:
    fleet = Fleet("shortest_policy:Shortest", 2, 2)
    fleet.prefills[0].load.prefill_tokens = 10
    assert fleet.choose(prompt_traits(1)).prefill is fleet.prefills[1]
