"""What one leg adds to the load of its instance, from when it is sent until it is over."""

from __future__ import annotations

from kvferry.router.instances.load import InstanceLoad


class Work:
    """`uncached`: tokens of the prompt that the instance probably does not have; `computes`: it will compute them;
    `decodes`: it will answer. `ahead`: tokens that were still to be computed there before. `now` is on the policy's
    clock."""

    __slots__ = ("_computing", "_load", "_over", "ahead", "computes", "decodes", "num_beside", "uncached")

    def __init__(self, load: InstanceLoad, uncached: int, now: float, *, computes: bool, decodes: bool) -> None:
        self._load, self.uncached, self.computes, self.decodes = load, uncached, computes, decodes
        self.num_beside = 0.0
        """Answers that ran on the instance meanwhile, this one included: when it began, in the end the mean with the
        end."""
        self._computing, self._over = computes, False
        self.ahead = load.sent(uncached, now, computes=computes, decodes=decodes)

    def answered(self) -> None:
        """The answer has begun: the prompt is computed."""
        self.num_beside = self._load.answered(self.uncached if self._computing else None)
        self._computing = False

    def end(self) -> None:
        """It is over, however it ended. May be called several times."""
        if self._over:
            return
        self._over, before = True, self.num_beside
        self.answered()
        self.num_beside = (before + self.num_beside) / 2
        self._load.ended(decodes=self.decodes)
