"""The mechanism of a training's next step, and how many steps its ε allows."""

import math
from dataclasses import replace

from plpkg.clipping.training.accounting import Mechanism
from plpkg.clipping.training.ledger import Ledger, Life


class Budget:
    """The steps of a training: what each is made with, what it spends, and how many ``max_epsilon`` allows.

    C and σ may be functions of the step's number, and a function may say something else whenever it is asked. So the
    next step's are asked once (:attr:`now`). And how many steps are allowed is planned with a table of what σ is said
    to be in the steps to come. Where the next step's σ turns out to be another one, or another training has released
    something of the same parameters, the plan is made again.

    Parameters
    ----------
    mechanism
        With numbers or functions for C and σ.
    ledger
        Where steps are written down, other trainings' too.
    limit
        ``(max_epsilon, delta)``; ``None``: any number of steps is allowed.

    Attributes
    ----------
    life, steps
        In which life the next step is taken, and its number.
    max_steps
        The number of the first step that ``max_epsilon`` does not allow.
    """

    def __init__(self, mechanism: Mechanism, ledger: Ledger, limit: tuple[float, float] | None) -> None:
        self.mechanism = mechanism
        self._ledger = ledger
        self._limit = limit

    def enter(self, life: Life, steps: int) -> None:
        """Go on in a life, with the step of this number."""
        self.life = life
        self.steps = steps
        self._now: Mechanism | None = None
        self._plan()

    @property
    def now(self) -> Mechanism:
        """The mechanism of the next step, the same until the step is spent."""
        if self._now is None:
            self._now = self.mechanism.at(self.steps)
            if self._limit and self._now.sigma != float(self._planned_sigma(self.steps)):
                self._plan()
        return self._now

    @property
    def done(self) -> bool:
        """Whether another step would spend more than ``max_epsilon``."""
        if self._limit and self._steps_of_others() != self._planned_beside:
            self._plan()
        return self.steps >= self.max_steps

    def spend(self) -> None:
        """Write down the step that is about to be released."""
        self.life.spend(self.now.sigma, self.mechanism.sample_rate)
        self.steps += 1
        self.life.steps = self.steps
        self._now = None
        self._ledger.record(self.life)

    def _plan(self) -> None:
        """Count the steps that ``max_epsilon`` allows, if functions go on as they say now."""
        self._planned_beside = self._steps_of_others()
        self._planned_sigmas: dict[int, float] = {}  # by step
        if self._now is not None:
            self._planned_sigmas[self.steps] = self._now.sigma
        if self._limit is None:
            self.max_steps = math.inf
            return
        planned = self.mechanism
        if callable(planned.noise_multiplier):
            planned = replace(planned, noise_multiplier=self._planned_sigma)
        epsilon, delta = self._limit
        self.max_steps = planned.steps_within(epsilon, delta, self.steps, self._ledger.spent)

    def _planned_sigma(self, step: int) -> float:
        """σ of a step as the plan has it; a function is asked once for each plan."""
        sigma = self.mechanism.noise_multiplier
        if not callable(sigma):
            return sigma
        if step not in self._planned_sigmas:
            self._planned_sigmas[step] = sigma(step)
        return self._planned_sigmas[step]

    def _steps_of_others(self) -> int:
        """How many steps other trainings of these parameters have taken."""
        everybodys = sum(count for *_, count in self._ledger.spent)
        ours = sum(count for *_, count in self.life.spent)
        return everybodys - ours
